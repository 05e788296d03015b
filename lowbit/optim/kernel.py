"""Which kernel updates a parameter, and where none does."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from lowbit.codebook import Codebook
from lowbit.optim import state as states
from lowbit.tensor.codebook_tensor import FORMATS, CodebookTensor
from lowbit_kernels import fused_step, host_compiler
from lowbit_kernels.fused_step import FusedStep, Table, Variant
from lowbit_kernels.fused_step_cpu import FusedStepCpu


def variant_of(
    optimizer: Any, group: dict[str, Any], param: Tensor, grad: Tensor
) -> Variant | None:
    """What to compile for a parameter, whose states exist; None where the kernel doesn't apply.

    Raises:
        RuntimeError: it doesn't apply, and `fused=True` asks for it.
    """
    reason = _obstacle(optimizer, group, param, grad)
    if reason is None:
        own, state = states.memory(param), optimizer.state[param]
        signs = optimizer.state_names(group)
        formats = tuple(str(_format(states.local(state[name]))) for name in signs)
        dtype = _dtype(param)
        rule, rounding = optimizer.rule(group), _rounding(group, dtype)
        found = _variant(rule, dtype, grad.dtype, formats, tuple(signs.values()), rounding)
        reason = compile_obstacle(found, own.device)
        if reason is None:
            return found
    if group["fused"]:
        raise RuntimeError(
            f"fused=True, but no kernel takes a parameter of shape {tuple(param.shape)}: {reason}; "
            "leave fused out to have it updated by PyTorch operations"
        )
    return None


def options_of(optimizer: Any, group: dict[str, Any]) -> tuple[Any, ...]:
    """What decides which kernel a group's parameters take, besides themselves."""
    names = ("fused", "bf16_stochastic_round", "weight_correction")
    return optimizer.rule(group), *(group[name] for name in names)


@functools.cache
def compiled(variant: Variant, device: torch.device) -> FusedStep | FusedStepCpu:
    """The kernel, one for a variant and device. Raises RuntimeError where it can't be compiled."""
    return FusedStepCpu(variant) if device.type == "cpu" else FusedStep(variant, device)


def scaled(variant: Variant) -> Variant:
    """The same for gradients that are multiplied by a factor."""
    v = variant
    return _variant(v.rule, v.param, v.grad, v.formats, v.signed, v.rounding, True)


@functools.cache
def has_own_memory(kind: type) -> bool:
    """Whether tensors of a class lie at their `data_ptr`, as those don't that say for themselves what an operation
    does to them: wrappers around others, or fake ones."""
    if not issubclass(kind, Tensor):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _format(state: Tensor) -> str | None:
    """The kernel's name of how a state is stored; None for what it can't read."""
    if isinstance(state, CodebookTensor):
        own_block = state.block_size == FORMATS[state.format].block_size
        contiguous = state.codes.is_contiguous() and state.scale.is_contiguous()
        return state.format if own_block and contiguous else None
    if not state.is_contiguous():
        return None
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(state.dtype)


def _dtype(param: Tensor) -> torch.dtype:
    """Of the weight that the kernel writes: of one that rounds itself, the float32 values (`lowbit.optim.rounded`)."""
    return torch.float32 if states.rounds_itself(param) else states.memory(param).dtype


def _rounding(group: dict[str, Any], dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16 and group["bf16_stochastic_round"]:
        return "stochastic"
    if dtype == torch.bfloat16 and group["weight_correction"]:
        return "corrected"
    return "nearest"


def _obstacle(optimizer: Any, group: dict[str, Any], param: Tensor, grad: Tensor) -> str | None:
    """Why the kernel does not take this parameter; None if it does."""
    own = states.memory(param)
    if group["fused"] is False:
        return "fused=False"
    if optimizer.rule(group) is None:
        return f"{type(optimizer).__name__} has no kernel"
    if own.dtype != param.dtype:
        return f"its dtype is {param.dtype}, over a weight in {own.dtype}"
    for name, tensor in (("it", own), ("its gradient", grad)):
        if tensor.dtype not in fused_step.DTYPES:
            return f"{name} has the dtype {tensor.dtype}"
        if tensor is own and states.rounds_itself(param):
            continue  # its values are put into memory for the kernel
        if not has_own_memory(type(tensor)):
            return f"{name} is a {type(tensor).__name__}"
        if tensor.numel() and not tensor.is_meta and tensor.data_ptr() == 0:
            return f"{name} has no memory"
    if not own.is_contiguous() or own.is_neg():
        return f"its strides are {own.stride()}, or it is a view with the sign turned"
    stored = [states.local(optimizer.state[param][name]) for name in optimizer.state_names(group)]
    formats = {_format(state) for state in stored}
    if None in formats:
        return "its states are not stored as the kernel reads them"
    if len({t.cols_of(own.shape) for t in stored if isinstance(t, CodebookTensor)}) > 1:
        return "its states have rows of several lengths"
    draws = _rounding(group, _dtype(param)) == "stochastic" or "bf16" in formats
    _, run, stride = states.global_index(param) if draws else (0, 1, 1)
    if run != stride and run % 8 and own.device.type == "cuda":
        return f"a row of its shard has {run} elements, which 8 doesn't divide"
    return device_obstacle(own.device, "float8" in formats)


def device_obstacle(device: torch.device, float8: bool) -> str | None:
    """Why no kernel runs on a device, with float8 states or others; None if one does."""
    if device.type == "cpu":
        return _no_compiler()
    if device.type != "cuda":
        return f"there is none for {device.type}"
    if torch.version.cuda is None:
        return "the GPU is not NVIDIA's"
    if not fused_step.is_available():
        _warn_once(
            "no cuda-bindings",
            "lowbit's CUDA optimizer step needs the package cuda-bindings (part of torch's CUDA builds), which is "
            "not installed: optimizers run by PyTorch ops, several times slower",
        )
        return "cuda.bindings is not installed"
    needed = (8, 9) if float8 else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        return f"the GPU's compute capability is below {needed[0]}.{needed[1]}"
    return None


def _no_compiler() -> str | None:
    try:
        if host_compiler.compiler():
            return None
        reason = "no C++ compiler was found (c++, g++ or clang++ on the path, or one named in $CXX)"
    except RuntimeError as error:
        reason = str(error)
    _warn_once(
        "no compiler",
        f"lowbit's optimizer step on a CPU is compiled at first use, and {reason}: optimizers run by PyTorch "
        "operations, several times slower. Install g++ or clang++, or name a compiler in $CXX; fused=False asks for "
        "PyTorch operations",
    )
    return reason


@functools.cache
def compile_obstacle(variant: Variant, device: torch.device) -> str | None:
    """Why this machine's compiler does not make the kernel for a CPU, which nobody can know beforehand; None if it
    does, or none is needed."""
    if device.type != "cpu":
        return None
    try:
        compiled(variant, device)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        first = next((line for line in lines[1:] if "error" in line), "")
        _warn_once(
            "not compiled",
            f"lowbit's optimizer step for this CPU could not be compiled, and runs by PyTorch operations, several "
            f"times slower: {lines[0]} {first}".rstrip(),
        )
        return f"it could not be compiled: {lines[0]} {first}".rstrip()
    return None


_WARNED: set[str] = set()


def _warn_once(kind: str, message: str) -> None:
    """Of each kind, which may concern many variants, the first."""
    if kind not in _WARNED:
        _WARNED.add(kind)
        warnings.warn(message, stacklevel=2)


@functools.cache
def _variant(
    rule: Any,
    param: torch.dtype,
    grad: torch.dtype,
    formats: tuple[str, ...],
    signed: tuple[bool, ...],
    rounding: str,
    scaled: bool = False,
) -> Variant:
    """One object for one combination, since kernels are kept by it."""
    tables = tuple(_table(format, s) for format, s in zip(formats, signed, strict=True))
    return Variant(rule, param, grad, formats, signed, rounding, scaled, tables)


@functools.cache
def _table(format: str, signed: bool) -> Table | None:
    if format not in ("8bit", "4bit") or (format == "4bit" and not signed):
        return None  # no table, or one so even that the kernel computes its codes
    book = Codebook(FORMATS[format].bits, signed)
    cells = book.cells()
    return Table(book.table().numpy(), cells.first, cells.shift, cells.words)
