"""The states of a parameter in any format: how they are created and placed, and which tensor a step writes to."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.sharded import is_dtensor
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local, own_region, placed, placed_as
from lowbit.tensor.frozen.codebook_tensor import FORMATS, CodebookTensor, row_layout

STATE_FORMATS = (*FORMATS, "bf16", "fp32")
SMALLEST_TENSOR = 4096  # elements over all shards; a smaller tensor keeps float32 states
SHORTEST_ROW = 32  # elements; scales of shorter rows would take as much memory as their codes
CORRECTIONS = {"8bit": torch.int8, "16bit": torch.int16}
"""Dtypes of the numbers in the state "weight_correction", by the values of the option that have one. int16 is stored as
two bytes, uint8 [..., 2], because neither gloo nor NCCL moves int16."""
STEP = torch.float64
"""Dtype of step counters. float32 stops counting at 2**24; float64 counts to 2**53."""


def memory(param: Tensor) -> Tensor:
    """The tensor that a step writes to: this rank's part of `param`, or the weight inside of that part where a low-bit
    tensor keeps its weight in high precision."""
    own = local(param)
    inner = own.updated_in_place() if isinstance(own, LowbitTensor) else None
    return own if inner is None else inner


def like_param(param: Tensor, state: Tensor) -> Tensor:
    """`state`, contiguous and shaped like the local part of `param`, as a DTensor where `param` is one."""
    if not is_dtensor(param):
        return state
    return placed(param, state, param.placements, param.shape)


def stored_format(shape: torch.Size, format: str) -> str:
    """The format of a state of a parameter of this (global) shape if the user asks for `format`."""
    if format == "fp32" or len(shape) < 2 or shape.numel() < SMALLEST_TENSOR:
        return "fp32"
    if format in FORMATS and row_layout(shape, FORMATS[format].block_size)[1] < SHORTEST_ROW:
        return "fp32"
    return format


def new_state(param: Tensor, format: str, signed: bool) -> Tensor:
    """Zeros with the shape, device and placements of `param`, in `format`, or in float32 for a small parameter."""
    if format not in STATE_FORMATS:
        formats = ", ".join(map(repr, STATE_FORMATS))
        raise ValueError(f"state must be one of {formats}, got {format!r}")
    part = local(param)
    format = stored_format(param.shape, format)
    if format in FORMATS:
        zeros: Tensor = CodebookTensor.zeros(part.shape, format, signed=signed, device=part.device)
    else:
        dtype = torch.float32 if format == "fp32" else torch.bfloat16
        zeros = torch.zeros(part.shape, dtype=dtype, device=part.device)
    return zeros if part is param else like_param(param, zeros)


def new_step(param: Tensor, count: float = 0) -> Tensor:
    """A step counter on the device of `param`."""
    return torch.full((), count, dtype=STEP, device=local(param).device)


def moved(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """The states of a parameter that are on another device, moved to the parameter's, because the model was moved. A
    step counter of another dtype than `STEP`, as of torch.optim, is converted as well."""
    device = local(param).device
    step = state.get("step")
    if step is not None and step.dtype == STEP and step.device == device:
        return {}  # all states of a parameter are on one device
    made: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step" and (value.dtype != STEP or value.device != device):
            made[name] = value.to(device, STEP)
        elif isinstance(value, Tensor) and local(value).device != device:
            made[name] = placed_as(value, local(value).to(device))
    return made


def rounds_itself(param: Tensor) -> bool:
    """True if a parameter takes float32 values and rounds them itself (`LowbitTensor.update_`), as int8 weights do."""
    part = local(param)
    return isinstance(part, LowbitTensor) and part.updated_in_place() is None


def has_correction(group: dict[str, Any], param: Tensor) -> bool:
    """True if a parameter of this group has the state "weight_correction"."""
    if group["weight_correction"] not in CORRECTIONS or rounds_itself(param):
        return False
    return memory(param).dtype == torch.bfloat16


def is_compensated(group: dict[str, Any], param: Tensor) -> bool:
    """True if the rounding error of a parameter of this group goes into its momentum, where there is one."""
    choice = group["weight_correction"]
    if not rounds_itself(param):
        return choice == "momentum" and memory(param).dtype == torch.bfloat16
    by_default = choice is not False and local(param).returns_errors and group["state"] != "4bit"
    return choice == "momentum" or by_default


def new_correction(group: dict[str, Any], param: Tensor) -> Tensor:
    """The state "weight_correction" of a parameter of this group: zeros of the dtype in `CORRECTIONS`."""
    part, dtype = local(param), CORRECTIONS[group["weight_correction"]]
    return _zero_correction(param, part, dtype)


def _zero_correction(param: Tensor, part: Tensor, dtype: torch.dtype) -> Tensor:
    more, stored = ((2,), torch.uint8) if dtype == torch.int16 else ((), dtype)
    zeros = torch.zeros((*part.shape, *more), dtype=stored, device=part.device)
    if not is_dtensor(param):
        return zeros
    return placed(param, zeros, param.placements, torch.Size((*param.shape, *more)))


def correction_units(correction: Tensor) -> Tensor:
    """The numbers in this rank's part of a state "weight_correction", of the weight's shape: int8, or int16 as a view
    of its bytes."""
    own = local(correction)
    return own.view(torch.int16).squeeze(-1) if own.dtype == torch.uint8 else own


def correction_like(group: dict[str, Any], param: Tensor, old: Tensor) -> Tensor:
    """`old`, a correction of this parameter with 8 or 16 bits, as the group's option has it: 8 bits become 16 as they
    are, and 16 are rounded to 8."""
    made, units = new_correction(group, param), correction_units(old)
    if correction_units(made).dtype == units.dtype:
        return old
    if units.dtype == torch.int8:
        units = units.to(torch.int16) * 256
    else:
        units = ((units.to(torch.int32) + 128) >> 8).clamp(max=127)
    correction_units(made).copy_(units)
    return made


def empty_correction(param: Tensor, saved: Tensor) -> Tensor:
    """Zeros for `param` in the form of a saved state "weight_correction"."""
    dtype = torch.int16 if saved.dtype == torch.uint8 else torch.int8
    return _zero_correction(param, local(param), dtype)


def global_index(param: Tensor) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The base and the runs of this rank's part of `param`, for the offsets of random bits.

    Element i of the part, in row-major order, is element `base + i` of the whole parameter if dimension 0 alone is
    sharded; `runs` is empty then. Each other sharded dimension gives a pair (run, stride), the outer ones first. A run
    of the part lies in one piece of the whole, if inner dimensions are not sharded, and runs begin `stride` apart:

        index = base
        for run, stride in runs:
            index += i // run * stride
            i %= run
        index += i
    """
    if not is_dtensor(param):
        return 0, ()
    shape, offset = own_region(param)
    base = sum(start * math.prod(param.shape[dim + 1 :]) for dim, start in enumerate(offset))
    inner = [dim for dim in range(1, param.ndim) if shape[dim] != param.shape[dim]]
    return base, tuple((math.prod(shape[dim:]), math.prod(param.shape[dim:])) for dim in inner)


def dequantized(value: Any) -> Any:
    """A low-bit tensor, or a DTensor over low-bit ones, in float32; anything else as it is."""
    part = local(value)
    return like_param(value, part.dequantize()) if isinstance(part, LowbitTensor) else value


def nbytes(value: Tensor) -> int:
    """Bytes that a state takes on this rank."""
    part = local(value)
    return part.nbytes_stored() if isinstance(part, LowbitTensor) else part.nbytes
