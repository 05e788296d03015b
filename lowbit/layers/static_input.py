"""Linears and convolutions whose input is rounded by a static scale, one for all inputs, in training.

`lowbit.calibrate` finds the scale and the zero point. The module holds them as `input_scale` and `input_zero` beside
its weight, as `lowbit.numerics.learned_scales` defines parameters: divided by `RATE`. They are parameters where scales
are learned, and buffers where they are frozen. Before the calibration they are NaN. Conversion puts them into the
weight (`AffineTensor.input_scale`), since a product in inference has the weight alone.

Modules that share a weight share the scale of their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.layers import sharded_linear
from lowbit.layers.holds_scales import HoldsScales
from lowbit.linear.coded_linear import constant_input
from lowbit.numerics.learned_scales import (
    as_parameters,
    learned_fake_quantize,
    learns_zero,
    qparams,
    with_gradients_of,
)
from lowbit.numerics.sharded import is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.trained import learned_scales
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor

SCALE, ZERO, OBSERVER = "input_scale", "input_zero", "input_observer"
"""The names in a module: two parameters or buffers, and the observer during a calibration."""
_CALIBRATE = (
    "run lowbit.calibrate(model) over some batches first, or load a state dict that has input_scale"
)


class RoundsInput(HoldsScales, nn.Module):
    """The part of a module with a static scale of its input that rounds it. The modules below have it."""

    is_calibrated = False
    """Whether eager code has found the scale to be a number. Not asked again, because the host would wait."""

    @property
    def is_observed(self) -> bool:
        """Whether a calibration sees the inputs, which then pass unrounded."""
        return self._modules.get(OBSERVER) is not None

    def coded(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, K], of which there is some, for a product of codes: codes, the handle, and the scale [1, 1]
        (`lowbit.linear.coded_linear`)."""
        self._check_calibrated()
        weight: Any = self.weight
        spec = weight.scheme.activation
        scale = inputs_of(self)[0].float().view(1, 1)  # type: ignore[union-attr]
        own, _ = qparams(spec, scale, None)
        if SCALE not in self._parameters:
            return *constant_input(x, spec, own), own
        codes, _, _ = spec.quantize(x.detach(), qparams=(own, None))
        return codes, with_gradients_of(x, scale, None, spec), own

    def rounded(self: Any, x: Tensor) -> Tensor:
        """x [..., K] as the product sees it, differentiable in x and in the scale; unchanged while observed.
        NaN stays NaN."""
        observer: Any = self._modules.get(OBSERVER)
        if observer is not None:
            observer.observe(x)
            return x
        self._check_calibrated()
        weight: Any = self.weight
        spec = weight.scheme.activation
        # model.to(bfloat16) rounds them too; in float32 they are what the converted weight stores
        scale, zero = (None if t is None else t.float().view([1] * x.ndim) for t in inputs_of(self))
        if x.numel() == 0:  # nothing to round; gradients are zero, and not missing
            return x + sum((t * 0).to(x.dtype) for t in (scale, zero) if t is not None)
        if SCALE in self._parameters:
            return learned_fake_quantize(x, scale, zero, spec)  # type: ignore[arg-type]
        return spec.fake_quantize_by(x, *qparams(spec, scale, zero))  # type: ignore[arg-type]

    def observe_unrounded(self: Any, x: Tensor) -> None:
        """Let the observer see an input whose rounding is switched off, which `rounded` does not get."""
        observer: Any = self._modules.get(OBSERVER)
        if observer is not None and self.weight.input_spec is None:
            observer.observe(x)

    def _check_calibrated(self: Any) -> None:
        if self.is_calibrated or torch.compiler.is_compiling():
            return
        if not self.weight.is_meta:
            is_linear = isinstance(self, nn.Linear)
            kind, inputs = ("linear", "inputs") if is_linear else ("convolution", "channels")
            count = self.in_features if is_linear else self.in_channels
            check_input(self, f"a {kind} of {count} {inputs}")
            self.is_calibrated = True


class Linear(RoundsInput, sharded_linear.Linear):
    """nn.Linear of a fake-quantized weight, with a static scale of its input."""

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        self.observe_unrounded(input)
        seen, coded = weight.operand, weight.coded
        if learned_scales.has_scales(self):
            seen, coded = learned_scales.operands(weight, *learned_scales.scales_of(self))
        return FakeQuantizedTensor.product(input, weight, seen, coded, self.bias, self)


class _Convolution(RoundsInput):
    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight
        self.observe_unrounded(input)
        learned = learned_scales.has_scales(self)
        seen = weight.seen_by(*learned_scales.scales_of(self)) if learned else weight.operand()
        operands = FakeQuantizedTensor.operands(
            input, weight, seen, self.bias, self.rounded, "convolution"
        )
        return self._conv_forward(*operands)


class Conv1d(_Convolution, nn.Conv1d):
    """nn.Conv1d of a fake-quantized weight, with a static scale of its input."""


class Conv2d(_Convolution, nn.Conv2d):
    """nn.Conv2d of a fake-quantized weight, with a static scale of its input."""


_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
}


def inputs_of(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The scale and the zero point, each divided by RATE; None where the module has none."""
    return getattr(module, SCALE, None), getattr(module, ZERO, None)


def input_qparams(module: nn.Module, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of the input, as `lowbit.numerics.affine` takes them."""
    scale, zero = inputs_of(module)
    assert scale is not None
    return qparams(spec, scale.float(), None if zero is None else zero.float())


def is_known(module: nn.Module) -> bool:
    """Whether the module has a static scale that is a number. Of a sharded one, whether this rank's part is."""
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


def take_input(modules: Iterable[nn.Module]) -> None:
    """Undo `hold_input`, where it was called."""
    for module in modules:
        for name in (SCALE, ZERO):
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
        module.__dict__.pop("input_spec", None)


def held_for(module: nn.Module, spec: Spec) -> tuple[Tensor, Tensor | None] | None:
    """The scale and zero point, divided by RATE, that an earlier calibration for this spec left in a plain module."""
    if module.__dict__.get("input_spec") != spec:
        return None
    scale, zero = inputs_of(module)
    return None if scale is None else (scale.detach(), None if zero is None else zero.detach())


def prepare_input(modules: Sequence[nn.Module], spec: Spec, learned: bool) -> None:
    """Make these modules with prepared weights a `Linear`, `Conv1d` or `Conv2d`, whose scale is that of an earlier
    calibration, or NaN."""
    found = held_for(modules[0], spec)
    if found is None:
        device = modules[0].weight.device
        unknown = torch.full((1,), torch.nan, device=device)  # type: ignore[arg-type]
        found = unknown, unknown.clone() if learns_zero(spec) else None
    hold_input(modules, spec, found, learned)
    for module in modules:
        module.__class__ = next(k for plain, k in _KINDS.items() if isinstance(module, plain))


def plain_input(modules: Iterable[nn.Module]) -> None:
    """Undo `prepare_input`, where it was called; before `drop_scales` and `make_plain`, of earlier steps."""
    for module in modules:
        for plain, kind in _KINDS.items():
            if type(module) is kind:
                take_input([module])
                module.__dict__.pop("is_calibrated", None)
                if learned_scales.has_scales(module):
                    plain = learned_scales.with_scales(plain)
                elif plain is nn.Linear:
                    plain = sharded_linear.Linear
                module.__class__ = plain
                break


def named_inputs(model: nn.Module) -> dict[str, nn.Parameter]:
    """Fully qualified name → learned scales and zero points of inputs, shared ones once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name in (SCALE, ZERO):
            parameter = module._parameters.get(name)
            if parameter is not None and isinstance(module, RoundsInput):
                fqn = f"{prefix}.{name}" if prefix else name
                found.setdefault(id(parameter), (fqn, parameter))
    return dict(found.values())


@torch.no_grad()
def forget_inputs(model: nn.Module) -> None:
    """Set the static scales and zero points of inputs to NaN, as before a calibration: memory that `to_empty` gave."""
    for module in model.modules():
        if isinstance(module, RoundsInput):
            for t in inputs_of(module):
                if t is not None:
                    local(t).fill_(torch.nan)
            module.is_calibrated = False


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
