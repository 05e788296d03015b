"""The order in which the weights of a model are calibrated, and the activations that they see.

A model is a chain of blocks, such as `model.model.layers`, with layers before and after it. `walk` yields the weights
in groups. The weights of one group see inputs that the groups before it, already rounded, give:

1. weights outside the blocks that run before them, or that an embedding shares: from the model as it was;
2. block by block, and inside a block one group after another, in the order of calls. Weights that multiply the same
   tensor (q, k and v) are one group, and so are those of experts in a list;
3. the other weights outside the blocks, such as the head, after all blocks.

The hidden states of all batches between two blocks are kept; each block reads them and replaces them by its outputs. So
the calibration takes the memory of the model, of these states and of the Hessians of one group. A model without such a
chain is one block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.convert import Target, of_any_expert, shape_of_blocks
from lowbit.inference.calibration.inputs import Moments, Watch, mask_of
from lowbit.inference.calibration.learned_rounding import Block
from lowbit.tracing.batches import call
from lowbit.tracing.block_inputs import Arguments, call_after, capture


class Needs(NamedTuple):
    """What the steps of a calibration read: all of each Hessian, or its diagonal; the inputs in high precision; and
    blocks whose weights are all rounded."""

    full: bool
    pairs: bool
    blocks: bool = False


@dataclass
class Group:
    """Weights that are calibrated together.

    Attributes:
        source: the tensor that the first one multiplies; None if no batch reaches these weights.
        names: of the weights, with one name for the same weight of all experts of a list.
        targets: the weights.
        moments: the sums over the inputs of each.
    """

    source: Any
    names: set[str]
    targets: list[Target]
    moments: list[Moments]

    def twin(self, size: int) -> Moments | None:
        """The sums of a weight that multiplies the same tensor."""
        return next((m for m in self.moments if m.once and m.size == size), None)


@dataclass
class Place:
    """What weights lie in, and how it runs on each batch.

    Attributes:
        run: runs it on a batch, by its number.
        masks: for each batch the tokens that count; None: all.
        high: runs a copy that stays in high precision, on the inputs that it has in the model in high precision.
        copies: name of a weight → the weight in that copy.
    """

    run: Callable[[int], Any]
    masks: Sequence[Tensor | None]
    high: Callable[[int], Any] | None = None
    copies: dict[str, Target] | None = None

    def groups(self, targets: list[Target], needs: Needs) -> Iterator[Group]:
        """The weights in the order of their calls, each group with the sums over its inputs at this time. `targets` is
        emptied, so that the weights of a group can be freed."""
        found = self._ordered(targets, needs)
        targets.clear()
        while found:
            group = found.pop(0)
            if group.source is not None:
                self._collect(group, needs)
            group.source = None
            yield group

    def _ordered(self, targets: list[Target], needs: Needs) -> list[Group]:
        """The groups, from the calls in the first batches, as many as it takes to see every weight."""
        first: dict[int, Tensor] = {}
        calls = dict.fromkeys(range(len(targets)), 0)
        order: list[int] = []

        def seen(index: int, matrix: int, matrices: int, rows: Tensor, source: Any) -> None:
            calls[index] += 1
            if index not in first:
                first[index] = source
                order.append(index)

        for number in range(len(self.masks)):
            begun = dict(calls)
            with Watch(targets, seen):
                self.run(number)
            calls = {i: max(calls[i] - begun[i], begun[i]) for i in calls}
            if len(order) == len(targets):
                break
        groups: list[Group] = []
        for index in order:
            target = targets[index]
            own = of_any_expert(target.owners[0].fqn)
            group = next((g for g in groups if first[index] is g.source or own in g.names), None)
            if group is None:
                group = Group(first[index], set(), [], [])
                groups.append(group)
            shape = shape_of_blocks(target)
            once = calls[index] == 1 and len(shape) == 2 and type(first[index]) is Tensor
            twin = group.twin(shape[-1]) if once and first[index] is group.source else None
            is_routed = len(shape) == 3 or own != target.owners[0].fqn
            pairs = needs.pairs and not is_routed  # other tokens may reach an expert
            device = target.weight.device
            moments = twin or Moments(shape, device, needs.full, pairs, once)
            group.names.add(own)
            group.targets.append(target)
            group.moments.append(moments)
        rest = [targets[i] for i in range(len(targets)) if i not in first]
        if rest:
            never = [
                Moments(shape_of_blocks(t), t.weight.device, needs.full, needs.pairs) for t in rest
            ]
            groups.append(Group(None, set(), rest, never))
        return groups

    def _collect(self, group: Group, needs: Needs) -> None:
        high: dict[int, list[Tensor]] = {}
        leads = {id(m): i for i, m in reversed(list(enumerate(group.moments)))}

        def remember(index: int, matrix: int, matrices: int, rows: Tensor, source: Any) -> None:
            moments = group.moments[index]
            if moments.pairs and not isinstance(rows, int) and leads[id(moments)] == index:
                high.setdefault(index, []).append(rows)

        def count(index: int, matrix: int, matrices: int, rows: Any, source: Any) -> None:
            moments = group.moments[index]
            if leads[id(moments)] != index:
                return
            if isinstance(rows, int):
                moments.looked_up += rows
                return
            waiting = high.get(index)
            moments.add(matrix, rows, waiting.pop(0) if waiting else None, matrices)

        for number, mask in enumerate(self.masks):
            high.clear()
            if needs.pairs and self.high is not None:
                assert self.copies is not None
                with Watch([self.copies[t.owners[0].fqn] for t in group.targets], remember, mask):
                    self.high(number)
            with Watch(group.targets, count, mask):
                self.run(number)


def walk(
    model: nn.Module,
    targets: list[Target],
    batches: Sequence[Any],
    needs: Needs,
    blocks: Sequence[nn.Module] | None,
    cache: torch.device | None,
) -> Iterator[Group | Block]:
    """The groups of weights, as the module describes them. Whoever gets a group rounds it before the next one. Where a
    step needs blocks, each block comes after its last group. Whoever gets one sets its targets.

    Args:
        model: in eval mode.
        targets: the weights; emptied.
        batches: of the model, on its device.
        needs: what the steps read.
        blocks: the chain of blocks; None finds it. [] takes the model as one block.
        cache: where hidden states are kept.

    Raises ValueError and TypeError for `blocks` that are not a chain, as `lowbit.tracing.block_inputs.capture`.
    """
    masks = [mask_of(batch) for batch in batches]
    chain = chain_of(model, targets) if blocks is None else list(blocks)
    states = None
    if chain:
        try:
            states = States(model, chain, batches, cache)
        except (ValueError, TypeError):
            if blocks is not None:
                raise
    whole = Place(lambda i: call(model, batches[i]), masks)
    if states is None:
        if needs.pairs:
            twin = copy.deepcopy(model)
            whole.copies = _copies(model, twin, targets)
            whole.high = lambda i: call(twin, batches[i])
        yield from whole.groups(targets, needs)
        if needs.blocks:
            yield block_of(model, batches, masks)
        return
    before, inside, after = _split(model, chain, targets, batches)
    targets.clear()
    if before:
        yield from whole.groups(before, needs)
        states.again(model, batches, cache)
    while inside:
        own = inside.pop(0)
        yield from states.groups(own, needs, masks)
    if after:
        tail = states.tail(model, batches, masks, needs, after)
        yield from tail.groups(after, needs)
        if needs.blocks:
            yield states.block_of_tail(model, batches, masks)


def block_of(
    model: nn.Module, batches: Sequence[Any], masks: Sequence[Tensor | None] | None = None
) -> Block:
    """The whole model as one block."""

    def run(i: int) -> Any:
        return call(model, batches[i])

    def rows(i: int) -> int:
        first = next((x for x in tree_leaves(batches[i]) if isinstance(x, Tensor) and x.ndim), None)
        return 1 if first is None else len(first)

    own = [mask_of(batch) for batch in batches] if masks is None else masks
    return Block("the model", model, len(batches), rows, run, run, own)


def chain_of(model: nn.Module, targets: Sequence[Target]) -> list[nn.Module]:
    """The blocks of the model: the children of the module list that holds the most weights. [] if there is none."""
    sizes: dict[int, int] = {}
    for target in targets:
        first = id(target.owners[0].module)
        sizes[first] = sizes.get(first, 0) + target.weight.numel()
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():  # parents come first, and win
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            size = sum(sizes.get(id(m), 0) for m in module.modules())
            if size > most:
                best, most = list(module), size
    return best


class States:
    """The hidden states of all batches before a block, of the model and of the one in high precision."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        batches: Sequence[Any],
        cache: torch.device | None,
    ) -> None:
        self.blocks = list(blocks)
        self.at = 0
        found = list(capture(model, blocks, batches, cache))
        self.low = [one.hidden for one in found]
        self.high = list(self.low)
        self.arguments: list[tuple[Arguments, ...]] = [one.arguments for one in found]

    def again(self, model: nn.Module, batches: Sequence[Any], cache: torch.device | None) -> None:
        """Take the states of the model as it is now. Those in high precision stay."""
        self.low = [one.hidden for one in capture(model, self.blocks, batches, cache)]

    def tail(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        masks: Sequence[Tensor | None],
        needs: Needs,
        targets: Sequence[Target],
    ) -> Place:
        """What follows the last block. In high precision it differs by its input alone, so a weight there sees those
        before it as they are."""

        place = Place(lambda i: self._after(self.low, model, batches, i), masks)
        if needs.pairs:
            place.copies = {target.owners[0].fqn: target for target in targets}
            place.high = lambda i: self._after(self.high, model, batches, i)
        return place

    def block_of_tail(
        self, model: nn.Module, batches: Sequence[Any], masks: Sequence[Tensor | None]
    ) -> Block:
        """What follows the last block, as a block."""
        return Block(
            "after the blocks",
            model,
            len(self.low),
            lambda i: len(self.low[i]),
            lambda i: self._after(self.low, model, batches, i),
            lambda i: self._after(self.high, model, batches, i),
            masks,
        )

    def _after(self, states: list[Tensor], model: nn.Module, batches: Sequence[Any], i: int) -> Any:
        home = next((p.device for p in self.blocks[-1].parameters()), states[i].device)
        hidden = states[i].to(home, copy=True)  # what follows may write to it
        return call_after(model, self.blocks, batches[i], hidden)

    def _run(self, block: nn.Module, hidden: Tensor, number: int) -> Tensor:
        home = next((p.device for p in block.parameters()), hidden.device)
        x = hidden.to(home, copy=True)  # a block may write to its input
        return self.arguments[number][self.at].run(block, x)

    def groups(
        self, targets: list[Target], needs: Needs, masks: Sequence[Tensor | None]
    ) -> Iterator[Group | Block]:
        """The groups of the next block, which then runs on all batches."""
        block = self.blocks[self.at]
        place = Place(lambda i: self._run(block, self.low[i], i), masks)
        twin = None
        if needs.pairs:
            twin = copy.deepcopy(block)
            place.copies = _copies(block, twin, targets)
            place.high = lambda i: self._run(twin, self.high[i], i)
        yield from place.groups(targets, needs)
        if needs.blocks:
            own = Block(
                f"block {self.at}",
                block,
                len(self.low),
                lambda i: len(self.low[i]),
                lambda i: self._run(block, self.low[i], i),
                lambda i: self._run(block, self.high[i], i).to(self.high[i].device),
                masks,
            )
            yield own
            assert own.targets is not None
            self.high = own.targets
        for number, x in enumerate(self.low):
            self.low[number] = self._run(block, x, number).to(x.device)
            if twin is not None and not needs.blocks:
                x = self.high[number]
                self.high[number] = self._run(twin, x, number).to(x.device)
        self.at += 1


def _split(
    model: nn.Module, chain: Sequence[nn.Module], targets: Sequence[Target], batches: Sequence[Any]
) -> tuple[list[Target], list[list[Target]], list[Target]]:
    """The weights before the blocks, of each block, and after them. A weight that several of them share, or an
    embedding, comes before."""
    where = {id(m): i for i, block in enumerate(chain) for m in block.modules()}
    before: list[Target] = []
    inside: list[list[Target]] = [[] for _ in chain]
    outside: list[Target] = []
    for target in targets:
        places = {where.get(id(owner.module)) for owner in target.owners}
        place = places.pop() if len(places) == 1 else -1
        if place == -1 or any(isinstance(o.module, nn.Embedding) for o in target.owners):
            before.append(target)
        elif place is None:
            outside.append(target)
        else:
            inside[place].append(target)
    early = _called_before(chain, outside, model, batches) if outside else set()
    before += [t for t in outside if id(t.weight) in early]
    return before, inside, [t for t in outside if id(t.weight) not in early]


def _called_before(
    chain: Sequence[nn.Module], outside: list[Target], model: nn.Module, batches: Sequence[Any]
) -> set[int]:
    """The ids of the weights outside the blocks that run before the first block."""
    early: set[int] = set()

    def seen(index: int, matrix: int, matrices: int, rows: Any, source: Any) -> None:
        early.add(id(outside[index].weight))

    with Watch(outside, seen):
        list(capture(model, chain, batches[:1], None))
    return early


def _copies(module: nn.Module, twin: nn.Module, targets: Sequence[Target]) -> dict[str, Target]:
    """The weights of a copy of a module, by their names in the original."""
    others = dict(zip(map(id, module.modules()), twin.modules(), strict=True))
    found = {}
    for target in targets:
        owner = next(o for o in target.owners if id(o.module) in others)
        weight: Any = others[id(owner.module)]._parameters[owner.attribute]
        found[target.owners[0].fqn] = replace(target, weight=weight)
    return found
