"""Scales of input channels that move between a layer and the one before it, without a change of the model.

Where linears multiply x, and a norm or a linear makes x, each channel j of x may be divided by s_j there, and column j
of the linears multiplied by it. `foldings` finds such pairs by trial, for any model. It notes in which order modules
run and which linears multiply the same tensor. It divides a module that runs before them by powers of two, and keeps
the pair if the model's output and that of the linears stay as they were. So a norm that other branches read, as in a
post-norm encoder, is not taken. What lies between is free: x = act(gate) · up is divided in `up`, and attention's
output in the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Target
from lowbit.inference.calibration.inputs import counted_rows, mask_of
from lowbit.tracing.batches import call, eval_mode, output_tensor
from lowbit.tracing.tracer import state_restored

_TRIALS = 12
"""Modules before a layer that are tried, the last one first."""
_TOLERANCE = 1e-4
"""The relative change of outputs that another order of sums may make."""


@dataclass(frozen=True)
class Folding:
    """Linears that multiply one input, and the module that makes it.

    Attributes:
        linears: with weights [N, K].
        before: a norm with a weight of K elements, or a linear with K outputs.
        name: of `before`.
        offset: True if the norm multiplies by 1 + weight.
    """

    linears: tuple[nn.Linear, ...]
    before: nn.Module
    name: str
    offset: bool

    @torch.no_grad()
    def divide(self, scale: Tensor) -> None:
        """Divide the input by `scale` [K], and multiply the linears by it, in place."""
        for linear in self.linears:
            weight = linear.weight
            weight.copy_((weight.double() * scale.double()).to(weight.dtype))
        own: Any = self.before
        offset = 1.0 if self.offset else 0.0
        for parameter, shift in ((own.weight, offset), (getattr(own, "bias", None), 0.0)):
            if parameter is not None:
                rows = scale.double().view(-1, *[1] * (parameter.ndim - 1))
                parameter.copy_(((parameter.double() + shift) / rows - shift).to(parameter.dtype))


@dataclass
class _Group:
    linears: list[nn.Linear]
    place: int
    """How many modules ran before the first of them."""


def foldings(
    model: nn.Module, targets: Sequence[Target] | None, batches: Sequence[Any]
) -> list[Folding]:
    """The foldings of linears of which one at least is a target, or of all (None). The first batch finds them; those
    that change the model on another batch, as where its input goes to other linears, are dropped."""
    batch = batches[0]
    wanted = {id(owner.module) for target in targets or () for owner in target.owners}
    names = {id(module): name for name, module in model.named_modules()}
    with eval_mode(model), state_restored(model), torch.no_grad():
        order, groups = _traced(model, batch)
        found: list[Folding] = []
        for group in groups:
            if targets is not None and not any(id(linear) in wanted for linear in group.linears):
                continue
            taken = {id(linear) for linear in group.linears}
            size = group.linears[0].in_features
            before = [m for m in order[: group.place] if id(m) not in taken and _makes(m, size)]
            expected = _outputs(model, batch, group.linears)
            for module in before[: -_TRIALS - 1 : -1]:
                options = (False, True) if module.weight.ndim == 1 else (False,)
                tried = [
                    Folding(tuple(group.linears), module, names[id(module)], o) for o in options
                ]
                right = next((f for f in tried if _are_right([f], model, batch, expected)), None)
                if right is not None:
                    found.append(right)
                    break
        for other in batches[1:]:
            last = _outputs(model, other, ())
            if not _are_right(found, model, other, last):
                found = [f for f in found if _are_right([f], model, other, last)]
    return found


def _traced(model: nn.Module, batch: Any) -> tuple[list[Any], list[_Group]]:
    """The modules with weights in the order of their first calls, and the linears that multiply one tensor."""
    order: dict[int, nn.Module] = {}
    groups: list[tuple[Any, _Group]] = []
    calls: dict[int, int] = {}

    def seen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[id(module)] = calls.get(id(module), 0) + 1
        x = args[0] if args else kwargs.get("input")
        if isinstance(module, nn.Linear) and id(module) not in order:
            group = next((own for source, own in groups if source is x), None)
            if group is None:
                group = _Group([], len(order))
                groups.append((x, group))
            group.linears.append(module)
        order.setdefault(id(module), module)

    modules = [m for m in model.modules() if isinstance(m._parameters.get("weight"), Tensor)]
    hooks = [m.register_forward_hook(seen, with_kwargs=True) for m in modules]
    try:
        call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    once = [own for _, own in groups if all(calls[id(m)] == 1 and _is_free(m) for m in own.linears)]
    return [m for m in order.values() if calls[id(m)] == 1 and _is_free(m)], once


def _is_free(module: nn.Module) -> bool:
    """True if the weight is a plain tensor that may be scaled."""
    weight = module._parameters["weight"]
    return weight is not None and type(weight.data) is Tensor and weight.dtype.is_floating_point


def _makes(module: nn.Module, size: int) -> bool:
    """True if the output of the module may have `size` channels, each with an element or a row of its weight."""
    weight: Any = module.weight
    is_norm = weight.ndim == 1 and len(weight) == size
    return is_norm or (isinstance(module, nn.Linear) and module.out_features == size)


def _outputs(model: nn.Module, batch: Any, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The outputs of the linears and of the model."""
    found: dict[int, Tensor] = {}
    hooks = [
        linear.register_forward_hook(lambda m, _, out: found.__setitem__(id(m), out.detach()))
        for linear in linears
    ]
    try:
        last = output_tensor(call(model, batch))
    finally:
        for hook in hooks:
            hook.remove()
    return [*(found[id(linear)] for linear in linears), last]


def _are_right(
    foldings: Sequence[Folding], model: nn.Module, batch: Any, expected: list[Tensor]
) -> bool:
    """True if the outputs stay as they are when the channels are divided by powers of two. `expected`: the outputs of
    the model, and before it those of the linears if there is one folding."""
    linears = foldings[0].linears if len(expected) > 1 else ()
    with _put_back([m for f in foldings for m in (f.before, *f.linears)]):
        for folding in foldings:
            size = folding.linears[0].in_features
            generator = torch.Generator().manual_seed(size)
            exponents = torch.randint(-1, 2, (size,), generator=generator)
            folding.divide(
                torch.ldexp(torch.ones(size), exponents).to(folding.linears[0].weight.device)
            )
        found = _outputs(model, batch, linears)
    return all(
        float((a.double() - b.double()).norm()) <= _tolerance(a) * float(b.double().norm())
        for a, b in zip(found, expected, strict=True)
    )


def _tolerance(t: Tensor) -> float:
    return max(_TOLERANCE, 4 * torch.finfo(t.dtype).eps)


@contextmanager
def _put_back(modules: Sequence[nn.Module]) -> Iterator[None]:
    before = [
        (p, p.detach().clone()) for m in modules for p in m._parameters.values() if p is not None
    ]
    try:
        yield
    finally:
        for parameter, values in before:
            parameter.detach().copy_(values)


@torch.no_grad()
def watched(
    model: nn.Module,
    found: Sequence[Folding],
    batches: Sequence[Any],
    see: Callable[[int, Tensor], None],
) -> None:
    """Run the model on the batches, and call `see` with the number of each folding and its input [rows, K]. Tokens
    whose `attention_mask` is 0 don't count."""
    mask: Tensor | None = None

    def hook(i: int) -> Callable[..., None]:
        def own(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = args[0] if args else kwargs["input"]
            see(i, counted_rows(x.detach(), mask))

        return own

    hooks = [
        folding.linears[0].register_forward_pre_hook(hook(i), with_kwargs=True)
        for i, folding in enumerate(found)
    ]
    try:
        with eval_mode(model), state_restored(model):
            for batch in batches:
                mask = mask_of(batch)
                call(model, batch)
    finally:
        for handle in hooks:
            handle.remove()
