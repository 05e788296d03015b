"""CUDA C++ that NVRTC compiles at first use, cached on disk and launched on a CUDA stream.

NVRTC and ``cuda.bindings`` both come with torch's CUDA builds. So installing lowbit compiles nothing and needs no
compiler. `disk_cache` keeps a compiled kernel under its source, the compiler's version and the GPU's architecture.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import struct
import threading
from typing import Any

import torch

from lowbit_kernels.runtime import disk_cache
from lowbit_kernels.runtime.compiling import compiling

STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a block may have without setting an attribute of the kernel."""
SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a block may have on compute capability 9.0."""
BLOCK_SHARED = 1024
"""Bytes of shared memory that each block takes besides its own."""
variants = functools.lru_cache(maxsize=1024)
"""Decorates functions that make the kernels of an op. A user's tables and group sizes make any number of variants. A
`Kernel` that leaves the cache stays loaded, since CUDA graphs may hold it."""
OPTIONS = ("--std=c++17", "--ftz=true", "--prec-sqrt=false", "--prec-div=false")


@functools.cache
def is_available() -> bool:
    """True if kernels can be compiled for this machine's GPUs: NVIDIA GPUs, with ``cuda.bindings`` installed."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return importlib.util.find_spec("cuda.bindings") is not None


def runs_on_hopper(device: torch.device) -> bool:
    """True if kernels for sm_90a can be compiled here and run on this device."""
    return device.type == "cuda" and is_available() and capability(device) == (9, 0)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device. Cached, because torch's query takes 10 us."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def cuda_version() -> tuple[int, ...]:
    """The CUDA release that torch is built for, such as (12, 9); (0, 0) without CUDA."""
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def float_word(x: float) -> int:
    """The word of 32 bits that passes a float to a kernel."""
    return int.from_bytes(struct.pack("<f", x), "little")


class Kernel:
    """A kernel on one device.

    Args:
        function: the driver's handle.
        arguments: the number of parameters. A call passes device pointers and integers in 64 bits each.
        structs: how many of the first parameters are structs passed by value; a call passes their host addresses.
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster.
        overlaps: the kernel may start while the previous kernel of the stream still runs. The kernel must then wait for
            that one itself (``griddepcontrol.wait``).
    """

    def __init__(
        self,
        function: Any,
        arguments: int,
        structs: int,
        shared: int,
        cluster: int = 1,
        overlaps: bool = False,
    ) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._function = function
        self._structs = structs
        self.shared, self.cluster, self.overlaps = shared, cluster, overlaps
        self._lock = threading.Lock()
        self._values = (ctypes.c_uint64 * arguments)()
        size = ctypes.sizeof(ctypes.c_uint64)
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * arguments)(
            *(first + i * size for i in range(arguments))
        )
        if shared > STATIC_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            error, most = driver.cuFuncGetAttribute(attribute, function)
            check(error)
            # The attribute belongs to the function, so keep what another Kernel of the same function has set.
            check(driver.cuFuncSetAttribute(function, attribute, max(most, shared))[0])
        self._config = _config(shared, cluster, overlaps) if cluster > 1 or overlaps else None

    @property
    def handle(self) -> int:
        """The driver's handle, a CUfunction."""
        return int(self._function)

    def __call__(self, stream: int, grid: int, threads: int, *arguments: int) -> None:
        """Launch `grid` blocks of `threads` threads on a stream handle; the kernel's device must be current."""
        with self._lock:  # forward and backward may run in two threads
            self._values[:] = list(arguments)  # the driver copies them before it returns
            for i in range(self._structs):
                self._pointers[i] = arguments[i]
            error = self._launch(stream, grid, threads)
            if error == self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
                _make_context_current()
                error = self._launch(stream, grid, threads)
        check(error)

    def _launch(self, stream: int, grid: int, threads: int) -> Any:
        pointers = ctypes.addressof(self._pointers)
        if self._config is None:
            shape = (grid, 1, 1, threads, 1, 1)
            launch = (self._function, *shape, self.shared, stream, pointers, 0)
            return self._driver.cuLaunchKernel(*launch)[0]
        self._config.gridDimX, self._config.blockDimX = grid, threads
        self._config.hStream = stream
        return self._driver.cuLaunchKernelEx(self._config, self._function, pointers, 0)[0]


def _make_context_current() -> None:
    """For a thread, such as autograd's, whose first use of CUDA is a kernel of lowbit."""
    torch.cuda.set_device(torch.cuda.current_device())


class Module:
    """The kernels of one cubin, loaded on the current device."""

    def __init__(self, cubin: bytes) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes torch's context current
        self._cubin = cubin
        error, self._module = driver.cuModuleLoadData(cubin)
        if error == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _make_context_current()
            error, self._module = driver.cuModuleLoadData(cubin)
        check(error)

    def kernel(
        self,
        name: str,
        arguments: int,
        structs: int = 0,
        shared: int = 0,
        cluster: int = 1,
        overlaps: bool = False,
    ) -> Kernel:
        """The ``extern "C"`` kernel of that name; the other arguments are those of `Kernel`."""
        from cuda.bindings import driver

        error, function = driver.cuModuleGetFunction(self._module, name.encode())
        check(error)
        return Kernel(function, arguments, structs, shared, cluster, overlaps)


def kernel(source: str, name: str, arguments: int, arch: str = "sm_90a", **options: Any) -> Kernel:
    """The ``extern "C"`` kernel `name` of a program, compiled for `arch` and loaded on the current device; `arguments`
    and `options` are those of `Module.kernel`."""
    return _module(source, arch, torch.cuda.current_device()).kernel(name, arguments, **options)


@functools.lru_cache(maxsize=8)  # all kernels of a program are made in succession
def _module(source: str, arch: str, device: int) -> Module:
    return Module(compiled(source, arch))


def _config(shared: int, cluster: int, overlaps: bool) -> Any:
    """A launch configuration with attributes. Its grid, threads and stream are set at each launch."""
    from cuda.bindings import driver

    attributes = []
    if cluster > 1:
        size = driver.CUlaunchAttribute()
        size.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = size.value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
        attributes.append(size)
    if overlaps:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        attributes.append(early)
    config = driver.CUlaunchConfig()
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
    config.sharedMemBytes = shared
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def architecture(device: torch.device) -> str:
    """The GPU's architecture as NVRTC names it, such as ``sm_90``."""
    major, minor = capability(device)
    return f"sm_{major}{minor}"


def compiled(source: str, arch: str) -> bytes:
    """The machine code of `source` for `arch`, from the disk if it has been compiled before.

    Raises:
        RuntimeError: NVRTC rejects the source; the message holds its log.
    """
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    check(error)
    key = (".cubin", source, arch, f"{major}.{minor}", *OPTIONS)

    def make() -> bytes:
        with compiling(arch):
            return _compile(source, arch)

    return disk_cache.find_or_make(make, *key)


def _compile(source: str, arch: str) -> bytes:
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"lowbit.cu", 0, [], [])
    check(error)
    options = [option.encode() for option in (f"--gpu-architecture={arch}", *OPTIONS)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC cannot compile for {arch}:\n{log.decode(errors='replace')}")
    error, size = nvrtc.nvrtcGetCUBINSize(program)
    check(error)
    cubin = b" " * size
    (error,) = nvrtc.nvrtcGetCUBIN(program, cubin)
    check(error)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def check(error: Any) -> None:
    """Raise RuntimeError unless this result of the driver or of NVRTC is success, 0."""
    if int(error) != 0:
        raise RuntimeError(f"CUDA returned {error!r}")
