"""Layers with a prepared weight: what a product rounds, by which scales, and where these are.

`lowbit.train.prepare_` and `lowbit.qat.prepare_` give a layer the mixin below for its class, once, and `make_plain`
takes all of it back. What such a layer does follows from its weight and from what it holds beside it:

    weight      present scales: the weight computes them in every product
                learned ones: parameters `weight_scale` and `weight_zero` (`lowbit.tensor.trained.learned_scales`)
                a part shared with siblings (`lowbit.tensor.trained.joint`): the layer knows them
                split over ranks: `lowbit.layers.sharded_linear`
    input       not rounded, or dynamic: by the product itself
                static: `input_scale` and `input_zero` (`lowbit.layers.static_input`), learned or constant

Experts, whose forward is their own, are in `lowbit.layers.learned_experts`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from lowbit.layers import static_input
from lowbit.layers.frozen import hide_frozen, show_frozen
from lowbit.layers.learned_experts import Holder, Scaled
from lowbit.layers.sharded_linear import sharded_linear
from lowbit.layers.stand_in import give, names_given, take, without
from lowbit.layers.static_input import (
    OBSERVER,
    StaticInput,
    check_input,
    hold_input,
    inputs_of,
    take_input,
)
from lowbit.linear.coded_linear import constant_input
from lowbit.linear.frozen.checks import refuse_transforms
from lowbit.linear.operands import Values
from lowbit.numerics import learned_scales as formula
from lowbit.numerics.learned_scales import qparams, with_gradients_of
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.dtensor import local, replicated
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import (
    SCALE,
    ZERO,
    LearnedScales,
    has_scales,
    hold,
    is_learned,
    scales_of,
    starting_parameters,
)
from lowbit.tensor.trained.quantizers import NO_SCALES
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.tracing import tracer


class Prepared(Holder):
    """What all layers below have: they round their input by a static scale, and their weights know them."""

    siblings: tuple[nn.Module, ...]
    """All layers whose weights share a part of their scales with this one's, this one included."""
    has_static_input = False
    """True after `prepare_input`. A layer may also hold the scale of a calibration that its scheme does not use."""
    is_calibrated = False
    """Eager code has found the static scale to be a number. Not asked again, because the host would wait."""

    @property
    def is_observed(self) -> bool:
        """True if a calibration sees the inputs, which then pass unrounded."""
        return self._modules.get(OBSERVER) is not None

    def coded(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [M, K], of which there is some, for a product of codes: codes, the handle, and the scale [1, 1]
        (`lowbit.linear.coded_linear`)."""
        self._check_calibrated()
        weight: Any = self.weight
        spec = weight.scheme.activation
        scale = inputs_of(self)[0].float().view(1, 1)  # type: ignore[union-attr]
        own, _ = qparams(spec, scale, None)
        if static_input.SCALE not in self._parameters:
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
        # load_state_dict(assign=True) may bring others; in float32 they are what the converted weight stores
        scale, zero = (None if t is None else t.float().view([1] * x.ndim) for t in inputs_of(self))
        if x.numel() == 0:  # nothing to round; gradients are zero, and not missing
            return x + sum((t * 0).to(x.dtype) for t in (scale, zero) if t is not None)
        if static_input.SCALE in self._parameters:
            return formula.learned_fake_quantize(x, scale, zero, spec)  # type: ignore[arg-type]
        return spec.fake_quantize_by(x, *qparams(spec, scale, zero))  # type: ignore[arg-type]

    def _static(self: Any, input: Tensor) -> Prepared | None:
        """This layer, if it rounds its input by a static scale. An observer sees an input whose rounding is switched
        off here, since `rounded` does not get it."""
        weight: Any = self.weight
        if not weight.scheme.is_static:
            return None
        observer: Any = self._modules.get(OBSERVER)
        if observer is not None and weight.input_spec is None:
            observer.observe(input)
        return self

    def check_computed(self, fqn: str | None = None) -> None:
        """Raise NotImplementedError if the weight is computed from a prepared one whose products round their input,
        since the product of the computed weight would not. `fqn`: the name of the layer."""
        if type(self.weight) is not Tensor:
            return
        for name, parameter in self.named_parameters():
            own = held_locally(parameter)
            if isinstance(own, FakeQuantizedTensor) and own.input_spec is not None:
                raise NotImplementedError(
                    f"{fqn or self}: its weight is computed from {name}, as by torch.nn.utils.prune and parametrize, "
                    f"and a product of the computed weight does not round its input to {own.input_spec.format}; "
                    "accepted: prune.remove(layer, 'weight') or parametrize.remove_parametrizations(layer, 'weight') "
                    "before, or a scheme without activation"
                )

    def _check_calibrated(self: Any) -> None:
        # In this order, since torch.compile guards what it reads, and a call in eager mode sets `is_calibrated`.
        if torch.compiler.is_compiling() or self.is_calibrated:
            return
        if not self.weight.is_meta:
            is_linear = isinstance(self, nn.Linear)
            kind, inputs = ("linear", "inputs") if is_linear else ("convolution", "channels")
            count = self.in_features if is_linear else self.in_channels
            check_input(self, f"a {kind} of {count} {inputs}")
            self.is_calibrated = True


class Linear(Prepared):
    """nn.Linear with a prepared weight, whole or split over ranks."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight: Any = self.weight  # read once, because nn.Module looks parameters up in Python
        if not isinstance(weight, FakeQuantizedTensor):
            if not is_dtensor(weight):
                if type(weight) is Tensor:
                    self.check_computed()
                return F.linear(input, weight, self.bias)
            product = self._local_product if has_scales(self) else None
            return sharded_linear(input, weight, self.bias, product)
        static = None if weight.scheme.activation is None else self._static(input)
        if static is None and (weight.off == "all" or tracer.active is not None):
            return F.linear(input, weight, self.bias)  # which a trace watches
        asks = weight.quantizer.has_scales_beside and weight.rounds_weight
        scales = weight.quantizer.scales_in(self) if asks else NO_SCALES
        return FakeQuantizedTensor.product(input, weight, self.bias, scales, static)

    def _local_product(self, x: Tensor, weight: Any, grad_placements: list[Any]) -> Tensor:
        """The product of the local parts. Scales of parts of rows are split as the weight is; each rank has a term of
        the gradient of those of whole rows."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        sharded: Any = self.weight
        placements = sharded.placements
        splits = not weight.scheme.weight.granularity.spans(1, 2)
        own = [p if p != Shard(1) or splits else Replicate() for p in placements]
        pairs = zip(own, placements, grad_placements, strict=True)
        grads = [g if p == w else Partial() for p, w, g in pairs]

        def part(scale: Any) -> Any:
            if scale is None:
                return None
            if not is_dtensor(scale):
                scale = replicated(scale, sharded.device_mesh)
            return scale.redistribute(placements=own).to_local(grad_placements=grads)

        scale, zero = map(part, scales_of(self))
        is_cut = not (splits or weight.quantizer.absolute) and Shard(1) in placements
        extremes = _extremes_of_rows(weight, sharded) if is_cut else None
        return FakeQuantizedTensor.product(x, weight, None, (scale, zero, extremes))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Tensor parallelism replaces the weight by this call."""
        own = held_locally(param) if is_dtensor(param) else None
        if isinstance(own, TrainableTensor):
            own.check_placement(param)
        super().register_parameter(name, param)
        if isinstance(own, TrainableTensor):
            own.was_placed(param)


def _extremes_of_rows(weight: Any, sharded: Any) -> Tensor:
    """The extremes of each part of this rank's rows [N, 2 a rank], of which the ranks hold a part each.

    Args:
        weight: this rank's part of `sharded`, a DTensor [N, K].
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    own, mesh, placements = weight.weight.detach(), sharded.device_mesh, sharded.placements
    ends = torch.stack(torch.aminmax(own, dim=1), 1) if own.shape[1] else own.new_zeros(len(own), 2)
    parts = [mesh.size(dim) for dim, p in enumerate(placements) if p == Shard(1)]
    shape = torch.Size((sharded.shape[0], 2 * math.prod(parts)))
    found = DTensor.from_local(
        ends, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )
    rows = [Replicate() if p == Shard(1) else p for p in placements]
    return found.redistribute(placements=rows).to_local()


class Embedding(Prepared):
    """nn.Embedding whose weight has learned scales."""

    def forward(self: Any, input: Tensor) -> Tensor:
        weight: Any = self.weight
        if is_dtensor(weight):
            raise NotImplementedError(
                f"tensor parallelism of an embedding {tuple(weight.shape)} with learned scales; leave it out of "
                "prepare_, or give it scales='present'"
            )
        if not is_learned(weight):  # computed from it, as by prune
            return super().forward(input)
        if weight.is_gathered and self.sparse:
            raise weight._unsupported(
                "nn.Embedding(sparse=True) under FSDP2, which reduces no sparse gradients (accepted: sparse=False)"
            )
        options = self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse
        scales = weight.quantizer.scales_in(self)
        if weight.is_gathered or not weight.rounds_weight:
            return F.embedding(input, weight.seen_by(*scales).to(weight.dtype), *options)
        refuse_transforms(weight)
        found: Tensor = weight.rows_of(Values.apply(weight), input, scales, *options)
        return found


def _convolve(self: Any, input: Tensor) -> Tensor:
    """The forward of a prepared convolution."""
    weight: Any = self.weight
    if not isinstance(weight, FakeQuantizedTensor):  # computed from it, as by prune
        self.check_computed()
        return self._conv_forward(input, weight, self.bias)
    static = self._static(input)
    values = weight.seen_by(*weight.quantizer.scales_in(self))
    rounded = None if static is None else static.rounded
    operands = FakeQuantizedTensor.operands(
        input, weight, values, self.bias, rounded, "convolution"
    )
    return self._conv_forward(*operands)


class Conv1d(Prepared):
    """nn.Conv1d whose weight has learned scales, or whose input a static one."""

    forward = _convolve


class Conv2d(Prepared):
    """nn.Conv2d whose weight has learned scales, or whose input a static one."""

    forward = _convolve


LAYERS: dict[type[nn.Module], type[Prepared]] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
}
"""The mixin for each class of torch."""


# ---- preparing ----------------------------------------------------------------------------------------------------


def make_prepared(modules: Iterable[nn.Module], kinds: Sequence[type[nn.Module]]) -> None:
    """Give each of `modules` that is a layer of one of `kinds` of torch its prepared class, in place."""
    modules = list(modules)
    hide_frozen(modules)
    for module in modules:
        kind = without(type(module), StaticInput)
        if kind in kinds:
            give(module, LAYERS[kind])
    show_frozen(modules)


def is_layer(module: nn.Module) -> bool:
    """True if the module is an `nn.Linear`, `nn.Embedding`, `nn.Conv1d` or `nn.Conv2d` and no subclass of it, so that
    its product is known."""
    return without(type(module)) in LAYERS


def why_not_learned(module: nn.Module, attribute: str) -> str | None:
    """Why this weight of the module cannot have learned scales; None if it can."""
    kind = type(module).__name__
    weight = module._parameters[attribute]
    if not (is_layer(module) and attribute == "weight"):
        assert weight is not None
        if weight.ndim != 3:
            return f"{kind} multiplies by itself"
        if type(module).forward is nn.Module.forward:
            return f"{kind} has no forward, in which its products would see them"
    taken = [attribute + end for end in (SCALE, ZERO) if hasattr(module, attribute + end)]
    return f"{kind} has a {taken[0]} of its own" if taken else None


def give_scales(
    weight: FakeQuantizedTensor,
    holders: Iterable[tuple[nn.Module, str]],
    start: tuple[Tensor, Tensor | None] | None = None,
) -> None:
    """Register the scales and zero points of `weight` in the modules that hold it, which share them. `holders`: a
    module and the name of the weight there. `start`: the parameters of stored scales; None: `starting_parameters`."""
    scale, zero = starting_parameters(weight) if start is None else start
    made = {SCALE: nn.Parameter(scale), ZERO: None if zero is None else nn.Parameter(zero)}
    for i, (module, attribute) in enumerate(holders):
        if i == 0:
            # FSDP2 asks the first holder
            weight.quantizer = LearnedScales(absolute=start is not None, attribute=attribute)
        for end, parameter in made.items():
            module.register_parameter(attribute + end, parameter)
        if not isinstance(module, Prepared):
            hide_frozen([module])
            names = (*names_given(module, Scaled), attribute)
            take(module, Scaled)
            kind = LAYERS.get(without(type(module), StaticInput))
            give(module, *((kind,) if kind else (Scaled, names)))
            show_frozen([module])
        if i == 0:
            hold(module)


def prepare_input(modules: Sequence[nn.Module], spec: Spec, learned: bool) -> None:
    """Give these layers with prepared weights a static scale of their input: that of an earlier calibration, or NaN."""
    found = static_input.held_for(modules[0], spec)
    if found is None:
        device = modules[0].weight.device
        unknown = torch.full((1,), torch.nan, dtype=torch.float32, device=device)  # type: ignore[arg-type]
        found = unknown, unknown.clone() if formula.learns_zero(spec) else None
    hold_input(modules, spec, found, learned)
    make_prepared(modules, [*LAYERS])
    for module in modules:
        cast(Prepared, module).has_static_input = True


def make_siblings(modules: Sequence[nn.Module]) -> None:
    """Make these prepared linears, whose weights have JointScales, know each other."""
    for module in modules:
        cast(Prepared, module).siblings = tuple(modules)
        hold(module)


def make_plain(model: nn.Module, holders: Collection[nn.Module]) -> None:
    """Take back all that was done to the prepared modules of `model` that hold, or compute by a parametrization, the
    weights of `holders`, once these are others. Plain modules stay as they are."""
    modules = [*holders]
    for module in model.modules():
        computed: Any = module.parametrizations if parametrize.is_parametrized(module) else None
        if computed is not None and any(part in holders for part in computed.children()):
            modules.append(module)
    hide_frozen(modules)
    for module in modules:
        if not isinstance(module, Prepared | Scaled):
            continue
        for name in names_given(module, Scaled) or ("weight",):
            for end in (SCALE, ZERO):
                module._parameters.pop(name + end, None)
        if isinstance(module, Prepared):
            if module.has_static_input:
                take_input([module])
            for name in ("has_static_input", "is_calibrated", "siblings"):
                module.__dict__.pop(name, None)
        for kind in (Prepared, Scaled):
            take(module, kind)
    show_frozen(modules)


# ---- static scales of inputs, in a model -------------------------------------------------------------------------


def rounds_input(module: nn.Module) -> bool:
    """True if `prepare_input` gave this layer a static scale of its input."""
    return isinstance(module, Prepared) and module.has_static_input


def named_inputs(model: nn.Module) -> dict[str, nn.Parameter]:
    """Fully qualified name → learned scales and zero points of inputs, shared ones once."""

    def inputs(module: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
        names = (static_input.SCALE, static_input.ZERO) if rounds_input(module) else ()
        return [(name, module._parameters.get(name)) for name in names]

    return dict(model._named_members(inputs))


@torch.no_grad()
def forget_inputs(model: nn.Module) -> None:
    """Set the static scales and zero points of inputs to NaN, as before a calibration: memory that `to_empty` gave."""
    for module in model.modules():
        if isinstance(module, Prepared) and rounds_input(module):
            for t in inputs_of(module):
                if t is not None:
                    local(t).fill_(torch.nan)
            module.is_calibrated = False
