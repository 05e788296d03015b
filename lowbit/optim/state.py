"""Optimizer states in any format: created to match a parameter, read and written by rows, converted on loading."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from lowbit.rounding import stochastic_round_bf16
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import FORMATS, CodebookTensor, row_layout

STATE_FORMATS = (*FORMATS, "bf16", "fp32")
SMALLEST_TENSOR = 4096  # elements, over all shards; smaller ones keep float32 states
SHORTEST_ROW = 32  # elements; with shorter ones the scales would weigh as much as the codes


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, without importing them: a program that has one has imported them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory (under no_grad); any other tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def like_param(param: Tensor, state: Tensor) -> Tensor:
    """`state`, shaped like the local part of `param`, as a DTensor where `param` is one."""
    if not is_dtensor(param):
        return state
    from torch.distributed.tensor import DTensor

    stride = [math.prod(param.shape[i + 1 :]) for i in range(param.ndim)]
    return DTensor.from_local(
        state,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=tuple(stride),
    )


def stored_format(shape: torch.Size, format: str) -> str:
    """The format that a state of a parameter of this (global) shape gets where `format` was asked for."""
    if format == "fp32" or len(shape) < 2 or shape.numel() < SMALLEST_TENSOR:
        return "fp32"
    if format in FORMATS and row_layout(shape, FORMATS[format].block_size)[1] < SHORTEST_ROW:
        return "fp32"
    return format


def new_state(param: Tensor, format: str, signed: bool) -> Tensor:
    """Zeros of the shape, device and placement of `param`, in `format`, or in float32 for a small parameter."""
    part = local(param)
    format = stored_format(param.shape, format)
    if format in FORMATS:
        zeros: Tensor = CodebookTensor.zeros(part.shape, format, signed=signed, device=part.device)
    else:
        dtype = torch.float32 if format == "fp32" else torch.bfloat16
        zeros = torch.zeros(part.shape, dtype=dtype, device=part.device)
    return like_param(param, zeros)


def rows_of(states: list[Tensor], numel: int) -> tuple[int, int]:
    """Rows and elements in each, as which local states, their parameter and gradient can all be viewed."""
    for state in states:
        if isinstance(state, CodebookTensor):
            return state.rows()
    return numel, 1


def read(state: Tensor, start: int, end: int, cols: int) -> Tensor:
    """Rows [start, end) of a local state, float32 [end - start, cols]. Of a float32 state: the memory itself."""
    if isinstance(state, CodebookTensor):
        return state.read_rows(start, end)
    return state.view(-1, cols)[start:end].float()


def write(
    state: Tensor,
    start: int,
    end: int,
    values: Tensor,
    *,
    signed: bool,
    step: Tensor,
    tensor: int,
    offset: int,
) -> None:
    """Put back what `read` gave, updated.

    A second moment in bfloat16 is rounded stochastically, keyed by the step, the parameter's index (`tensor`)
    and the global index of the first element (`offset`): with beta2 = 0.999 it shrinks by less than half of a
    bfloat16 step at a time, so that rounded to nearest it would never shrink at all.
    """
    if isinstance(state, CodebookTensor):
        state.write_rows(start, end, values)
    elif state.dtype != torch.float32:
        if not signed:
            values = stochastic_round_bf16(values, seed=0, step=step, tensor=tensor, offset=offset)
        state.view(-1, values.shape[-1])[start:end].copy_(values)


def first_element(param: Tensor) -> int:
    """Index in the whole parameter of this rank's first element."""
    if not is_dtensor(param):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = param.device_mesh, param.placements  # type: ignore[attr-defined]
    _, offset = compute_local_shape_and_global_offset(param.shape, mesh, placements)
    return sum(start * math.prod(param.shape[dim + 1 :]) for dim, start in enumerate(offset))


def converted(value: Tensor, param: Tensor, format: str, signed: bool) -> Tensor:
    """A new state for `param` in `format` with the values of `value`, a state in any format.

    Codes are copied where the formats agree, so that nothing is rounded twice. `value` may lie on another
    device. For a sharded parameter it may be sharded alike, otherwise, or not at all.
    """
    state = new_state(param, format, signed)
    target = local(state)
    if is_dtensor(value) and not is_dtensor(param):
        raise ValueError(
            f"the checkpoint's state of shape {tuple(value.shape)} is sharded and the parameter is not; load it "
            "with torch.distributed.checkpoint, or save it with StateDictOptions(full_state_dict=True)"
        )
    if is_dtensor(param):
        value = _shard_like(param, value)
    if isinstance(value, CodebookTensor) and not _same_storage(value, target):
        value = value.dequantize()
    target.copy_(value)
    return state


def _shard_like(param: Any, value: Any) -> Tensor:
    """The part of `value` that belongs to this rank's part of `param`."""
    if is_dtensor(value):
        if value.device_mesh == param.device_mesh and value.placements == param.placements:
            return value.to_local()
        value = dequantized(value).redistribute(param.device_mesh, param.placements)
        return value.to_local()
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    sharded = [dim for dim, size in enumerate(shape) if size != param.shape[dim]]
    if isinstance(value, CodebookTensor) and any(dim > 0 for dim in sharded):
        value = value.dequantize()
    for dim in sharded:
        value = value.narrow(dim, offset[dim], shape[dim])
    return value


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return (
        isinstance(a, CodebookTensor) and isinstance(b, CodebookTensor) and a._meta() == b._meta()
    )


def dequantized(value: Any) -> Any:
    """A low-bit tensor, or a DTensor over low-bit ones, in float32; anything else as it is."""
    if isinstance(value, LowbitTensor):
        return value.dequantize()
    if is_dtensor(value) and isinstance(value.to_local(), LowbitTensor):
        return like_param(value, value.to_local().dequantize())
    return value


def nbytes(value: Tensor) -> int:
    """Bytes that a state takes on this rank."""
    part = local(value)
    tensors = part._inner().values() if isinstance(part, LowbitTensor) else [part]
    return sum(t.numel() * t.element_size() for t in tensors)
