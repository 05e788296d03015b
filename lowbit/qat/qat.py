"""prepare_ and convert_: between them, train as usual.

    qat.prepare_(model, Int4WeightOnly(group_size=32))    # weights fake-quantize in every product
    optimizer = AdamW4bit(model.parameters())             # made after prepare_, which replaces the parameters
    ...                                                   # train
    qat.convert_(model)                                   # int4 weights, equal to the last bit to those trained

The straight-through estimator (arXiv 1308.3432) carries gradients through the rounding. Source of the procedure: Jacob
et al., arXiv 1712.05877.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from lowbit.convert import (
    Choice,
    Entry,
    Filter,
    Owner,
    Report,
    Schemes,
    Target,
    check_module,
    families_of,
    find_targets,
    is_turned,
    modules_of,
    own_schemes,
    replace_weights,
    rounding_owners,
    watch_joined,
)
from lowbit.layers.prepared import (
    Prepared,
    give_scales,
    is_layer,
    make_plain,
    make_prepared,
    make_siblings,
    prepare_input,
    why_not_learned,
)
from lowbit.layers.stand_in import without
from lowbit.layers.static_input import check_input, input_qparams
from lowbit.qat import lora
from lowbit.qat.exchange import prepared_targets
from lowbit.qat.gradients import check_gradients, gradients_note, low_bit_gradients
from lowbit.qat.weights import (
    converted_weight,
    in_model_order,
    in_order_of_linears,
    prepared_weight,
    rounding_owner,
    stored_scales,
)
from lowbit.schemes.mixed_precision import MixedPrecision
from lowbit.schemes.training import IN_ATTENTION
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.trained.adapted import Adapters
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.joint import JointScales, is_joint, joint_parts
from lowbit.tensor.trained.learned_scales import LearnedScales, check_scales, is_learned
from lowbit.tensor.trained.quantizers import PRESENT, Quantizer


def prepare_(
    model: nn.Module,
    scheme: Schemes | None = None,
    filter_fn: Filter | None = None,
    *,
    scales: str = "present",
    adapters: Literal["merge", "keep"] = "merge",
    gradients: MixedPrecision | None = None,
    format: str | None = None,
) -> Report:
    """Make the weights of `model` fake-quantize in every product, in place; they stay trainable.

    Report and errors are those of `lowbit.quantize_`. The parameters are replaced (the new ones share the old ones'
    memory): make the optimizer afterwards. Each `nn.Linear` becomes a subclass of it until `convert_`, so that tensor
    parallelism can split its weight.

    Args:
        model, scheme, filter_fn: those of `lowbit.quantize_`. Experts that the model stores as [experts, inputs,
            outputs] keep that order until `convert_`; a scheme that rounds inputs leaves them alone. A scheme of None
            takes the quantized weights, such as those of `lowbit.load_pretrained`, each by its own scheme: their values
            become weights that train.
        scales: "present": at every step the scales and zero points of the present weight. The state dict stays that
            of the plain model. "learned": these, times a factor that is trained along with the weight, and plus an
            offset for zero points. They start as the present ones (symmetric integers of 3 bits with the largest value
            on the lowest code and none over half a step beyond the codes, 1 and 2 bits as searched ones;
            `search_scales_` chooses by data). Factors are parameters `weight_scale` and `weight_zero` of each
            `nn.Linear`, `nn.Embedding`, `nn.Conv1d` and `nn.Conv2d` (`lowbit.numerics.learned_scales`), and
            `<name>_scale` and `<name>_zero` beside each 3-D weight (experts), which the module reads rounded in its
            forward. Other weights keep present scales, and the report says so. Scales of a quantized weight start as it
            stores them, and are learned without following the weight: the model computes what it did, and blocks that
            do not change keep their codes. Those that it stores in a `scale_format`, such as powers of two, stay
            present ones.
            Any other name is that of a quantizer of your own (`lowbit.tensor.trained.quantizers`).
        adapters: what to do about PEFT's LoRA layers around the chosen weights. Adapters themselves are never rounded.
            "merge": products see the rounded sum of the weight and its adapters, and `convert_` puts the quantized sum
            in the layer's place. "keep": products see the rounded weight and, beside it, the adapters as they are.
        gradients: None: the products of gradients run in high precision, which is the straight-through estimator
            itself. `Int8MixedPrecision()` for int8 × int8 schemes, `Float8MixedPrecision()` for float8 × float8: they
            run in these formats too, as in `lowbit.train`, which is faster and rounds gradients
            (`lowbit.linear.coded_linear`). Its `output` stays True, as the scheme itself says how outputs are computed.
            Weights of other schemes keep high precision, and the report says so.
        format: that of `lowbit.export`, if the trained model will be written: scales then have the dtype that it stores
            (`lowbit.formats.grid`), and what it cannot hold is refused before the training. For models with adapters
            only the schemes are checked. None: scales have the dtype of the weight, or of the scheme.

    A static activation has NaN for its scale until `lowbit.calibrate(model)`, unless that ran before with this scheme.
    With learned scales the one of the input is learned too, as `input_scale` and `input_zero` of its module;
    otherwise these are buffers, which stay.

    Raises also:
        TypeError: `gradients` is not a scheme of mixed precision.
        ValueError: `gradients` fits none of the chosen weights, has `output=False`, or the device lacks its units;
            learned scales of a given scheme whose `scale_format` is not "float"; `format` without a scheme.
        FormatError, a ValueError: what `lowbit.export` refuses to write in `format`, as far as names, shapes, schemes
            and config tell.
        NotImplementedError: adapters that cannot be merged, or kept, by name (`lowbit.qat.lora`). The model is then as
            it was.

    Warns where learned scales belong to layers with adapters: PEFT's files have no room for them.
    """
    _check_choices(scales, adapters, gradients)
    scheme = scheme if format is None else _on_grid(format, scheme)
    targets, report = _targets(model, scheme, filter_fn)
    layers = lora.layers_of(model, targets, merge=adapters == "merge")
    if format is not None and not layers:
        _check_export(model, map(in_order_of_linears, targets), format)
    lora.name_adapters(report, model, _ADAPTER_NOTES[adapters])
    asked = targets if scales == "learned" else []
    notes = {t.fqn: _why_present(t, scheme is None) for t in asked}
    learned = {t.fqn: t.owners for t in asked if notes[t.fqn] is None}
    for target in targets:
        _check_static(target, id(target.weight) in layers)
        if target.fqn in learned:
            _check_free(target)
    modules = modules_of(targets)
    static = [
        (t.fqn, rounding_owners(t), t.scheme.activation) for t in targets if t.scheme.is_static
    ]
    lora.warn_of_files(model, learned.values())

    own = PRESENT if scales == "learned" else Quantizer.kinds[scales]()
    alone = [t for t in targets if id(t.weight) in layers or t.fqn in learned or own != PRESENT]
    families = _families(targets, alone, notes)
    joint = {owner.fqn for family in families for owner in family}
    in_low_bits = low_bit_gradients(targets, gradients)
    if gradients is not None:
        for target in targets:
            _add(notes, target, gradients_note(gradients, target.fqn in in_low_bits))

    def prepared(target: Target) -> Tensor:
        found = LearnedScales() if target.fqn in learned else own
        found = JointScales() if target.fqn in joint else found
        made = prepared_weight(target, target.weight, target.scheme, found)
        made.role = "base" if id(target.weight) in layers else made.role
        made.gradients = gradients if target.fqn in in_low_bits else None
        return made

    starts = {t.fqn: stored_scales(t) for t in targets if t.fqn in learned}
    report = replace_weights(targets, report, prepared, trainable=True)
    report.entries = [_with_note(entry, notes.get(entry.fqn)) for entry in report.entries]
    make_prepared(modules, [nn.Linear])
    for family in families:
        make_siblings([owner.module for owner in family])
    lora.merge_in_products(layers.values())
    for fqn, owners in learned.items():
        holders = [(owner.module, owner.attribute) for owner in owners]
        give_scales(getattr(*holders[0]), holders, starts[fqn])
    for fqn, rounding, spec in static:
        prepare_input([owner.module for owner in rounding], spec, learned=fqn in learned)
    return report.count(model)


_ADAPTER_NOTES = {
    "merge": "of an adapter, which is added to the weight before it is rounded",
    "keep": "of an adapter, which stays beside the rounded weight",
}


_NOT_ROUNDED = "whose input QAT cannot round; a weight-only scheme rounds the weight"
_IN_ATTENTION = f"{IN_ATTENTION}, {_NOT_ROUNDED}"
_INPUTS_FIRST = f"stored as [experts, inputs, outputs], {_NOT_ROUNDED}"


def _targets(
    model: nn.Module, scheme: Schemes | None, filter_fn: Filter | Choice | None
) -> tuple[list[Target], Report]:
    """`find_targets`, without weights that QAT cannot round. The report names them.

    Raises ValueError if no other weight is left.
    """
    check_module(model)
    own = own_schemes(model) if scheme is None else scheme
    targets, report = find_targets(model, own, filter_fn, starts=scheme is None)
    outputs = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    kept = []
    for target in targets:
        in_attention = any(owner.module in outputs for owner in target.owners)
        if target.scheme.activation is None or not (in_attention or is_turned(target)):
            kept.append(in_model_order(target))
            continue
        note = _IN_ATTENTION if in_attention else _INPUTS_FIRST
        shape = tuple(target.weight.shape)
        report.entries += [Entry(owner.fqn, shape, False, note) for owner in target.owners]
    if not kept:
        names = [t.fqn for t in targets] or list(report.left)
        reasons = "; ".join(f"{name}: {report.left[name]}" for name in names[:3])
        raise ValueError(f"nothing to prepare in {type(model).__name__} ({reasons})")
    return kept, report


_ALONE = (
    "a scale of its own, which only plain nn.Linear with present scales, and without merged adapters or a static "
    "activation, share with siblings: formats whose readers merge them need lossy=True"
)


def _families(
    targets: list[Target], alone: list[Target], notes: dict[str, str | None]
) -> list[list[Owner]]:
    """All owners of weights that are siblings and share a part of their scales, family by family: of plain linears,
    which multiply by the weight and in no other way. `notes` gets a note on other siblings, and on those of `alone`."""
    excluded = {target.fqn for target in alone}
    plain = [
        t
        for t in targets
        if t.fqn not in excluded
        and not t.scheme.is_static
        and all(without(type(owner.module)) is nn.Linear for owner in t.owners)
    ]
    found = [[owner for t in family for owner in t.owners] for family in families_of(plain)]
    joint = {owner.fqn for family in found for owner in family}
    for target in (t for family in families_of(targets) for t in family):
        if target.fqn not in joint:
            _add(notes, target, _ALONE)
    return found


def _check_choices(scales: str, adapters: str, gradients: MixedPrecision | None) -> None:
    if scales not in Quantizer.kinds:
        accepted = " or ".join(map(repr, Quantizer.kinds))
        raise ValueError(f"scales must be {accepted} ('learned' trains them), got {scales!r}")
    if adapters not in ("merge", "keep"):
        raise ValueError(f'adapters must be "merge" or "keep", got {adapters!r}')
    check_gradients(gradients)


def _on_grid(format: str, scheme: Schemes | None) -> Schemes:
    """The scheme with scales as the format stores them. Raises FormatError for one that it cannot hold."""
    if scheme is None:
        raise ValueError(
            f"format={format!r} is for a scheme; without one each weight keeps the scheme that it has: leave out format"
        )
    from lowbit.formats.writing import on_grid  # imports all formats

    return on_grid(format, scheme, lossy=False)


def _check_free(target: Target) -> None:
    target.scheme.weight.check_free_scales(
        f"{target.fqn}: scales='learned'",
        "call prepare_ with scales='present', which rounds them as they are stored",
    )


def _check_export(model: nn.Module, targets: Iterable[Target], format: str) -> None:
    from lowbit.formats.foreseen import check_export  # imports all formats

    check_export(model, [*targets], format, lossy=False)


def _why_present(target: Target, as_stored: bool) -> str | None:
    """Why the scales of a weight cannot be learned; None if they are. `as_stored`: by its own scheme."""
    if as_stored and (stored := target.scheme.weight.scale_format) != "float":
        return f"present scales, as it stores them as {stored!r}, which does not take every value"
    reasons = (why_not_learned(owner.module, owner.attribute) for owner in target.owners)
    return next((f"present scales, as {why}" for why in reasons if why is not None), None)


def _check_static(target: Target, is_merged: bool) -> None:
    """Raise an error for a static activation of a module that rounds no input before its product."""
    if target.scheme.is_static and is_merged:
        raise NotImplementedError(
            f"{target.fqn}: a static activation of a weight merged with its adapters; accepted: a dynamic "
            f"activation, or {lora.KEEP}"
        )
    if target.scheme.is_static:
        for module, _, fqn in target.owners:
            if not is_layer(module):
                raise ValueError(
                    f"{fqn} belongs to a {type(module).__name__}, which multiplies by itself and cannot round its "
                    "input by a static scale: leave it out by filter_fn or a pattern, or give it a dynamic activation"
                )


def _add(notes: dict[str, str | None], target: Target, note: str) -> None:
    fqn = target.fqn
    notes[fqn] = "; ".join(filter(None, (notes.get(fqn), note)))


def _with_note(entry: Entry, note: str | None) -> Entry:
    return entry if note is None else replace(entry, note=f"{entry.note}; {note}")


def convert_(model: nn.Module) -> Report:
    """Quantize the weights of a prepared model for good, each by the scheme it was prepared with, in place.

    Dequantized, they equal the fake-quantized ones to the bit. Where adapters were merged in training, the base layer
    takes the place of its LoRA layer.

    Args:
        model: prepared by `lowbit.qat.prepare_`.

    Returns:
        Which weights were converted, and how.

    Raises:
        ValueError: the model was never prepared, a trained weight or adapter has NaN or infinite values, or merged
            adapters are disabled. The model is then as it was.
        NotImplementedError: a weight that a parametrization computes, with learned scales or an activation. The model
            is then as it was.
    """
    check_module(model)
    for fqn, module in model.named_modules():
        if isinstance(module, Prepared):
            module.check_computed(fqn)
    layers = lora.merging_layers(model)
    merged: dict[int, Adapters] = {}
    targets = []
    for target in prepared_targets(
        model, "gather the state dict, load it into a prepared model on one process, convert that"
    ):
        (module, attribute, fqn), weight = target.owners[0], target.weight
        assert isinstance(weight, FakeQuantizedTensor)
        check_weight(weight.weight, fqn)
        if is_learned(weight):
            check_scales(module, attribute, fqn)
        if weight.scheme.is_static:
            owner = rounding_owner(target)
            check_input(owner.module, owner.fqn)
        if id(weight) in layers:
            around, layer = layers[id(weight)]
            merged[id(weight)] = lora.final_adapters(layer, around)
            target = lora.unwrapped(target, around)
        targets.append(in_order_of_linears(target))
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; call lowbit.qat.prepare_(model, scheme) and train first, "
            "or lowbit.quantize_(model, scheme) to convert without training"
        )

    joint = joint_parts(targets)  # before the first weight is replaced

    def frozen(target: Target) -> Tensor:
        weight = target.weight
        assert isinstance(weight, FakeQuantizedTensor)
        if id(weight) in merged:
            return lora.quantized(target, merged[id(weight)])
        is_static, spec = target.scheme.is_static, target.scheme.activation
        of_input = input_qparams(rounding_owner(target).module, spec) if is_static else None
        module, attribute, fqn = target.owners[0]
        if is_joint(weight):
            return converted_weight(target, weight, (None, None, joint[fqn]), of_input)
        scales = weight.quantizer.scales_in(module, attribute)
        return converted_weight(target, weight, scales, of_input)

    modules = modules_of(targets)
    report = replace_weights(targets, Report(), frozen, trainable=False)
    make_plain(model, modules)
    lora.unwrap(model, {layer for _, layer in layers.values()})
    watch_joined(model)
    return report.count(model)
