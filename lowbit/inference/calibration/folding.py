"""Scales of input channels that move between a layer and the one before it, without a change of the model.

Where linears multiply x, and a norm or a linear makes x, each channel j of x may be divided by s_j there, and column j
of the linears multiplied by it. `foldings` finds such pairs by trial, for any model, and the trial is exact. Division
by a power of two changes exponents alone, in every sum and product on its way. So a module that runs before the linears
is divided by powers of two, and the pair is right if

1. the input of each linear is divided by them, to the last bit;
2. the output stays as it was, to the last bit, while the linears give what they gave before. So a norm that other
   branches read, as in a post-norm encoder, is not taken, and neither are weights that are tied.

float16 rounds what is below 2⁻¹⁴ to multiples of 2⁻²⁴, so its inputs may differ by a few of these. What lies between
is free: x = act(gate) · up is divided in `up`, and attention's output in the values. A model is tried block by block
(`chain_of`), and a wrong pair ends its run at the linears. A block and what comes before it are tried only if the
linears' input follows that of the block. Adapters, and the layers that they stand around, do not fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import Target, find_owners, is_tuner
from lowbit.inference.calibration.batches import Batches, counted_rows, mask_of
from lowbit.inference.calibration.stages import chain_of
from lowbit.linear.frozen.checks import autocast_dtype
from lowbit.tracing.batches import call, deterministic, eval_mode, hooked, output_tensor
from lowbit.tracing.block_inputs import NotAChain, capture
from lowbit.tracing.trace import state_restored

_TRIALS = 12
"""Modules before a layer that are tried, the last one first."""
_EXPONENTS, _HALF_EXPONENTS = (-6, 7), (-2, 1)
"""The powers of two, first and end. In float16 the module before is multiplied alone, which is exact, and by little, so
that nothing overflows."""
_HALF_ERROR = 2.0**-22
"""What float16 may round off: a few times its smallest number."""


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
        """Divide the input by `scale` [K], and multiply the linears by it, in place. A channel takes less of it where
        float16 would be infinite."""
        scale = self._held(scale)
        for linear in self.linears:
            weight = linear.weight
            weight.copy_((weight.double() * scale.double()).to(weight.dtype))
        for parameter, shift in self._divided():
            rows = scale.double().view(-1, *[1] * (parameter.ndim - 1))
            parameter.copy_(((parameter.double() + shift) / rows - shift).to(parameter.dtype))

    def _divided(self) -> list[tuple[Tensor, float]]:
        """The parameters of `before`, and what is added to each before it multiplies."""
        own: Any = self.before
        both = (own.weight, 1.0 if self.offset else 0.0), (getattr(own, "bias", None), 0.0)
        return [(parameter, shift) for parameter, shift in both if parameter is not None]

    def _held(self, scale: Tensor) -> Tensor:
        for parameter, shift in self._divided():
            largest = (parameter.double() + shift).abs().reshape(len(scale), -1).amax(1)
            scale = scale.maximum((largest / _room(parameter)).clamp(max=1).to(scale))
        for linear in self.linears:
            largest = linear.weight.double().abs().amax(0)
            scale = scale.minimum((_room(linear.weight) / largest).clamp(min=1).to(scale))
        return scale


def _room(weight: Tensor) -> float:
    """The largest magnitude that folding may bring into a weight; rounding to codes takes it further."""
    return torch.finfo(weight.dtype).max / 2


@dataclass
class _Group:
    linears: list[nn.Linear]
    place: int
    """How many modules ran before the first of them."""
    tried: set[int] = field(default_factory=set)
    """The ids of modules that were tried."""
    is_open: bool = True
    """False if its input does not follow that of its block."""


def foldings(model: nn.Module, targets: Sequence[Target] | None, batches: Batches) -> list[Folding]:
    """The foldings of linears of which one at least is a target, or of all (None). The first batch finds them; those
    that change the model on another batch, as where its input goes to other linears, are dropped."""
    ranks = batches.ranks
    is_first = ranks.rank == batches.first
    modules = list(model.modules())
    places = {id(module): i for i, module in enumerate(modules)}
    with eval_mode(model), state_restored(model), deterministic(), torch.no_grad():
        chain = chain_of(model, targets)
        own = _found(model, targets, chain, batches[0]) if is_first else []
        listed = [([places[id(m)] for m in (f.before, *f.linears)], f.name, f.offset) for f in own]
        found = []
        for (before, *linears), name, offset in ranks.gathered(listed)[batches.first]:
            own_linears: Any = tuple(modules[i] for i in linears)
            found.append(Folding(own_linears, modules[before], name, offset))
        right = found
        for batch in batches[is_first:]:
            left = right
            for place in _places(model, chain, batch):
                own = [f for f in left if place.has([f.before, *f.linears])]
                left = [f for f in left if f not in own]
                if own and not place.is_right(own):
                    wrong = [f for f in own if not place.is_right([f])]
                    right = [f for f in right if f not in wrong]
    kept = ranks.gathered([f in right for f in found])
    return [f for f, is_right in zip(found, zip(*kept, strict=True), strict=True) if all(is_right)]


def _found(
    model: nn.Module, targets: Sequence[Target] | None, chain: Sequence[nn.Module], batch: Any
) -> list[Folding]:
    """The foldings that are right on one batch."""
    wanted = {id(owner.module) for target in targets or () for owner in target.owners}
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, Folding] = {}
    order, groups = _traced(model, batch)
    if targets is not None:
        groups = [g for g in groups if any(id(linear) in wanted for linear in g.linears)]
    for place in _places(model, chain, batch):
        for i, group in enumerate(groups):
            if i not in found and place.has(group.linears) and group.is_open:
                folding = place.search(group, order, names)
                if folding is not None:
                    found[i] = folding
    return [found[i] for i in sorted(found)]


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

    owners = find_owners(model)
    adapted = {m for layer in model.modules() if is_tuner(layer) for m in layer.modules()}
    modules = [m for m in model.modules() if isinstance(m._parameters.get("weight"), Tensor)]
    with _hooked(modules, seen):
        call(model, batch)

    def folds(module: nn.Module) -> bool:
        is_tied = any(len(owners[id(p)]) > 1 for p in module._parameters.values() if p is not None)
        return calls[id(module)] == 1 and _is_free(module) and not is_tied and module not in adapted

    once = [own for _, own in groups if all(map(folds, own.linears))]
    return list(filter(folds, order.values())), once


def _is_free(module: nn.Module) -> bool:
    """True if the weight is a plain tensor that may be scaled."""
    weight = module._parameters["weight"]
    return weight is not None and type(weight.data) is Tensor and weight.dtype.is_floating_point


def _makes(module: nn.Module, size: int) -> bool:
    """True if the output of the module may have `size` channels, each with an element or a row of its weight."""
    weight: Any = module.weight
    is_norm = weight.ndim == 1 and len(weight) == size
    return is_norm or (isinstance(module, nn.Linear) and module.out_features == size)


class _Wrong(Exception):
    """The input of a linear is not divided."""


@dataclass
class _Noted:
    """A run of a place: the inputs and outputs of some linears, by their ids, in the order of calls, and the output."""

    inputs: dict[int, list[Tensor]]
    outputs: dict[int, list[Tensor]]
    last: Tensor


def _places(model: nn.Module, chain: Sequence[nn.Module], batch: Any) -> Iterator[_Place]:
    """Each block on the input that this batch gives it, and then the model."""
    try:
        (captured,) = capture(model, chain, [batch], None)
    except NotAChain:
        captured = None
    if captured is not None:
        hidden = captured.hidden
        for block, arguments in zip(chain, captured.arguments, strict=True):
            home = next((p.device for p in block.parameters()), hidden.device)
            place = _Place({id(m) for m in block.modules()}, arguments, block, hidden.to(home))
            yield place
            hidden = place.run(place.hidden)
    yield _Place(None, None, model, batch)


class _Place:
    """A block or the model, and its input.

    Args:
        modules: ids of the modules of a block; None: the model.
        arguments: those of the block beside its input.
        module: the block or the model.
        hidden: the block's input, or the batch.
    """

    def __init__(
        self, modules: set[int] | None, arguments: Any, module: nn.Module, hidden: Any
    ) -> None:
        self.modules, self.arguments, self.module, self.hidden = modules, arguments, module, hidden

    def has(self, modules: Sequence[nn.Module]) -> bool:
        return self.modules is None or all(id(m) in self.modules for m in modules)

    def run(self, hidden: Any) -> Tensor:
        if self.modules is None:
            return output_tensor(call(self.module, hidden))
        # A clone, since a block may write to its input.
        found: Tensor = self.arguments.run(self.module, hidden.clone())
        return found

    def search(self, group: _Group, order: Sequence[Any], names: dict[int, str]) -> Folding | None:
        """The folding of these linears into the last module before them that is right."""
        taken, size = {id(linear) for linear in group.linears}, group.linears[0].in_features
        before = [m for m in order[: group.place] if id(m) not in taken and _makes(m, size)]
        before = [
            m for m in before[: -_TRIALS - 1 : -1] if self.has([m]) and id(m) not in group.tried
        ]
        noted = self._noted(group.linears)
        for module in before:
            group.tried.add(id(module))
            for offset in (False, True) if module.weight.ndim == 1 else (False,):
                folding = Folding(tuple(group.linears), module, names[id(module)], offset)
                if self.is_right([folding], None if offset else noted):
                    return folding
        if self.modules is not None:
            group.is_open = self._follows(group.linears, noted)
        return None

    def is_right(self, foldings: Sequence[Folding], noted: _Noted | None = None) -> bool:
        """True if all of these foldings are right. `noted`: of their linears, with all weights as they are."""
        linears = [linear for f in foldings for linear in f.linears]
        with _put_back([*(f.before for f in foldings), *linears]):
            for folding in foldings:
                if folding.offset:  # w = 1 and (1 + w) / s - 1 are exact
                    folding.before.weight.fill_(1.0)  # type: ignore[operator]
            noted = self._noted(linears) if noted is None else noted
            scales = {id(linear): _powers(f) for f in foldings for linear in f.linears}
            made = {id(f.before): scales[id(f.linears[0])] for f in foldings}
            for folding in foldings:
                folding.divide(made[id(folding.before)])
            return self._is_kept(self.hidden, noted, linears, scales, made)

    def _follows(self, linears: Sequence[nn.Linear], noted: _Noted) -> bool:
        """True if a division of the block's input divides that of the linears."""
        if self.hidden.shape[-1] != linears[0].in_features:
            return False
        scale = _powers(Folding(tuple(linears), linears[0], "", False))
        scales = dict.fromkeys(map(id, linears), scale)
        return self._is_kept(self.hidden / scale, noted, linears, scales, {}, last=False)

    def _noted(self, linears: Sequence[nn.Linear]) -> _Noted:
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        noted = _Noted({}, {}, torch.empty(0))

        def note(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            _, own = copies.setdefault(id(x), (x, x.clone()))  # what follows may write to both
            noted.inputs.setdefault(id(module), []).append(own)
            noted.outputs.setdefault(id(module), []).append(output.clone())

        with _hooked(linears, note):
            noted.last = self.run(self.hidden)
        return noted

    def _is_kept(
        self,
        hidden: Any,
        noted: _Noted,
        linears: Sequence[nn.Linear],
        scales: dict[int, Tensor],
        made: dict[int, Tensor],
        last: bool = True,
    ) -> bool:
        """True if the inputs of the linears are those of `noted`, divided by `scales`, and with `last` also the output
        is that of `noted`, while the linears give what they gave before, divided by `made`."""
        inputs, outputs = (
            {k: list(v) for k, v in d.items()} for d in (noted.inputs, noted.outputs)
        )

        def check(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            x, own = args[0] if args else kwargs["input"], id(module)
            if not inputs.get(own) or not _is_divided(x, inputs[own].pop(0), scales[own]):
                raise _Wrong
            found = outputs[own].pop(0)
            return found / made[own] if own in made else found.clone()

        try:
            with _hooked(linears, check):
                found = self.run(hidden)
        except _Wrong:
            return False
        return not last or _equal(found, noted.last)


def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> AbstractContextManager[None]:
    return hooked(*(m.register_forward_hook(hook, with_kwargs=True) for m in modules))


def _powers(folding: Folding) -> Tensor:
    """Powers of two [K], in the dtype of the weights."""
    weight = folding.linears[0].weight
    dtypes = weight.dtype, autocast_dtype(weight.device.type)
    limits = _HALF_EXPONENTS if torch.float16 in dtypes else _EXPONENTS
    size = weight.shape[1]
    exponents = torch.randint(*limits, (size,), generator=torch.Generator().manual_seed(size))
    return torch.ldexp(torch.ones(size, dtype=torch.float32), exponents).to(weight)


def _is_divided(found: Tensor, x: Tensor, scale: Tensor) -> bool:
    """True if `found` is x / scale."""
    if found.shape != x.shape:
        return False
    expected = x / scale
    if _equal(found, expected) or found.dtype is not torch.float16:
        return _equal(found, expected)
    relative = 2 * torch.finfo(torch.float16).eps
    # Under autocast a scale in float32 makes the quotient float32.
    return torch.allclose(
        found.float(), expected.float(), rtol=relative, atol=_HALF_ERROR, equal_nan=True
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """True if all values are the same, NaN among them."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


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


def channels_of(folding: Folding) -> Tensor:
    """A zero for each channel of the input, float32."""
    weight = folding.linears[0].weight
    return weight.new_zeros(weight.shape[1], dtype=torch.float32)


@torch.no_grad()
def watched(
    model: nn.Module, modules: Sequence[nn.Module], batches: Sequence[Any], see: Callable[..., None]
) -> None:
    """Run the model on the batches, and call `see` with the number of each of `modules` and the rows [T, …] of the
    tensors that it is called with. Tokens whose `attention_mask` is 0 don't count."""
    mask: Tensor | None = None

    def hook(i: int) -> Callable[..., None]:
        def own(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            see(i, *(counted_rows(t.detach(), mask) for t in given))

        return own

    hooks = (m.register_forward_pre_hook(hook(i), with_kwargs=True) for i, m in enumerate(modules))
    with hooked(*hooks), eval_mode(model), state_restored(model):
        for batch in batches:
            mask = mask_of(batch)
            call(model, batch)
