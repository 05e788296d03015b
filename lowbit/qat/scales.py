"""The learned scales and zero points of a model: their names, their group in an optimizer, and where they start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lowbit.convert import check_module, find_owners
from lowbit.layers.exchange import exchanged
from lowbit.layers.prepared import named_inputs
from lowbit.numerics.settings import check_nonnegative
from lowbit.numerics.sharded import held_locally, is_dtensor
from lowbit.qat.exchange import in_high_precision, prepared_targets
from lowbit.tensor.core.dtensor import by_rows, local, split_as
from lowbit.tensor.core.regather import reshard
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import (
    is_learned,
    named_scales,
    scales_of,
    starting_parameters,
)
from lowbit.tracing.batches import eval_mode
from lowbit.tracing.damage import Loss, Meter


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Fully qualified name → learned scales and zero points, of weights and of inputs, shared ones once."""
    return {**named_scales(model), **named_inputs(model)}


def parameter_groups(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Two parameter groups for an optimizer: weights, and learned scales and zero points without weight decay.

        groups = qat.parameter_groups(model, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups, lr=1e-4)
        ...
        torch.nn.utils.clip_grad_norm_(groups[0]["params"], 1.0)      # the norm of the weights alone

    Scales need no rate of their own: their parameters are factors of about 1 (`lowbit.numerics.learned_scales`). They
    follow weights that decay. A decay of the factors would shrink scales beside their weights, and at a rate of 1e-4
    with a decay of 0.1 by 1% in 1,000 steps.

    Args:
        model: prepared by `lowbit.qat.prepare_`, possibly sharded by FSDP2 since.
        weight_decay: of the first group.

    Returns:
        Groups of the parameters that require a gradient, each {"params": [...], "weight_decay": float}; one group where
        no scales are learned.

    Raises:
        TypeError: `model` is not a module, or `weight_decay` not a number.
        ValueError: no parameter requires a gradient, or `weight_decay` is below 0 or not finite.
    """
    check_module(model)
    check_nonnegative("weight_decay", weight_decay)
    learned = {id(p) for p in learned_parameters(model).values()}
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient; call requires_grad_(True) on those to train"
        )
    split: list[list[Tensor]] = [[], []]
    for p in trained:
        split[id(p) in learned].append(p)
    groups = zip(split, (weight_decay, 0.0), strict=True)
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


@torch.no_grad()
def search_scales_(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    loss: Loss | Literal["kl", "error"] | None = None,
) -> bool:
    """Set the learned scales and zero points of all weights to those of a search for the present weights, in place.

        qat.prepare_(model, scheme, scales="learned")        # starts without a search with 3 bits and more
        qat.search_scales_(model, held_out)                  # takes the searched ones if the model is better with them

    A search finds the least squared error of the weights, with which the model may lose more than with scales that the
    largest values give. With `batches`, which training does not see, both are measured, and the better ones stay. Call
    this also where weights came another way: initialised after `to_empty`, or read by torch.distributed.checkpoint.
    Parameters stay, and so do optimizers.

    Args:
        model: prepared with `scales="learned"`. If it is sharded, every rank calls this, without batches.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model, on
            its device.
        loss: a function of the model and a batch that gives a scalar; "kl" or "error"; None: the output's `loss` where
            it has one, else "kl" of its `logits`, else "error" (`lowbit.tracing.damage.Measure`). The measure is the
            mean over batches.

    Returns:
        True if the model has the searched scales now.

    Raises:
        TypeError: `model` is not a module.
        ValueError: no weight has learned scales, or one is on the meta device; `batches` is empty, or the model is
            sharded.
    """
    check_module(model)
    reshard(model)
    if batches is None:
        start_scales_(model, searched=True)
        return True
    seen = list(batches)
    if not seen:
        raise ValueError("search_scales_ was given no batches; accepted: one or more, or None")
    plain, meter = in_high_precision(prepared_targets(model)), Meter(model, loss)
    totals = []
    for searched in (False, True):
        start_scales_(model, searched)
        total = 0.0
        with eval_mode(model):
            for batch in seen:
                with exchanged(plain):
                    meter.reference(batch)
                total += meter.score(batch)
        totals.append(total)
    if totals[1] < totals[0]:
        return True
    start_scales_(model, searched=False)
    return False


@torch.no_grad()
def start_scales_(model: nn.Module, searched: bool | None = None) -> None:
    """Set the learned scales and zero points to searched ones, or to those that the largest values give. None: as
    `prepare_` does."""
    found = 0
    for (module, name, fqn), *_ in find_owners(model).values():
        weight = module._parameters[name]
        own = held_locally(weight)
        if not is_learned(own):
            continue
        if own.is_meta:
            raise ValueError(
                f"{fqn} is on the meta device, without values; give it values first, e.g. model.to_empty(device=…) and "
                "load_state_dict"
            )
        found += 1
        for old, new in zip(scales_of(module, name), _starting(weight, own, searched), strict=True):
            if new is not None:
                local(old).copy_(_part(new, old))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no learned scales; call "
            "lowbit.qat.prepare_(model, scheme, scales='learned') first"
        )


def _starting(weight: Any, own: Any, searched: bool | None) -> tuple[Tensor | None, Tensor | None]:
    """For the weight, or for this rank's rows of it where no scale depends on those of other ranks."""
    if not is_dtensor(weight):
        return starting_parameters(own, searched=searched)
    if by_rows(weight.placements) and not own.scheme.weight.shares_rows:
        return starting_parameters(own, searched=searched)
    whole: Any = weight.full_tensor()
    values = whole.master() if isinstance(whole, FakeQuantizedTensor) else whole
    return starting_parameters(own, values, searched)


def _part(new: Tensor, old: Any) -> Tensor:
    """This rank's part of `new`, for the parameter `old`."""
    if not is_dtensor(old) or new.shape == local(old).shape:
        return new
    return local(split_as(old, new))
