"""Optimizer states in any format: created to match a parameter, read and written by rows, converted on loading."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lowbit.code_range import FLOATS
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import FORMATS, CodebookTensor, row_layout

STATE_FORMATS = (*FORMATS, "bf16", "fp32")
SMALLEST_TENSOR = 4096  # elements, over all shards; smaller ones keep float32 states
SHORTEST_ROW = 32  # elements; with shorter ones the scales would weigh as much as the codes
STEP = torch.float64
"""Dtype of step counters. float32 stops counting at 2**24; float64 counts to 2**53."""


def is_dtensor(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing its memory (under no_grad); any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def memory(param: Tensor) -> Tensor:
    """What a step writes to: this rank's part of `param`, and of a weight kept in high precision behind low-bit
    products, that weight."""
    own = local(param)
    inner = own.updated_in_place() if isinstance(own, LowbitTensor) else None
    return own if inner is None else inner


def like_param(param: Tensor, state: Tensor) -> Tensor:
    """`state`, shaped like the local part of `param`, as a DTensor where `param` is one."""
    if not isinstance(param, DTensor):
        return state
    stride = tuple(math.prod(param.shape[i + 1 :]) for i in range(param.ndim))
    mesh, placements = param.device_mesh, param.placements
    if state.device.type != mesh.device_type:
        # FSDP2 offloads so: parts in host memory, on a mesh of GPUs. from_local would move them there.
        meta = TensorMeta(param.shape, stride, state.dtype)
        return DTensor(state, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
    return DTensor.from_local(
        state, mesh, placements, run_check=False, shape=param.shape, stride=stride
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
    return like_param(param, zeros)


def new_step(param: Tensor, count: float = 0) -> Tensor:
    """A step counter of a parameter, on its device."""
    return torch.full((), count, dtype=STEP, device=local(param).device)


def moved(state: dict[str, Any], param: Tensor) -> dict[str, Any]:
    """Those of a parameter's states that lie elsewhere than it does now, on its device, and its step counter if it is
    no `STEP`: the model was moved, or an older version made the states."""
    device = local(param).device
    step = state.get("step")
    if step is not None and step.dtype == STEP and step.device == device:
        return {}  # all states of a parameter lie together
    made: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step" and (value.dtype != STEP or value.device != device):
            made[name] = value.to(device, STEP)
        elif isinstance(value, Tensor) and local(value).device != device:
            made[name] = like_param(param, local(value).to(device))
    return made


def rounds_itself(param: Tensor) -> bool:
    """Whether a parameter takes updates in float32 and rounds them (`LowbitTensor.update_`), as int8 weights do."""
    part = local(param)
    return isinstance(part, LowbitTensor) and part.updated_in_place() is None


def has_correction(group: dict[str, Any], param: Tensor) -> bool:
    """Whether a parameter of this group has the state "weight_correction"."""
    if group["weight_correction"] is None or rounds_itself(param):
        return False
    return memory(param).dtype == torch.bfloat16


def new_correction(param: Tensor) -> Tensor:
    """The state "weight_correction" of a parameter: int8 zeros."""
    part = local(param)
    return like_param(param, torch.zeros(part.shape, dtype=torch.int8, device=part.device))


def global_index(param: Tensor) -> tuple[int, int, int]:
    """(base, run, stride): element i of this rank's part, in row-major order, is element
    `base + (i // run) * stride + i % run` of the whole parameter. `run == stride` where that is `base + i`.

    Raises:
        NotImplementedError: it is sharded in two dimensions besides dimension 0.
    """
    if not isinstance(param, DTensor):
        return 0, 1, 1
    shape, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    base = sum(start * math.prod(param.shape[dim + 1 :]) for dim, start in enumerate(offset))
    inner = [dim for dim in range(1, param.ndim) if shape[dim] != param.shape[dim]]
    if len(inner) > 1:
        raise NotImplementedError(
            f"random draws for a parameter of shape {tuple(param.shape)} placed as {param.placements}: it is "
            f"sharded in dimensions {inner}; accepted: dimension 0 and one other"
        )
    if not inner:
        return base, 1, 1
    rest = math.prod(param.shape[inner[0] + 1 :])
    return base, shape[inner[0]] * rest, param.shape[inner[0]] * rest


def converted(value: Tensor, param: Tensor, format: str, signed: bool) -> Tensor:
    """A new state for `param` in `format` with the values of `value`, a state in any format.

    Codes are copied where the formats agree, so that nothing is rounded twice. `value` may lie on another
    device. For a sharded parameter it may be sharded alike, otherwise, or not at all.
    """
    state = new_state(param, format, signed)
    fill(state, value, param)
    return state


def fill(state: Tensor, value: Tensor, param: Tensor) -> None:
    """Put the values of `value`, as for `converted`, into `state`, which is shaped and placed as `param`."""
    target = local(state)
    if isinstance(value, DTensor) and not isinstance(param, DTensor):
        raise ValueError(
            f"the checkpoint's state of shape {tuple(value.shape)} is sharded and the parameter is not; load it "
            "with torch.distributed.checkpoint, or save it with StateDictOptions(full_state_dict=True)"
        )
    if isinstance(param, DTensor):
        value = _shard_like(param, value)
    if isinstance(value, CodebookTensor) and not _same_storage(value, target):
        value = value.dequantize()
    target.copy_(value)


def check_loaded(name: str, value: Any, param: Tensor) -> None:
    """Raise TypeError or ValueError, which begin with `name`, unless `value` is a state of the shape of `param`, plain
    and dense or a CodebookTensor. The dtype of a plain one is looked at by `lowbit.optim.saved.check_dtype`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.shape != param.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint, the parameter has "
            f"{tuple(param.shape)}"
        )
    part = local(value)
    if isinstance(part, CodebookTensor):
        return check_parts(name, part)
    is_dense = part.layout is torch.strided and not part.is_nested
    is_scaled = part.dtype.is_floating_point and part.dtype not in FLOATS  # float8, by scales lost
    if isinstance(part, LowbitTensor) or not is_dense or is_scaled:
        raise ValueError(
            f"{name} is a {type(part).__name__} of {part.dtype}, {part.layout}; accepted: a CodebookTensor, or a plain "
            f"dense tensor of {', '.join(map(str, FLOATS))}"
        )


def check_parts(name: str, part: Tensor) -> None:
    """Raise ValueError, which begins with `name`, for a low-bit tensor whose inner tensors don't fit it."""
    if isinstance(part, LowbitTensor):
        try:
            part.check_parts()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _shard_like(param: Any, value: Any) -> Tensor:
    """The part of `value` that belongs to this rank's part of `param`."""
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh and value.placements == param.placements:
            return value.to_local()
        value = dequantized(value).redistribute(param.device_mesh, param.placements)
        return value.to_local()
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
    return isinstance(a, CodebookTensor) and isinstance(b, CodebookTensor) and a.meta() == b.meta()


def dequantized(value: Any) -> Any:
    """A low-bit tensor, or a DTensor over low-bit ones, in float32; anything else as it is."""
    if isinstance(value, LowbitTensor):
        return value.dequantize()
    if isinstance(value, DTensor) and isinstance(value.to_local(), LowbitTensor):
        return like_param(value, value.to_local().dequantize())
    return value


def nbytes(value: Tensor) -> int:
    """Bytes that a state takes on this rank."""
    part = local(value)
    return part.nbytes_stored() if isinstance(part, LowbitTensor) else part.nbytes
