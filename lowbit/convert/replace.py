"""Replace the weights of a model that a walk has found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from lowbit.convert.replaced import hand_over
from lowbit.convert.report import Entry, Report
from lowbit.convert.underflow import underflow
from lowbit.convert.walk import Target, is_conv
from lowbit.layers.frozen import hide_frozen, show_frozen
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor, stored_shape
from lowbit.tensor.frozen.conv_tensor import matrix_shape


def replace_weights(
    targets: list[Target],
    report: Report,
    make: Callable[[Target], Tensor],
    trainable: bool,
    note: str | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Replace each target by `make(target)` in every module that holds it, and complete the report.

    A weight that stays trainable keeps its accumulated gradient and its hooks. A quantized weight that training starts
    from becomes trainable. An optimizer that holds the old parameters raises at its next step
    (`lowbit.convert.replaced`).

    Args:
        targets: from `find_targets`; removed one by one, which frees each old weight before the next one.
        report: the one that `find_targets` began.
        make: the new weight of a target.
        trainable: keep `requires_grad`, gradients and hooks.
        note: what the report says of each weight; None for the scheme's description.
        device: where each weight moves before `make`, with the other parameters and the buffers of its modules.
    """
    owners = {owner.module: None for target in targets for owner in target.owners}
    hide_frozen(owners)
    try:
        with progress("converting weights", sum(t.weight.nbytes for t in targets)) as advance:
            while targets:
                target = targets.pop(0)
                size = target.weight.nbytes
                if device is not None:
                    target = _moved(target, device)
                _replace(target, report, make, trainable, note)
                advance(size)
    finally:
        show_frozen(owners)
    return report


def _moved(target: Target, device: torch.device | str) -> Target:
    for owner in target.owners:
        owner.module._apply(lambda t: t.to(device), recurse=False)
    first = target.owners[0]
    return replace(target, weight=getattr(first.module, first.attribute))


def _replace(
    target: Target,
    report: Report,
    make: Callable[[Target], Tensor],
    trainable: bool,
    note: str | None,
) -> None:
    starts = getattr(target.weight, "stored_as", None) is not None and target.scheme is not None
    keeps_grad = trainable and (starts or target.weight.requires_grad)
    try:
        new = nn.Parameter(make(target), requires_grad=keeps_grad)
    except ValueError as error:
        fqn = target.owners[0].fqn
        raise error if fqn in str(error) else ValueError(f"{fqn}: {error}") from error
    for module, name, _ in target.owners:
        module.register_parameter(name, new)
    first, *others = (owner.fqn for owner in target.owners)
    left_behind = hand_over(target.weight, new, first, trainable)
    about = note or _described(target, new)
    old = target.weight
    held = old.updated_in_place() if isinstance(old, LowbitTensor) else old
    lost = None if held is None else underflow(held.detach(), new.detach())
    about = "; ".join(part for part in (about, left_behind, lost) if part)
    report.entries.append(Entry(first, tuple(new.shape), True, about))
    report.entries += [Entry(fqn, tuple(new.shape), True, f"tied to {first}") for fqn in others]


def _described(target: Target, new: Tensor) -> str:
    shape = matrix_shape(new.shape) if is_conv(target) else stored_shape(new, new.shape)
    described: str = target.scheme.describe(shape)
    return described
