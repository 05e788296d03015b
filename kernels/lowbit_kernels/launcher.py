"""Ops of torch whose CUDA kernel is a compiled launcher (``launcher.cpp``), which takes microseconds a call.

An op that has plans (`launch_plan.Plan`) is registered twice: under its own name, and once more under `python_name`,
which always runs in Python. Once Python has run the op on a GPU, `take_over` makes the launcher its CUDA kernel. The
launcher knows no plan at first. It calls the op in Python, whose `learn` gives it the plan for the next call with
operands of the same layouts. Calls that Python cannot plan always run there: other devices than the current one, copies
of operands, empty results.

The launcher needs a C++ compiler. Without one, all calls run in Python, which warns once.
"""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from pathlib import Path

import torch

from lowbit_kernels import host_compiler, launches
from lowbit_kernels.launch_plan import Address, Buffer, Launch, Map, Plan
from lowbit_kernels.library import contiguous_strides
from lowbit_kernels.sources import program
from lowbit_kernels.warned import warn_once

# In the order of `Functions` in launcher.cpp.
TORCH_FUNCTIONS = (
    *("aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes"),
    *("aoti_torch_get_strides", "aoti_torch_get_dtype", "aoti_torch_get_device_index"),
    *("aoti_torch_empty_strided", "aoti_torch_delete_tensor_object"),
    *("torch_string_c_str", "torch_string_length", "torch_delete_string", "torch_call_dispatcher"),
)
TORCH_CUDA_FUNCTIONS = ("aoti_torch_get_current_cuda_stream",)
DRIVER_FUNCTIONS = (
    *("cuCtxGetDevice", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"),
    *("cuMemsetD8Async", "cuLaunchKernelEx", "cuTensorMapEncodeTiled"),
)

_lock = threading.Lock()
_numbers: dict[str, int] = {}
"""The launcher's number of each op that it has taken over."""


def python_name(name: str) -> str:
    """The name of the op that computes the op `name` in Python."""
    return f"{name}_in_python"


def take_over(name: str, arguments: str) -> None:
    """Make the launcher the CUDA kernel of ``lowbit::<name>``, unless it is already. Warns once if it cannot.

    Args:
        arguments: a letter for each argument of the op: t for Tensor, o for Tensor?, s for str, b for bool, d for
            ScalarType. Results are tensors.
    """
    if name in _numbers or not _is_possible():
        return
    with _lock:
        if name not in _numbers:
            _numbers[name] = register(_library(), len(_numbers), name, arguments, b"CUDA")


def learn(name: str, plan: Plan) -> None:
    """Tell the launcher, if it has called the op `name` on this thread, the plan of that call."""
    number = _numbers.get(name)
    if number is not None:
        words = encoded(plan)
        _library().learn(number, (ctypes.c_int64 * len(words))(*words))


@functools.cache
def _is_possible() -> bool:
    try:
        _library()
    except (RuntimeError, OSError, AttributeError) as error:
        warn_once(
            "launcher",
            f"products and quantizations on the GPU take more of the host's time than they need: {error}",
        )
        return False
    return True


@functools.cache
def _library() -> ctypes.CDLL:
    """The launcher, set up for CUDA. Raises RuntimeError, OSError or AttributeError where that cannot be."""
    folder = Path(torch.__file__).parent / "lib"
    addresses = [
        *addresses_of(ctypes.CDLL(str(folder / "libtorch_cpu.so")), TORCH_FUNCTIONS),
        *addresses_of(ctypes.CDLL(str(folder / "libtorch_cuda.so")), TORCH_CUDA_FUNCTIONS),
        *addresses_of(ctypes.CDLL("libcuda.so.1"), DRIVER_FUNCTIONS),
    ]
    return loaded(addresses, "cuda")


def addresses_of(library: ctypes.CDLL, names: tuple[str, ...]) -> list[int]:
    """The addresses of C functions. Raises AttributeError where the library lacks one."""
    return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names]


def loaded(addresses: list[int], device: str) -> ctypes.CDLL:
    """The compiled launcher with the functions at these addresses, for tensors on devices of this type.

    Raises:
        RuntimeError: the machine has no C++ compiler, or it cannot compile the launcher.
    """
    library = host_compiler.library(program({}, "launcher.cpp"))
    library.kernel_of.restype = ctypes.c_void_p
    library.kernel_of.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
    library.learn.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.plans_of.restype = ctypes.c_int64
    library.set_up(
        (ctypes.c_void_p * len(addresses))(*addresses),
        _torch_version(),
        getattr(_shim(), f"aoti_torch_device_type_{device}")(),
        ctypes.byref(launches.listening_now),
    )
    return library


def register(
    library: ctypes.CDLL, number: int, name: str, arguments: str, key: bytes, space: str = "lowbit"
) -> int:
    """Make the launcher the kernel of ``<space>::<name>`` for a dispatch key; `number` is its number of the op."""
    python = f"{space}::{python_name(name)}".encode()
    kernel = library.kernel_of(number, python, arguments.encode())
    entry, shim = ctypes.c_void_p(), _shim()
    error = shim.aoti_torch_library_init_impl(
        space.encode(), key, b"lowbit", 0, ctypes.byref(entry)
    )
    error = error or shim.torch_library_impl(
        entry, name.encode(), ctypes.c_void_p(kernel), _torch_version()
    )
    if error:
        raise RuntimeError(f"torch refused a kernel for {space}::{name}")
    return number


def _torch_version() -> ctypes.c_uint64:
    """torch's version as its C functions take it: a byte each for the major, the minor and the patch number."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", torch.__version__)
    assert found is not None, torch.__version__
    major, minor, patch = map(int, found.groups())
    return ctypes.c_uint64(major << 56 | minor << 48 | patch << 40)


@functools.cache
def _shim() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


# ---- plans as numbers, which `Reader` in launcher.cpp reads ---------------------------------------------------------


def encoded(plan: Plan) -> list[int]:
    """The plan as 64-bit integers."""
    words: list[int] = []
    for buffers in (plan.results, plan.scratch):
        words.append(len(buffers))
        for buffer in buffers:
            words += _buffer(buffer)
    words.append(len(plan.launches))
    for launch in plan.launches:
        words += _launch(launch)
    return words


def _buffer(buffer: Buffer) -> list[int]:
    strides = contiguous_strides(buffer.shape)
    zeroed = buffer.nbytes if buffer.zeroed else 0
    return [_dtype(buffer.dtype), len(buffer.shape), *buffer.shape, *strides, zeroed]


def _launch(launch: Launch) -> list[int]:
    kernel = launch.kernel
    words = [kernel.handle, launch.grid, launch.threads, kernel.shared, int(kernel.overlaps)]
    words.append(len(launch.arguments))
    for argument in launch.arguments:
        if isinstance(argument, Address):
            words += (1, argument.tensor, argument.offset)
        elif isinstance(argument, Map):
            words += (2, *argument)
        else:
            words += (0, argument)
    return words


@functools.cache
def _dtype(dtype: torch.dtype) -> int:
    """torch's number of a dtype."""
    name = str(dtype).removeprefix("torch.")
    return getattr(_shim(), f"aoti_torch_dtype_{name}")()
