"""Merge the adapters of PEFT into low-bit weights, and report the loss.

    report = lowbit.peft.merge_(model)                      # W' = round(W + s · B · A), in the scheme of W
    report = lowbit.peft.merge_(model, batches=batches)     # the rounding is learned from a few batches
    print(report)                                           # what both lose
    report.unmerge_()                                       # W again, to the bit
    model = model.merge_and_unload()                        # or: the model without adapters, in low bits

PEFT's own `merge_adapter` works too, but rounds once for each adapter, and `unmerge_adapter` once more, so W does not
come back. Siblings go on sharing a part of their scales (`lowbit.interop.peft.own_merges`).
`merge_` dequantizes the base to float32, lets PEFT add all adapters by its own formula of LoRA, DoRA, LoHa, IA3 and the
others, and rounds the sum once. A block keeps its scale if that scale is nearer, and siblings keep what they share of
their scales. Where a sum is larger than that can hold, all siblings get a power of two times as much, which changes no
other value. Where their values would become too small for such scales, the merge is refused.

Most changes by an adapter are smaller than half a step of the codes, and to nearest they vanish. With `batches`
`lowbit.inference.LearnedRounding` chooses which weights take the step: its start is the sum rounded to nearest, and its
loss the divergence from the base with its adapters beside it. Only weights that an adapter changes get other bits.

`lowbit.dequantize_(model)` before merging loses nothing. QAT of adapters (`lowbit.qat`) trains the rounded weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, frozen_families, is_tuner
from lowbit.convert.owners import Owner, check_held, find_owners
from lowbit.convert.siblings import family_of
from lowbit.inference.calibration.step import Step
from lowbit.interop.peft.learned import Learned
from lowbit.interop.peft.report import MergeReport, measured
from lowbit.interop.peft.sums import Kept, Sum, attribute_of, values_of
from lowbit.linear.frozen.kinds import representation_of
from lowbit.progress import progress
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.core.dtensor import local
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.requantize import REACH, check_room, requantize, widen, write
from lowbit.tensor.trained.trainable import TrainableTensor

LEAST = 20.0
"""The least signal-to-noise ratio, in dB, that siblings of a large sum keep: that of rounding to 4 bits."""


def merge_(
    model: nn.Module,
    adapter_names: Sequence[str] | None = None,
    *,
    batches: Iterable[Any] | None = None,
    steps: Sequence[Step] | None = None,
    keep_base: bool = True,
) -> MergeReport:
    """Merge adapters of PEFT into the weights of their base layers, in place.

    Args:
        model: with layers of PEFT; a layer whose weight is not in low bits is merged as by `merge_adapter`.
        adapter_names: the adapters to merge, in this order; None: those in use.
        batches: those of `lowbit.calibrate`. None: sums are rounded to nearest. With batches the steps round them, and
            the report says what both lose. Where the steps do not lower the loss, the sums stay rounded to nearest.
        steps: those of `lowbit.calibrate` that leave the model in high precision as it is. They start from the scales
            of the sums rounded to nearest. None: [LearnedRounding(steps=100, batch_size=16,
            over="model", reach=2.0, scale_rate=0, vector_rate=0)], which changes codes alone.
        keep_base: keep a copy of each low-bit weight in the report, for `unmerge_`. Without copies, a merge that is
            refused in one layer leaves the layers before it merged, unless there are batches.

    Raises:
        TypeError: `model` is not a module; names, batches or steps of another kind; steps without batches.
        ValueError: no layer of PEFT; a base weight that accelerate offloads; names that no adapter has; adapters that
            are merged already; NaN or infinite adapters; sums that round to infinity in the dtype of the weight, or so
            large that siblings, which share a part of their scales with them, would keep less than 20 dB; no batches,
            or empty ones; steps that change the model in high precision, such as AWQ. The model is then as it was.
        NotImplementedError: a base weight that trains in low bits, as `lowbit.train.prepare_` makes them from
            `Int8Weight`; with batches, weights that no step rounds: of convolutions, act-order, rotated, tied or
            sharded ones. The model then stays unchanged.
    """
    check_module(model)
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers of PEFT; make them by peft.get_peft_model(model, config)"
        )
    if merged := [name for name, layer in layers.items() if layer.merged]:
        raise ValueError(
            f"the adapters of {merged[0]} are merged already; call unmerge_() of the report that merge_ gave, or "
            "unmerge_adapter() of PEFT after its merge_adapter()"
        )
    if steps is not None and batches is None:
        raise TypeError("steps need batches: merge_(model, batches=…, steps=…)")
    if adapter_names is not None:
        _check_names(adapter_names, layers)
    for name, layer in layers.items():
        _check_base(name, layer, batches is not None)
        _check_finite(name, layer)
    if batches is not None:
        _check_shared(model, layers)
    learn = None if batches is None else Learned(model, batches, steps)
    report, names = MergeReport(), None if adapter_names is None else list(adapter_names)
    families = {id(w): [*f.values()] for f in frozen_families(model) for w in f.values()}
    keeps = keep_base or learn is not None
    done: list[Kept] = [] if learn is None else learn.vectors()
    sums: list[Sum] = []
    lost: dict[Any, float] = {}
    try:
        with progress("merging adapters", len(layers), unit="layers") as advance:
            for name, layer in layers.items():
                base = getattr(layer.get_base_layer(), attribute_of(layer), None)
                siblings = _MergedSiblings(families.get(id(base), []), done, lost)
                before = Kept.of_layer(layer)
                done.append(before)
                found = _merge(name, layer, names, report, siblings)
                if found is not None and learn is not None:
                    found.before = before
                    sums.append(found)
                if not keeps and not lost:
                    done.clear()
                advance(1)
        _check_lost(model, lost)
        if learn is not None and sums:
            learn.run(sums, report)
    except BaseException:
        while done:
            done.pop().restore()
        raise
    report._kept = done if keep_base else []
    return report


def _check_names(names: Any, layers: dict[str, Any]) -> None:
    held = {
        name
        for layer in layers.values()
        for each in layer.adapter_layer_names
        for name in getattr(layer, each)
    }
    if isinstance(names, str):
        raise TypeError(f"adapter_names must be a list of names, got {names!r}; give [{names!r}]")
    if unknown := [name for name in names if name not in held]:
        accepted = ", ".join(map(repr, sorted(held)))
        raise ValueError(
            f"no layer has adapters named {', '.join(map(repr, unknown))}; accepted: {accepted}"
        )


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers of PEFT that merge, by their names."""
    return {name: m for name, m in model.named_modules() if is_tuner(m) and hasattr(m, "merge")}


def _merge(
    name: str,
    layer: Any,
    adapter_names: list[str] | None,
    report: MergeReport,
    siblings: _MergedSiblings,
) -> Sum | None:
    """Merge the adapters of one layer. Returns the sum where a low-bit weight takes a change."""
    base, attribute = layer.get_base_layer(), attribute_of(layer)
    weight = getattr(base, attribute, None)
    if not isinstance(weight, AffineTensor):
        layer.merge(safe_merge=True, adapter_names=adapter_names)
        report.plain.append(name)
        return None
    own = _name_of(name, layer)
    before, merged, changes = _changed(
        own,
        layer,
        lambda: layer.merge(safe_merge=True, adapter_names=adapter_names),
        siblings,
    )
    if not layer.merged:  # no adapter of these names
        return None
    report.layers.append(measured(own, weight, merged, before))
    return Sum(layer, weight, merged, len(report.layers) - 1) if changes else None


def _name_of(name: str, layer: Any) -> str:
    """The name of what the adapters of a layer change."""
    attribute = attribute_of(layer)
    return name if attribute == "weight" else f"{name}.{attribute}"


def _changed(
    name: str, layer: Any, change: Callable[[], None], siblings: _MergedSiblings
) -> tuple[Tensor, Tensor, bool]:
    """Let PEFT change the low-bit weight of a layer in float32, and round the sum once. Returns the values before, the
    sum, and True if they differ."""
    base, attribute = layer.get_base_layer(), attribute_of(layer)
    weight = getattr(base, attribute)
    before = values_of(weight)
    setattr(base, attribute, nn.Parameter(before.clone(), requires_grad=False))
    try:
        change()
        after = getattr(base, attribute).detach()
    finally:
        setattr(base, attribute, weight)
    changes = not torch.equal(after, before)  # else -0 + 0 would give other codes in FP4
    if changes:
        with torch.no_grad():
            try:
                check_weight(after, "the sum")
                siblings.make_room(weight, after)
                _round(name, weight, after)
            except ValueError as error:
                raise ValueError(f"{name} and its adapters: {error}") from error
    return before, after, changes


def change_siblings(
    model: nn.Module, layers: Mapping[str, Any], change: Callable[[Any], None]
) -> list[str]:
    """Let `change`, PEFT's merge or its reverse, change the weights of layers that share a part of their scales with
    siblings, so that they still share it. Returns the names of these layers. Others are left alone, as are sharded
    weights and those on meta.

    Args:
        model: with all siblings.
        layers: of PEFT, by their names.
        change: called with each of the layers.

    Raises ValueError as `merge_` for values that are not finite or that no such scales hold. The layer, and those that
    lost by it, are then as they were.
    """
    families = {id(w): [*f.values()] for f in frozen_families(model) for w in f.values()}
    done: list[Kept] = []
    lost: dict[Any, float] = {}
    changed: list[str] = []
    try:
        for name, layer in layers.items():
            weight = getattr(layer.get_base_layer(), attribute_of(layer), None)
            own = families.get(id(weight), [])
            if not all(isinstance(w, AffineTensor) and not w.is_meta for w in own) or not own:
                continue
            done.append(Kept.of_layer(layer))
            whole = _name_of(name, layer)
            _changed(whole, layer, partial(change, layer), _MergedSiblings(own, done, lost))
            changed.append(name)
            if not lost:
                done.clear()
        _check_lost(model, lost)
    except BaseException:
        while done:
            done.pop().restore()
        raise
    return changed


@dataclass
class _MergedSiblings:
    """Frozen weights that share a part of their scales.

    Attributes:
        weights: one that is merged among them.
        kept: gets them as they are before they change.
        lost: gets the norm of what each loses by a scale that is too large for it, if that is anything.
    """

    weights: list[Any]
    kept: list[Kept]
    lost: dict[Any, float]

    def make_room(self, weight: Any, values: Tensor) -> None:
        """Widen what `weight` shares with the others if that is too small for `values`, and would clip them."""
        if not self.weights:
            return
        own = _joint_of(weight)
        needed = weight.spec.joint_part([values], own.dtype).to(own)
        ratio = needed / own if weight.spec.scales is None else own / needed
        if not bool((ratio > REACH).any()):
            return
        joined = [w for w in self.weights if torch.equal(_joint_of(w), own)]
        self.kept.append(Kept(joined))
        factor = torch.exp2(ratio.float().clamp(min=1).log2().ceil())
        for each in joined:
            before = values_of(each)
            widen(each, factor)
            change = float((values_of(each) - before).double().norm())
            if change and each is not weight:
                self.lost[each] = self.lost.get(each, 0.0) + change


def _check_lost(model: nn.Module, lost: dict[Any, float]) -> None:
    """Raise ValueError where a sibling with a small sum, or without an adapter, lost it to the scale of a large one."""
    names = {id(p): name for name, p in model.named_parameters()}
    for weight, change in lost.items():
        size = float(values_of(weight).double().norm())
        if change > size * 10 ** (-LEAST / 20):
            raise ValueError(
                f"{names[id(weight)]} shares a part of its scales with siblings, whose adapters are so large that its "
                f"own values come to less than {LEAST:g} dB above their rounding: call lowbit.dequantize_(model) "
                "before merging, or merge smaller adapters"
            )


def _joint_of(weight: Any) -> Tensor:
    """The part of its scales that a weight shares with siblings."""
    scales = weight.spec.scales
    found: Tensor = weight.scale if scales is None else getattr(weight, scales.joint)
    return found


def _round(name: str, weight: AffineTensor, values: Tensor) -> None:
    """Round to nearest, in place. A weight with siblings keeps the part of its scales that they share."""
    if family_of(name) is None or not weight.spec.joins:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*takes new values")
            weight.requantize_(values)
        return
    turned = weight.transposed
    stored, own = (weight._transposed(), values.mT) if turned else (weight, values)
    change = write if weight.spec.scales is None else requantize
    check_room(stored, own, change)
    change(stored, own)


def _check_base(name: str, layer: Any, learns: bool) -> None:
    base, attribute = layer.get_base_layer(), attribute_of(layer)
    weight = getattr(base, attribute, None)
    own: Any = local(weight)
    if isinstance(weight, Tensor):
        check_held(Owner(base, attribute, f"{name}.{attribute}"), weight)
    if isinstance(own, TrainableTensor) and own.updated_in_place() is None:
        raise NotImplementedError(
            f"{name} holds {type(own).__name__}, which trains in low bits, and PEFT would add the adapters to it by "
            "a rounding that no report states; call lowbit.train.convert_(model) for a weight that merge_ rounds, or "
            "lowbit.train.restore_(model) for a plain one, before merging"
        )
    if not learns or not isinstance(own, AffineTensor):
        return
    in_shards = weight is not own
    if in_shards or type(own) is not representation_of(own.spec):
        raise NotImplementedError(
            f"{name} holds {type(own).__name__}{' in shards' if in_shards else ''}, whose rounding no step "
            "learns; accepted: weights of linears and stacked experts as lowbit.quantize_ makes them, without "
            "act-order and rotations. Merge without batches, which rounds to nearest"
        )


def _check_shared(model: nn.Module, layers: dict[str, Any]) -> None:
    owners = find_owners(model)
    for name, layer in layers.items():
        weight = getattr(layer.get_base_layer(), attribute_of(layer), None)
        held = owners.get(id(weight), [])
        if isinstance(weight, AffineTensor) and len(held) > 1:
            raise NotImplementedError(
                f"{name} shares its weight, which is {' and '.join(owner.fqn for owner in held)}, and the adapter is "
                "beside one of them; untie them, or merge without batches, which changes both"
            )


def _check_finite(name: str, layer: nn.Module) -> None:
    base = {id(p) for p in layer.get_base_layer().parameters()}  # type: ignore[operator]
    for own, param in layer.named_parameters():
        if id(param) not in base and not bool(torch.isfinite(param).all()):
            raise ValueError(
                f"{name}.{own} has NaN or infinite values; repair or reload the adapter before merging it"
            )
