"""quantize_: round a model's weights to nearest, in place, with min-max or searched scales."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lowbit.convert import (
    Filter,
    Report,
    Schemes,
    Target,
    families_of,
    find_targets,
    is_conv,
    is_turned,
    joint_parts,
    modules_of,
    replace_weights,
    rounding_owners,
    watch_joined,
)
from lowbit.convert.side_by_side import lay_side_by_side
from lowbit.layers.static_input import check_input, held_for, input_qparams, take_input
from lowbit.numerics.search import Scales, check_scales
from lowbit.numerics.settings import device_of
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from lowbit.tensor.frozen.siblings import quantized_together


def quantize_(
    model: nn.Module,
    scheme: Schemes,
    filter_fn: Filter | None = None,
    scales: Scales | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Quantize the weights of `model` in place, and report what was converted and what was left alone.

        report = quantize_(model, Int4WeightOnly(group_size=128))
        quantize_(model, {"lm_head": None, "re:layers\\\\.(0|1)\\\\..*": Int8WeightOnly(), "*": Int4WeightOnly()})

    Args:
        model: any module. Weights become frozen `AffineTensor` or `Float8Tensor` parameters, on their device; those of
            convolutions `ConvTensor`.
        scheme: a `Scheme`, or a dict of patterns to a Scheme or None (leave alone). A pattern is a shell-style glob, or
            "re:" and a regular expression, over the name of the module or of its weight; the first match counts.

            A bare scheme, "*" and any other pattern take linears and stacked experts, and leave routers alone. A
            pattern that names a router, an embedding, a convolution or a parameter of a module of your own takes it
            (`lowbit.convert.choice`).
        filter_fn: `(module, name) -> bool`, which modules to convert, in place of this rule. A filter can choose
            `nn.Embedding`, `nn.Conv1d`, `nn.Conv2d` and modules of your own, whose 2-D and 3-D parameters (experts) are
            converted.

            The filter is called with the name of a module, e.g. "blocks.0.experts", and, where it refuses that, with
            the name of each parameter, so that `lambda module, name: name.endswith("experts.up")` converts
            one parameter alone. A filter such as `lambda module, name: name != "blocks.0.experts"`, which accepts every
            name inside a module that it refuses, leaves the whole module alone.

            A further parameter of an `nn.Linear`, such as an adapter in a subclass, is converted only where a pattern
            or the filter names it.
        scales: how the scale (and zero point) of each block is chosen. "minmax": from its smallest and largest value.
            "searched": with the smallest squared error, by `lowbit.numerics.search`, and then larger, as weights that
            are rounded by these are too small (`lowbit.numerics.gain`). Those of FP4 suit the inputs that a trained
            weight reads (`lowbit.numerics.unseen_inputs`). On a CPU the search takes 20 to 42 times as long. The
            model is stored and runs the same. None: "searched" for integers of 1 and 2 bits, "minmax" for all else.
        device: where the model is moved, one weight after the other, each quantized there before the next one moves.
            So a GPU quantizes a model that does not fit there in high precision. None: weights stay where they are.

    The report lists all parameters of two or more dimensions with their share of the model's bytes, and the share
    of all parameters that is now in low bits. It counts the groups that became 0 because no smaller scale can be
    stored, as float16 scales start at 6e-8.

    Experts that a model stores as [experts, inputs, outputs], as gpt-oss does, are quantized in groups along the
    inputs, and held transposed.

    Siblings that servers merge into one layer, such as q, k and v (`lowbit.convert.siblings`), share the global scale
    of NVFP4, and the scale of a whole tensor in float8. They are searched together.

    Weights shared by several modules stay shared. A dimension that is not a multiple of the group is padded. The state
    dict hands out plain tensors, `weight.codes`, `weight.scale` …, and takes them again
    (`lowbit.tensor.core.state_dict`).

    Raises:
        TypeError: `scheme` is neither a Scheme nor a dict.
        ValueError: unknown `scales`, or "searched" with a `scale_format` of "double"; nothing to convert, unless a
            `Plan` says so; a pattern that chooses nothing; an integer, complex, NaN or infinite weight; a static
            activation that `lowbit.calibrate` has not seen with this scheme. The model then stays unchanged.
    """
    check_scales(scales)
    if device is not None:
        device = device_of("device", device)  # `.to` takes a dtype too
    targets, report = find_targets(model, scheme, filter_fn)
    for target in targets:
        _check_calibrated(target)
        if scales == "searched" and not target.scheme.weight.is_searchable:
            target.scheme.weight.check_free_scales(
                f"{target.fqn}: scales='searched'", "call quantize_ with scales='minmax'"
            )
    modules = modules_of(targets)
    trained = [t.fqn for t in targets if t.weight.requires_grad]
    if 0 < len(trained) < len(targets):
        warnings.warn(
            f"quantize_ freezes {len(trained)} weights that were trained while others were frozen, such as "
            f"{trained[0]}: adapters? Quantize before adding them, or leave them out by filter_fn or a pattern",
            stacklevel=2,
        )
    report = replace_weights(
        targets, report, quantizing(targets, scales), trainable=False, device=device
    )
    if device is not None:
        model.to(device)
    take_input(modules)
    lay_side_by_side(model)
    watch_joined(model)
    return report.count(model)


def _check_calibrated(target: Target) -> None:
    """Raise ValueError for a static activation without a scale."""
    spec = target.scheme.activation
    if spec is None or not spec.static:
        return
    owner = rounding_owners(target)[0]
    if held_for(owner.module, spec) is None:
        has_other = "input_spec" in owner.module.__dict__
        why = "was calibrated for another scheme" if has_other else "has no static scale yet"
        raise ValueError(
            f"the input of {owner.fqn} {why}: run batches inside `with lowbit.calibrate(model, scheme):`, with the "
            "scheme and filter of this call"
        )
    check_input(owner.module, owner.fqn)


def quantizing(targets: Sequence[Target], scales: Scales | None) -> Callable[[Target], Tensor]:
    """A function that gives the quantized weight of each target. A search makes siblings together, when the first of
    them is asked for (`quantized_together`)."""
    families = {
        target.fqn: family
        for family in (families_of(targets) if scales == "searched" else ())
        if not any(t.scheme.activation is not None and t.scheme.activation.static for t in family)
        for target in family
    }
    joint = joint_parts([t for t in targets if t.fqn not in families], scales == "searched")
    made: dict[str, Tensor] = {}

    def make(target: Target) -> Tensor:
        family = families.get(target.fqn)
        if family is None:
            return quantized(target, scales, joint.get(target.fqn))
        if target.fqn not in made:
            device = target.weight.device
            rows = {t.fqn: _rows(t, t.weight.to(device)) for t in family}
            found = quantized_together(rows, [t.scheme for t in family], scales)
            for sibling in family:
                weight = found[sibling.fqn]
                made[sibling.fqn] = weight._transposed() if is_turned(sibling) else weight
            family.clear()  # frees the weights
        return made.pop(target.fqn)

    return make


def _rows(target: Target, weight: Tensor) -> Tensor:
    """The weight of `target`, [..., N, K]."""
    return weight.mT.contiguous() if is_turned(target) else weight


def quantized(target: Target, scales: Scales | None, joint: Tensor | None) -> Tensor:
    """The weight of `target`, quantized. `joint`: the part of its scales that siblings share, if they do."""
    spec = target.scheme.activation
    is_static = spec is not None and spec.static
    of_input = input_qparams(rounding_owners(target)[0].module, spec) if is_static else None
    if is_conv(target):
        return ConvTensor.quantized(target.weight, target.scheme, scales, of_input)
    weight = _rows(target, target.weight)
    joint = joint if joint is None else joint.to(weight.device)
    made = AffineTensor.quantized(weight, target.scheme, scales, of_input, joint)
    return made._transposed() if is_turned(target) else made
