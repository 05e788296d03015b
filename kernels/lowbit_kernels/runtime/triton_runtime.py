"""Triton, where it is installed.

Without Triton, ``jit``, with options or without, returns the plain function that it decorates. Nobody calls that
function, so modules of ops need no condition around their kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.runtime import launcher, nvrtc
from lowbit_kernels.runtime.compiling import compiling
from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch, LaunchPlan, TritonKernel

triton: Any
tl: Any
jit: Callable[..., Any]

try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    triton = tl = None

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return jit if function is None else function
else:

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """``triton.jit``, whose compiler tells a waiting user."""
        if function is None:
            return functools.partial(jit, **options)
        kernel = triton.jit(function, **options)
        compile = getattr(kernel, "_do_compile", None)  # absent from the interpreter
        if compile is not None:

            def told(*arguments: Any, **named: Any) -> Any:
                with compiling("the GPU by Triton"):
                    return compile(*arguments, **named)

            kernel._do_compile = told
        return kernel


@functools.cache
def runs_on(device: torch.device) -> bool:
    """True if Triton kernels run on tensors of ``device``. On the CPU they do under ``TRITON_INTERPRET=1`` only."""
    if triton is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and triton.knobs.runtime.interpret)


@functools.cache
def has_large_tiles(device: torch.device) -> bool:
    """True for NVIDIA GPUs from compute capability 9.0 on whose blocks may have the shared memory of a data-centre GPU.

    Those of compute capability 12.0 (GeForce RTX 50) have 99 KiB, as 8.6 and 8.9 have. ROCm counts capabilities in
    another way.
    """
    if device.type != "cuda" or torch.version.hip:
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.major >= 9 and properties.shared_memory_per_block_optin >= LARGE_TILES


LARGE_TILES = 160 * 1024
"""Bytes of shared memory that the largest tiles of these kernels take."""


def stored_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which a kernel writes a result of ``dtype``; the op converts it afterwards.

    The interpreter (triton 3.7) truncates float32 to bfloat16, where a GPU rounds to nearest even.
    """
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


class KeptKernel:
    """A kernel whose launches all have arguments of the same types, alignment and divisors, and the same constants.
    From the second launch on, Triton does not look it up again, which takes it tens of microseconds.

    Args:
        kernel: its first arguments are those of a launch, the others `constants`.
        constants: its ``tl.constexpr``.
        options: of the compilation, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, ...], *arguments: Tensor | float | None) -> None:
        if self._compiled is not None:
            last = [self.constants[n] for n in self.kernel.arg_names[len(arguments) :]]
            self._compiled[(*grid, 1, 1)[:3]](*arguments, *last)
            return
        compiled = self.kernel[grid](*arguments, **self.constants, **self.options)
        if compiled is not None and not torch.version.hip and _is_known():
            self._compiled = compiled

    def planned(self, programs: int, *arguments: int | Address) -> Launch | None:
        """The launch of a plan with these arguments; None before the first call, and where it cannot be planned."""
        if self._compiled is None:
            return None
        named = dict(zip(self.kernel.arg_names, arguments, strict=False))
        return _planned(self._compiled, programs, named)


_kept: dict[tuple[Any, ...], KeptKernel] = {}


def launch_kept(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Sequence[Tensor | float],
    constants: dict[str, Any],
    **options: Any,
) -> None:
    """Launch a kernel on the current device through a `KeptKernel`, one for all launches with arguments of the same
    types, alignment and divisors. For launches whose shapes change from call to call, so that no plan fits them.

    Args:
        arguments: the kernel's first arguments. The others are its `constants`.
        options: of the compilation, such as ``num_warps``.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    # not the kernel itself, whose hash is that of its source
    key = id(kernel), device, *constants.values(), *options.values(), *map(_kind, arguments)
    own = _kept.get(key)
    if own is None:
        own = _kept[key] = KeptKernel(kernel, constants, **options)
    own(grid, *arguments)


def _kind(value: Tensor | float) -> Any:
    """All that Triton's code for an argument depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return value % 16 == 0, value == 1, value < 2**31
    return None


_launched: dict[int, Any] = {}
"""The kernels of plans, by their handle: a plan itself does not keep them loaded."""


def launch(
    op: str | None,
    operands: Sequence[Tensor | None],
    results: Sequence[Tensor],
    kernel: Any,
    programs: int,
    arguments: tuple[Tensor | int | float, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel that does all of a call of a planned op. On CUDA the launcher does so from the next call on, and
    from the one after that where this is the op's first call in the process, which only brings the launcher in.

    Args:
        op: its name; None where the call is that of another op, which Python runs.
        operands: its tensors, in order, as the call got them.
        results: the contiguous tensors that it returns.
        programs: of the kernel's grid.
        arguments: of the kernel. Python launches the next call too if a tensor begins where no operand or result does,
            such as a copy, or where two of them do.
        constants: the kernel's ``tl.constexpr`` and options of the launch, such as ``num_warps``.
    """
    with torch.cuda.device_of(results[0]):
        if op is None and results[0].is_cuda:
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            options = {name: value for name, value in constants.items() if name not in own}
            launch_kept(kernel, (programs,), arguments, own, **options)
            return
        compiled = kernel[(programs,)](*arguments, **constants)
    # Nothing comes back from the interpreter.
    plannable = compiled is not None and results[0].is_cuda
    if op is None or not plannable or torch.version.hip or not _is_known():
        return
    named = dict(zip(kernel.arg_names, arguments, strict=False))
    one = _planned(compiled, programs, named, (*operands, *results))
    if one is not None:
        buffers = tuple(Buffer(tuple(t.shape), t.dtype) for t in results)
        launcher.learn(op, LaunchPlan(buffers, (), (one,)))


@functools.cache
def _is_known() -> bool:
    """True if this version of Triton passes its kernels what `_planned` says; later ones may pass more."""
    return tuple(map(int, triton.__version__.split(".")[:2])) in ((3, 6), (3, 7))


def _planned(
    compiled: Any,
    programs: int,
    arguments: Mapping[str, Tensor | int | float | Address],
    tensors: Sequence[Tensor | None] = (),
) -> Launch | None:
    """The launch of a compiled kernel with these arguments; None where it cannot be planned.

    Args:
        tensors: those of the plan, by which tensors among the arguments get their numbers.
    """
    found = compiled.metadata
    scratch = found.global_scratch_size or found.profile_scratch_size
    if found.num_ctas != 1 or scratch or found.launch_cooperative_grid:
        return None
    words: list[int | Address] = []
    for name, kind in compiled.src.signature.items():
        if kind == "constexpr":  # also an argument of 1, which Triton compiles in
            continue
        value = arguments[name]
        if isinstance(value, Tensor):
            at = value.data_ptr()
            numbers = [i for i, t in enumerate(tensors) if t is not None and t.data_ptr() == at]
            if not numbers or (len(numbers) > 1 and value.numel()):
                return None  # a copy, or one of two operands that may differ in another call
            words.append(Address(numbers[0]))
        elif isinstance(value, float):
            words.append(nvrtc.float_word(value))
        else:
            words.append(value)
    words += (0, 0)  # two pointers to scratch memory, which this kernel does not use
    _launched[compiled.function] = compiled
    own = TritonKernel(compiled.function, found.shared, overlaps=bool(found.launch_pdl))
    return Launch(own, programs, 32 * found.num_warps, tuple(words))
