"""prepare_ and convert_: between them, train as usual.

    qat.prepare_(model, Int4WeightOnly(group_size=32))    # weights fake-quantize in every product
    optimizer = AdamW4bit(model.parameters())             # made after prepare_, which replaces the parameters
    ...                                                   # train
    qat.convert_(model)                                   # int4 weights, equal to the last bit to those trained

The straight-through estimator (arXiv 1308.3432) carries gradients through the rounding. Source of the procedure: Jacob
et al., arXiv 1712.05877.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.convert import (
    Entry,
    Filter,
    Report,
    Schemes,
    Target,
    find_owners,
    find_targets,
    linear_of,
    replace_weights,
)
from lowbit.tensor.base import check_weight
from lowbit.tensor.dtensor import local
from lowbit.tensor.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.learned_scales import (
    LearnedScalesTensor,
    can_hold,
    check_scales,
    drop_scales,
    give_scales,
    scales_of,
)
from lowbit.tensor.sharded_linear import make_plain, make_shardable
from lowbit.tensor.static_input import check_input, input_qparams, plain_input, prepare_input


def prepare_(
    model: nn.Module,
    scheme: Schemes,
    filter_fn: Filter | None = None,
    *,
    scales: Literal["present", "learned"] = "present",
) -> Report:
    """Make the weights of `model` fake-quantize in every product, in place; they stay trainable.

    Report and errors are those of `lowbit.quantize_`. The parameters are replaced (the new ones share the old ones'
    memory): make the optimizer afterwards. Each `nn.Linear` becomes a subclass of it until `convert_`, so that tensor
    parallelism can split its weight.

    Args:
        model, scheme, filter_fn: those of `lowbit.quantize_`.
        scales: "present": at every step the scales and zero points of the present weight. The state dict stays that
            of the plain model. "learned": trained along with the weight, as parameters `weight_scale` and
            `weight_zero` of each `nn.Linear` and `nn.Embedding` (`lowbit.learned_scales`). Weights of other modules
            keep present scales, and the report says so.

    A static activation has NaN for its scale until `lowbit.calibrate(model)`, unless that ran before with this scheme.
    With learned scales the one of the input is learned too, as `input_scale` and `input_zero` of its `nn.Linear`;
    otherwise these are buffers, which stay.
    """
    if scales not in ("present", "learned"):
        raise ValueError(f"scales must be 'present' or 'learned', got {scales!r}")
    targets, report = find_targets(model, scheme, filter_fn)
    for target in targets:
        _check_static(target)
    modules = _modules(targets)
    static = [(t.owners, t.scheme.activation) for t in targets if t.scheme.is_static]
    learned = [t.owners for t in targets if scales == "learned" and not _why_present(t)]

    def prepared(target: Target) -> Tensor:
        kind = LearnedScalesTensor if target.owners in learned else FakeQuantizedTensor
        return kind(target.weight, target.scheme)

    notes = {} if scales == "present" else {t.owners[0].fqn: _why_present(t) for t in targets}
    report = replace_weights(targets, report, prepared, trainable=True)
    report.entries = [_with_note(entry, notes.get(entry.fqn)) for entry in report.entries]
    make_shardable(modules)
    for owners in learned:
        module, name, _ = owners[0]
        give_scales(getattr(module, name), [owner.module for owner in owners])
    for owners, spec in static:
        linears = [owner.module for owner in owners if isinstance(owner.module, nn.Linear)]
        prepare_input(linears, spec, learned=owners in learned)
    return report.count(model)


def _why_present(target: Target) -> str | None:
    """Why the scales of a weight cannot be learned; None if they are."""
    others = [o.module for o in target.owners if not can_hold(o.module)]
    return f"present scales, as {type(others[0]).__name__} multiplies by itself" if others else None


def _check_static(target: Target) -> None:
    """Raise ValueError for a static activation of a module that rounds no input before its product."""
    if target.scheme.is_static:
        for module, _, fqn in target.owners:
            if not can_hold(module):
                raise ValueError(
                    f"{fqn} belongs to a {type(module).__name__}, which multiplies by itself and cannot round its "
                    "input by a static scale: leave it out by filter_fn or a pattern, or give it a dynamic activation"
                )


def _with_note(entry: Entry, note: str | None) -> Entry:
    return entry if note is None else replace(entry, note=f"{entry.note}; {note}")


def _modules(targets: list[Target]) -> set[nn.Module]:
    return {module for target in targets for module, _, _ in target.owners}


def convert_(model: nn.Module) -> Report:
    """Quantize the weights of a prepared model for good, each by the scheme it was prepared with, in place.

    Dequantized, they equal the fake-quantized ones to the bit.

    Raises:
        ValueError: the model was never prepared, or a trained weight has NaN or infinite values. The model is then
        as it was.
    """
    targets = []
    for owners in find_owners(model).values():
        module, name, fqn = owners[0]
        weight = getattr(module, name)
        if isinstance(weight, DTensor) and isinstance(local(weight), FakeQuantizedTensor):
            raise ValueError(
                f"{fqn} is sharded: gather the state dict, load it into a prepared model on one process, convert that"
            )
        if isinstance(weight, FakeQuantizedTensor):
            check_weight(weight.weight, fqn)
            if isinstance(weight, LearnedScalesTensor):
                check_scales(module, fqn)
            target = Target(weight, weight.scheme, tuple(owners))
            if weight.scheme.is_static:
                linear = linear_of(target)
                check_input(linear.module, linear.fqn)
            targets.append(target)
    if not targets:
        raise ValueError(
            f"{type(model).__name__} has no prepared weights; call lowbit.qat.prepare_(model, scheme) and train first, "
            "or lowbit.quantize_(model, scheme) to convert without training"
        )
    modules = _modules(targets)
    report = replace_weights(targets, Report(), _frozen, trainable=False)
    plain_input(modules)
    for module in modules:
        drop_scales(module)
    make_plain(modules)
    return report.count(model)


def _frozen(target: Target) -> Tensor:
    assert isinstance(target.weight, FakeQuantizedTensor)
    is_static, spec = target.scheme.is_static, target.scheme.activation
    of_input = input_qparams(linear_of(target).module, spec) if is_static else None
    if isinstance(target.weight, LearnedScalesTensor):
        return target.weight.frozen_by(*scales_of(target.owners[0].module), of_input)
    return target.weight.frozen(of_input)
