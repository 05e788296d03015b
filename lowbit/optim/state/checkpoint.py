"""Optimizer checkpoints: checks before loading, conversion to this optimizer's formats, conversion for torch.optim.

All values are checked before anything changes. A value that no step can produce is refused with the parameter's name: a
step that is not a count, a second moment below 0, a tensor without memory. NaN is accepted, because a run that
diverged saves it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowbit.numerics.code_range import FLOATS
from lowbit.numerics.sharded import is_dtensor
from lowbit.optim.options import COMMON_DEFAULTS
from lowbit.optim.state.state import dequantized, new_state
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.core.dtensor import local, own_region
from lowbit.tensor.frozen.codebook_tensor import CodebookTensor

MOST_STEPS = 2**53
"""float64, the dtype of step counters, holds every whole number up to this one."""
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "row_moment")
"""Means of squares, and the largest of them so far: never below 0."""

# ---- checks -------------------------------------------------------------------------------------------------


def parameter_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the parameters of these groups for messages, in order; "parameter 3" where they have none."""
    first, names = 0, []
    for group in groups:
        count = len(group["params"])
        numbered = [f"parameter {i}" for i in range(first, first + count)]
        names += group.get("param_names", numbered)
        first += count
    return names


def checked_states(
    groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> dict[Any, Any]:
    """The entries of the checkpoint's "state", their steps as floats.

    Args:
        groups: an optimizer's, with as many parameters as those of the checkpoint.
        state_dict: the checkpoint.

    Raises:
        ValueError, TypeError: a value that no run leaves. The message begins with the parameter's name.
    """
    entries = dict(state_dict["state"])
    params = chain.from_iterable(group["params"] for group in groups)
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for key, param, name in zip(saved_ids, params, parameter_names(groups), strict=False):
        if key in entries:
            entries[key] = _checked_state(name, param, entries[key])
    return entries


def _checked_state(name: str, param: Tensor, saved: Any) -> dict[str, Any]:
    """The saved state of a parameter, its step as a float. Raises ValueError or TypeError as `checked_states`."""
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"{name}: its state in the checkpoint must be a dict of its step and tensors, got {saved!r}"
        )
    if saved and local(param).is_meta:
        raise ValueError(
            f"{name}: the parameter is on the meta device, which has no memory for a state; load the optimizer's "
            "checkpoint after model.to_empty(device=...)"
        )
    checked = dict(saved)
    for key, value in saved.items():
        if key == "step":
            checked[key] = _step_of(name, value)
        elif isinstance(value, Tensor):
            _check_values(f"{name}: {key}", key, value)
    return checked


def _step_of(name: str, value: Any) -> float:
    """The number of steps in a checkpoint, from a number or a tensor or array that holds one."""
    accepted = f"{name}: step must be one whole number from 0 to 2**53"
    number = local(value) if isinstance(value, Tensor) else value
    if isinstance(number, Tensor | np.ndarray):
        shape = tuple(number.shape)
        if shape not in ((), (1,)) and np.prod(shape, dtype=object) != 1:
            raise ValueError(f"{accepted}, got shape {shape}")
        if isinstance(number, Tensor) and number.is_meta:
            raise ValueError(f"{accepted}, got a tensor on the meta device, which has no value")
        number = number.item()
    if not isinstance(number, Real) or isinstance(number, bool | np.bool_):
        raise TypeError(f"{accepted}, got {value!r}")
    count: Any = number
    if not (0 <= count <= MOST_STEPS and count == int(count)):  # also for NaN
        raise ValueError(f"{accepted}, got {value!r}")
    return float(count)


def _check_values(label: str, key: str, value: Tensor) -> None:
    part = local(value)
    if is_traceable_wrapper_subclass(part) and not isinstance(part, LowbitTensor):
        raise ValueError(
            f"{label} is a {type(part).__module__}.{type(part).__name__}, which lowbit does not know; accepted: plain "
            "tensors, and the states of lowbit.optim, torchao.optim and bitsandbytes.optim. Save the checkpoint with "
            "states in float32"
        )
    inner = part.inner_tensors().values() if isinstance(part, LowbitTensor) else [part]
    if any(t.is_meta for t in inner):
        raise ValueError(
            f"{label} is on the meta device in the checkpoint and has no values; load the checkpoint to a device "
            'that has memory, as torch.load(path, map_location="cpu") does'
        )
    if isinstance(part, LowbitTensor):
        try:
            part.check_parts()  # before anything decodes them
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from error
    if key in SECOND_MOMENTS and (lowest := _below_zero(part)) is not None:
        raise ValueError(
            f"{label} holds values below 0 (the lowest is {lowest:g}), which no mean of squares does; the checkpoint "
            "is damaged, or of another optimizer"
        )


def _below_zero(part: Tensor) -> float | None:
    """The lowest value if it is below 0, else None."""
    if isinstance(part, CodebookTensor):
        # Values of unsigned tables have the sign of their scale. float8 codes have a sign bit of their own.
        has_table = not part.signed and part.format != "float8"
        part = part.scale if has_table else part.dequantize()
    elif isinstance(part, LowbitTensor):
        part = part.dequantize()
    elif part.layout is not torch.strided:
        part = part.to_dense()
    if part.dtype.is_floating_point and part.dtype.itemsize < 2:  # float8 has no comparisons
        part = part.float()
    if part.is_complex():  # torch.optim keeps separate moments for the real and imaginary part
        part = torch.view_as_real(part)
    below = part[part < 0]
    return below.min().item() if below.numel() else None


def check_loadable(name: str, key: str, value: Any, param: Tensor) -> None:
    """Raise unless `value` can be the state `key` of `param`: its shape, and either a CodebookTensor or a plain dense
    tensor of a dtype that is converted without loss of meaning.

    Raises:
        TypeError, ValueError: their messages begin with `name` and `key`.
    """
    label = f"{name}: {key}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{label} must be a tensor, got {type(value).__name__}")
    pairs = (2,) if key == "weight_correction" and value.dtype == torch.uint8 else ()
    if value.shape != (*param.shape, *pairs):
        raise ValueError(
            f"{label} has shape {tuple(value.shape)} in the checkpoint, the parameter has "
            f"{tuple(param.shape)}"
        )
    part = local(value)
    if not isinstance(part, CodebookTensor):
        is_dense = part.layout is torch.strided and not part.is_nested
        has_lost_scale = part.dtype.is_floating_point and part.dtype not in FLOATS  # float8
        if isinstance(part, LowbitTensor) or not is_dense or has_lost_scale:
            raise ValueError(
                f"{label} is a {type(part).__name__} of {part.dtype}, {part.layout}; accepted: a CodebookTensor, or a "
                f"plain dense tensor of {', '.join(map(str, FLOATS))}"
            )
    if key == "weight_correction" and value.dtype not in (torch.int8, torch.uint8):
        raise TypeError(f"{label} must be of dtype torch.int8 or torch.uint8, got {value.dtype}")
    if key != "weight_correction" and not value.dtype.is_floating_point:
        raise TypeError(f"{label} must be of a floating dtype, got {value.dtype}")


# ---- conversion ---------------------------------------------------------------------------------------------


def converted(value: Tensor, param: Tensor, format: str, signed: bool) -> Tensor:
    """A new state for `param` in `format` with the values of `value`, a state in any format.

    Codes are copied where the formats agree, so that nothing is rounded twice. `value` may be on another device. For a
    sharded parameter, `value` may be sharded alike, sharded otherwise, or whole.
    """
    state = new_state(param, format, signed)
    fill(state, value, param)
    return state


def fill(state: Tensor, value: Tensor, param: Tensor) -> None:
    """Put the values of `value`, as for `converted`, into `state`, which has the shape and placements of `param`."""
    target = local(state)
    if is_dtensor(value) and not is_dtensor(param):
        raise ValueError(
            f"the checkpoint's state of shape {tuple(value.shape)} is sharded and the parameter is not; load it "
            "with torch.distributed.checkpoint, or save it with StateDictOptions(full_state_dict=True)"
        )
    if is_dtensor(param):
        value = _shard_like(param, value)
    keeps_codes = isinstance(target, CodebookTensor) and target._is_stored_like(value)
    if isinstance(value, CodebookTensor) and not keeps_codes:
        value = value.dequantize()
    target.copy_(value)


def _shard_like(param: Any, value: Any) -> Tensor:
    """The part of `value` that belongs to this rank's part of `param`."""
    if is_dtensor(value):
        if value.device_mesh == param.device_mesh and value.placements == param.placements:
            return value.to_local()
        value = dequantized(value).redistribute(param.device_mesh, param.placements)
        return value.to_local()
    shape, offset = own_region(param)
    sharded = [dim for dim, size in enumerate(shape) if size != param.shape[dim]]
    if isinstance(value, CodebookTensor) and any(dim > 0 for dim in sharded):
        value = value.dequantize()
    for dim in sharded:
        value = value.narrow(dim, offset[dim], shape[dim])
    return value


def check_is_state_dict(state_dict: Any) -> None:
    """Raise TypeError for anything but the state dict of an optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        raise TypeError(
            "state_dict must be what state_dict() of an optimizer returned, with 'state' and 'param_groups', "
            f"got {reprlib.repr(got)}"
        )


def dequantize_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The `state_dict()` of a lowbit optimizer with every state in float32, which its namesake in torch.optim loads.

    Returns:
        A new dictionary. It shares states that were float32 with `state_dict`. Step counters are float32 on the CPU, as
        torch.optim keeps them unless `capturable` or `fused` is set; in those cases torch.optim moves them itself.
    """
    check_is_state_dict(state_dict)
    states = {}
    for key, state in state_dict["state"].items():
        states[key] = {
            name: _float32(value.cpu() if name == "step" and isinstance(value, Tensor) else value)
            for name, value in state.items()
            if name != "weight_correction"
        }
    own = {"state", *COMMON_DEFAULTS} - {"foreach", "fused", "capturable", "differentiable"}
    groups = [{k: v for k, v in g.items() if k not in own} for g in state_dict["param_groups"]]
    return {**state_dict, "state": states, "param_groups": groups}


def _float32(value: Any) -> Any:
    value = dequantized(value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
