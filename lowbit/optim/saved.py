"""What a checkpoint holds: the values that `load_state_dict` takes, and the way back to torch.optim.

All values are checked before anything changes. Moments may hold NaN, since a run that diverged saves them. Values
that no step could have left are refused by the parameter's name: a step that is no count, a second moment below 0, a
tensor without memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbit.optim import state as states
from lowbit.optim.options import COMMON_DEFAULTS
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.codebook_tensor import CodebookTensor

MOST_STEPS = 2**53
"""float64, in which steps are counted, holds every whole number up to this one."""
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")
"""Means of squares, and the largest of them so far: never below 0."""


def parameter_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to call the parameters of these groups in a message, in their order."""
    first, names = 0, []
    for group in groups:
        count = len(group["params"])
        numbered = [f"parameter {i}" for i in range(first, first + count)]
        names += group.get("param_names", numbered)
        first += count
    return names


def check_states(groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]) -> None:
    """Raise unless the values of all saved states can be those of a run; see `check_state`.

    Args:
        groups: an optimizer's, with as many parameters as those of the checkpoint.
        state_dict: the checkpoint.
    """
    params = chain.from_iterable(group["params"] for group in groups)
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for key, param, name in zip(saved_ids, params, parameter_names(groups), strict=False):
        if key in state_dict["state"]:
            check_state(name, param, state_dict["state"][key])


def check_state(name: str, param: Tensor, saved: Any) -> None:
    """Raise unless the values of a parameter's saved state can be those of a run.

    Args:
        name: of the parameter, for the message.
        param: the parameter that they are for.
        saved: its entry in the checkpoint's "state".

    Raises:
        ValueError, TypeError: they can't.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(
            f"{name}: its state in the checkpoint must be a dict of its step and tensors, got {saved!r}"
        )
    if not saved:
        return
    if states.local(param).is_meta:
        raise ValueError(
            f"{name}: the parameter is on the meta device, which has no memory for a state; load the optimizer's "
            "checkpoint after model.to_empty(device=...)"
        )
    for key, value in saved.items():
        if key == "step":
            step_of(name, value)
        elif isinstance(value, Tensor):
            _check_tensor(f"{name}: {key}", key, value)


def step_of(name: str, value: Any) -> float:
    """The number of steps that a checkpoint gives a parameter, as a number or anything that holds one.

    Raises:
        ValueError: it is not one whole number from 0 to 2**53.
        TypeError: it is no number.
    """
    accepted = f"{name}: step must be one whole number from 0 to 2**53"
    number = states.local(value) if isinstance(value, Tensor) else value
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


def check_dtype(label: str, key: str, value: Tensor) -> None:
    """Raise TypeError for a state of lowbit's optimizers whose values would change when they are converted."""
    dtype = value.dtype
    if key == "weight_correction" and dtype != torch.int8:
        raise TypeError(f"{label} must be of dtype torch.int8, got {dtype}")
    if key != "weight_correction" and not dtype.is_floating_point:
        raise TypeError(f"{label} must be of a floating dtype, got {dtype}")


def _check_tensor(label: str, key: str, value: Tensor) -> None:
    part = states.local(value)
    inner = part.inner_tensors().values() if isinstance(part, LowbitTensor) else [part]
    if any(t.is_meta for t in inner):
        raise ValueError(
            f"{label} is on the meta device in the checkpoint and has no values; load the checkpoint to a device "
            'that has memory, as torch.load(path, map_location="cpu") does'
        )
    states.check_parts(label, part)  # before values are made of them
    if key in SECOND_MOMENTS and (lowest := _below_zero(part)) is not None:
        raise ValueError(
            f"{label} holds values below 0 (the lowest is {lowest:g}), which no mean of squares does; the checkpoint "
            "is damaged, or of another optimizer"
        )


def _below_zero(part: Tensor) -> float | None:
    """The lowest value if it is below 0, else None."""
    if isinstance(part, CodebookTensor):
        # Unsigned tables hold nothing below 0, and float8 has a sign bit: there the codes count too.
        has_table = not part.signed and part.format != "float8"
        part = part.scale if has_table else part.dequantize()
    elif isinstance(part, LowbitTensor):
        part = part.dequantize()
    elif part.layout is not torch.strided:
        part = part.to_dense()
    if part.dtype.is_floating_point and part.dtype.itemsize < 2:  # float8 has no comparisons
        part = part.float()
    if part.is_complex():
        part = torch.view_as_real(
            part
        )  # torch.optim's moments of complex weights: each part has its own
    below = part[part < 0]
    return below.min().item() if below.numel() else None


def dequantize_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The `state_dict()` of a lowbit optimizer with every state in float32: what its namesake in torch.optim loads.

    Returns:
        A new dictionary. States that were float32 are shared with `state_dict`; step counters are float32 on the
        CPU, as torch.optim keeps them unless `capturable` or `fused` is set, in which case it moves them itself.
    """
    converted = {}
    for key, state in state_dict["state"].items():
        converted[key] = {
            name: _float32(value.cpu() if name == "step" and isinstance(value, Tensor) else value)
            for name, value in state.items()
            if name != "weight_correction"
        }
    own = {"state", *COMMON_DEFAULTS} - {"foreach", "fused", "capturable", "differentiable"}
    groups = [{k: v for k, v in g.items() if k not in own} for g in state_dict["param_groups"]]
    return {**state_dict, "state": converted, "param_groups": groups}


def _float32(value: Any) -> Any:
    value = states.dequantized(value)
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
