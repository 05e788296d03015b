"""The layers of LoRA in QAT: PEFT's, recognised by their interface, so that nothing imports PEFT.

A LoRA layer holds `base_layer`, and by the name of each adapter `lora_A`, `lora_B` (of an embedding `lora_embedding_A`,
`lora_embedding_B`), `scaling` and `lora_dropout`; `active_adapters` says which are in use. `merge_in_products` gives it
a subclass of its class, whose forward multiplies once, by the rounded merged weight (`lowbit.tensor.trained.adapted`).
Its parameters, its state dict and all its other methods are those of PEFT.

With `disable_adapter()` the product is that of the rounded base weight. After `merge_adapter()`, W holds the adapters.
Where the base weight is not prepared any more, the forward is PEFT's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Owner, Report, Target, adapter_modules, is_tuner, joined_name
from lowbit.layers.stand_in import StandIn, give, take, without
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.trained.adapted import Adapters, frozen_with, is_merged, product_with, rows_with
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor

KEEP = (
    'lowbit.qat.prepare_(model, scheme, adapters="keep") rounds the base weight alone and leaves the adapters beside '
    "it; a pattern or filter leaves the layer out"
)
_INTERFACE = ("lora_A", "lora_B", "lora_embedding_A", "scaling", "lora_dropout", "merged")
_BASES = (nn.Linear, nn.Embedding)


def name_adapters(report: Report, model: nn.Module, note: str) -> None:
    """Say in the report what becomes of adapters."""
    adapters = adapter_modules(model)
    names = {
        joined_name(prefix, name)
        for prefix, module in model.named_modules()
        if module in adapters
        for name in module._parameters
    }
    report.entries = [replace(e, note=note) if e.fqn in names else e for e in report.entries]


# ---- the layers of a model -------------------------------------------------------------------------------------------


def _around(model: nn.Module) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Each module inside of a base layer → the name of the layer of PEFT around it, and that layer."""
    around: dict[nn.Module, tuple[str, nn.Module]] = {}
    for prefix, module in model.named_modules():
        if is_tuner(module):
            for part in _base(module).modules():
                around.setdefault(part, (prefix, module))
    return around


def warn_of_files(model: nn.Module, learned: Iterable[Sequence[Owner]]) -> None:
    """Warn where modules with learned scales are base layers of PEFT. `learned`: the owners of each weight."""
    around = _around(model)
    if any(owner.module in around for owners in learned for owner in owners):
        warnings.warn(
            "learned scales are parameters of base layers, and PEFT's files (save_pretrained, checkpoints of the "
            "Trainer) hold adapters alone: what is loaded or resumed from them has scales of a new search, and other "
            "outputs. Save model.state_dict() too, or take scales='present', with which these files are exact",
            UserWarning,
            stacklevel=3,
        )


def layers_of(model: nn.Module, targets: Iterable[Target], merge: bool) -> dict[int, nn.Module]:
    """id of a target's weight → the LoRA layer around the module that holds it. Empty where they are not to `merge`.

    Raises:
        NotImplementedError: adapters that cannot be merged into a rounded weight, by name.
        ValueError: `model` is such a layer itself, which no module holds.
    """
    found: dict[int, nn.Module] = {}
    if not merge:
        return found
    around = _around(model)
    for target in targets:
        layers = [around[owner.module] for owner in target.owners if owner.module in around]
        if not layers:
            continue
        fqn, layer = layers[0]
        if layer is model:
            raise ValueError(
                f"the model is itself a {type(layer).__name__} of PEFT, which convert_ would have to replace; give the "
                "module that holds it"
            )
        _check_layer(fqn, layer, target)
        found[id(target.weight)] = layer
    return found


def _base(layer: Any) -> nn.Module:
    base: nn.Module = layer.base_layer
    return base


def _check_layer(fqn: str, layer: Any, target: Target) -> None:
    """Raise NotImplementedError unless `merge_in_products` serves this layer."""
    kind, base = type(layer).__name__, _base(layer)
    if hasattr(layer, "parameter_name"):
        _refuse(fqn, f"LoRA of the parameter {layer.parameter_name!r} (target_parameters)")
    if not all(hasattr(layer, name) for name in _INTERFACE):
        _refuse(fqn, f"an adapter of the kind {type(layer).__module__}.{kind}, which is not LoRA")
    if without(type(base)) not in _BASES:
        _refuse(fqn, f"LoRA of a {type(base).__name__} (accepted: nn.Linear and nn.Embedding)")
    if getattr(layer, "fan_in_fan_out", False) and isinstance(base, nn.Linear):
        _refuse(fqn, "LoRA with fan_in_fan_out=True, a transposed weight")
    if len(target.owners) > 1:
        names = " and ".join(owner.fqn for owner in target.owners)
        _refuse(fqn, f"LoRA of one of several modules that share a weight ({names})")
    active_adapters(layer, fqn)


def _refuse(fqn: str, what: str) -> None:
    raise NotImplementedError(f"{fqn}: QAT does not merge {what}; {KEEP}")


def active_adapters(layer: Any, fqn: str = "a LoRA layer") -> Adapters:
    """The adapters in use, in the order in which PEFT applies them. Raises NotImplementedError for those that cannot
    be merged."""
    found = Adapters([], [], [])
    embeds = isinstance(_base(layer), nn.Embedding)
    downs = layer.lora_embedding_A if embeds else layer.lora_A
    for name in layer.active_adapters:
        if name not in downs:
            continue
        _check_adapter(layer, name, fqn)
        if embeds:  # W [V, D] gets (B · A)ᵀ of A [R, V] and B [D, R]
            found.a.append(layer.lora_embedding_B[name].t())
            found.b.append(downs[name].t())
        else:
            found.a.append(downs[name].weight)
            found.b.append(layer.lora_B[name].weight)
        found.scales.append(float(layer.scaling[name]))
    return found


def _check_adapter(layer: Any, name: str, fqn: str) -> None:
    if getattr(layer, "use_dora", {}).get(name, False):
        _refuse(fqn, f"DoRA (adapter {name!r}), which divides by the norm of the merged weight")
    variant = getattr(layer, "lora_variant", {}).get(name)
    if variant is not None:
        _refuse(fqn, f"{type(variant).__name__} (adapter {name!r})")
    dropout = layer.lora_dropout[name]
    if getattr(dropout, "p", 0.0) > 0:
        _refuse(
            fqn,
            f"an adapter with lora_dropout={dropout.p} ({name!r}): it drops the adapter's input, and a merged weight "
            "has only one input; set lora_dropout=0",
        )
    if getattr(layer, "lora_bias", {}).get(name, False):
        _refuse(fqn, f"an adapter with a bias of its own (lora_bias=True, {name!r})")


# ---- forward -----------------------------------------------------------------------------------------------------


class _Merging(StandIn):
    """Mixin of a LoRA layer whose adapters are merged into the weight before it is rounded."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.base_layer
        weight: Any = base.weight
        prepared = is_merged(weight) and weight.off != "all"
        if self.disable_adapters or self.merged or not prepared:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        given = [name for name, value in kwargs.items() if value is not None]
        if args or given:
            raise NotImplementedError(
                f"{given or 'further arguments'} of a LoRA layer in QAT: all rows of a batch share the merged weight. "
                f"Leave them out, or call lowbit.qat.convert_(model) first; {KEEP}"
            )
        adapters, scales = active_adapters(self), weight.quantizer.scales_in(base)
        if isinstance(base, nn.Embedding):
            options = (base.padding_idx, base.max_norm, base.norm_type, base.scale_grad_by_freq)
            return rows_with(weight, adapters, x, scales, *options)
        return product_with(weight, adapters, x, base.bias, scales)


def merge_in_products(layers: Iterable[nn.Module]) -> None:
    """Give these LoRA layers a forward that multiplies by the rounded merged weight, in place."""
    for layer in layers:
        give(layer, _Merging)


def multiply_as_before(layers: Iterable[nn.Module]) -> None:
    """Undo `merge_in_products` for those of these modules for which it was called."""
    for layer in layers:
        take(layer, _Merging)


# ---- conversion ------------------------------------------------------------------------------------------------------


def merging_layers(model: nn.Module) -> dict[int, tuple[str, Any]]:
    """id of a base weight → the name and the layer that `merge_in_products` changed, whose base it is."""
    return {
        id(_base(layer).weight): (fqn, layer)
        for fqn, layer in model.named_modules()
        if isinstance(layer, _Merging) and is_merged(_base(layer).weight)
    }


def final_adapters(layer: Any, fqn: str) -> Adapters:
    """The adapters that conversion merges: those that the forward uses.

    Raises ValueError where they are disabled.
    """
    if layer.merged:
        return Adapters([], [], [])
    if layer.disable_adapters:
        raise ValueError(
            f"the adapters of {fqn} are disabled, and conversion merges those in use: leave disable_adapter(), or call "
            "enable_adapter_layers(), first"
        )
    found = active_adapters(layer, fqn)
    if not all(bool(torch.isfinite(t).all()) for t in (*found.a, *found.b)):
        raise ValueError(
            f"the adapters of {fqn} have NaN or infinite values; repair or reload them before quantizing"
        )
    return found


def quantized(target: Target, adapters: Adapters) -> LowbitTensor:
    weight = target.weight
    assert isinstance(weight, FakeQuantizedTensor)
    return frozen_with(weight, adapters, weight.quantizer.scales_in(target.owners[0].module))


def unwrapped(target: Target, fqn: str) -> Target:
    """The target under the name that it has once the base layer took the place of its LoRA layer, `fqn`."""
    ((module, name, _),) = target.owners
    return replace(target, owners=(Owner(module, name, joined_name(fqn, name)),))


def unwrap(model: nn.Module, layers: set[nn.Module]) -> None:
    """Put the base layer in the place of each of these LoRA layers, everywhere in `model`."""
    for parent, name, layer in [*_places(model, layers)]:
        setattr(parent, name, _base(layer))


def _places(model: nn.Module, layers: set[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child in layers:
                assert child is not None
                yield parent, name, child
