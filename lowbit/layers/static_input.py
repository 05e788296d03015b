"""Linears and convolutions whose input is rounded by a static scale, one for all inputs, in training.

`lowbit.calibrate` finds the scale and the zero point. The module holds them as `input_scale` and `input_zero` beside
its weight, as `lowbit.numerics.learned_scales` defines parameters: divided by `RATE`. They are parameters where scales
are learned, and buffers where they are frozen. Both stay float32 where the model is cast. Before the calibration they
are NaN. Conversion puts them into the weight (`AffineTensor.input_scale`), since a product in inference has the weight
alone.

Modules that share a weight share the scale of their inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lowbit.layers.stand_in import StandIn, give, take
from lowbit.numerics.learned_scales import as_parameters, qparams
from lowbit.numerics.sharded import is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.numerics.uncast import Uncast
from lowbit.tensor.core.dtensor import local

SCALE, ZERO, OBSERVER = "input_scale", "input_zero", "input_observer"
"""The names in a module: two parameters or buffers, and the observer during a calibration."""
_CALIBRATE = (
    "run lowbit.calibrate(model) over some batches first, or load a state dict that has input_scale"
)


class StaticInput(Uncast, StandIn):
    """The mixin of a module with a static scale of its input."""

    uncast = (SCALE, ZERO)


def inputs_of(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The scale and the zero point, each divided by RATE; None where the module has none."""
    return getattr(module, SCALE, None), getattr(module, ZERO, None)


def input_qparams(module: nn.Module, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the input, as `lowbit.numerics.affine` takes them."""
    scale, zero = inputs_of(module)
    assert scale is not None
    return qparams(spec, scale.float(), None if zero is None else zero.float())


def is_known(module: nn.Module) -> bool:
    """True if the module has a static scale that is a number. A sharded one is judged by this rank's part."""
    found = [local(t) for t in inputs_of(module) if t is not None]
    return bool(found) and not any(bool(t.isnan().any()) for t in found)


def check_input(module: nn.Module, name: str) -> None:
    """Raise ValueError unless the module has a static scale that is a number. `name`: how the message names it."""
    found = [t for t in inputs_of(module) if t is not None]
    if not found or any(bool(t.isnan().any()) for t in found):
        raise ValueError(f"the input of {name} has no static scale yet: {_CALIBRATE}")
    if any(bool(t.isinf().any()) for t in found):
        raise ValueError(
            f"the static scale of the input of {name} is infinite: go back to a checkpoint before, and train on with a "
            "lower learning rate"
        )


# ---- giving, writing and taking away ------------------------------------------------------------------------------


def hold_input(
    modules: Sequence[nn.Module], spec: Spec, found: tuple[Tensor, Tensor | None], learned: bool
) -> None:
    """Register a scale and a zero point, divided by RATE, which the modules share. `learned`: as parameters."""
    take_input(modules)
    for name, value in zip((SCALE, ZERO), found, strict=True):
        own = nn.Parameter(value) if learned and value is not None else value
        for module in modules:
            if learned and value is not None:
                module.register_parameter(name, own)  # type: ignore[arg-type]
            else:
                module.register_buffer(name, own)
    for module in modules:
        module.input_spec = spec  # type: ignore[assignment]
        with contextlib.suppress(
            TypeError
        ):  # a class that refuses subclasses: a cast rounds the scale
            give(module, StaticInput)


def take_input(modules: Iterable[nn.Module]) -> None:
    """Undo `hold_input`, where it was called."""
    for module in modules:
        for name in (SCALE, ZERO):
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
        module.__dict__.pop("input_spec", None)
        take(module, StaticInput)


def held_for(module: nn.Module, spec: Spec) -> tuple[Tensor, Tensor | None] | None:
    """The scale and zero point, divided by RATE, that an earlier calibration for this spec left in a plain module."""
    if module.__dict__.get("input_spec") != spec:
        return None
    scale, zero = inputs_of(module)
    return None if scale is None else (scale.detach(), None if zero is None else zero.detach())


@torch.no_grad()
def set_range(module: nn.Module, spec: Spec, values: Tensor) -> None:
    """Write the scale and zero point of the range `values`, [low, high], into a module that has them, in place."""
    dynamic = replace(spec, static=False)
    found = as_parameters(spec, *dynamic.choose_qparams(values, torch.float32))
    for own, value in zip(inputs_of(module), found, strict=True):
        if own is not None and value is not None:
            part = local(own)
            # FSDP2 gives the one element to the first rank
            part.copy_(value[: part.numel()] if is_dtensor(own) else value)
