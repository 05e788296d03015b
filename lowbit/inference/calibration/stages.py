"""The order in which the weights of a model are calibrated, and the activations that they see.

A model is a chain of blocks, such as `model.model.layers`, with layers before and after it. `walk` yields the weights
in groups. The weights of one group see inputs that the groups before it, already rounded, give:

1. weights outside the blocks that run before them, or that an embedding shares: from the model as it was;
2. block by block, and inside a block one group after another, in the order of calls. Weights that multiply the same
   tensor (q, k and v) are one group, and so are those of experts in a list;
3. the other weights outside the blocks, such as the head, after all blocks.

The hidden states of all batches between two blocks are kept; each block reads them and replaces them by its outputs. So
the calibration takes the memory of the model, of these states and of the Hessians of one group. A model without such a
chain is one block. Where `Memory` streams the weights, one block of the model is in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowbit.convert import Target
from lowbit.inference.calibration.batches import Batches, mask_of
from lowbit.inference.calibration.inputs import Watch
from lowbit.inference.calibration.learned_rounding import Block
from lowbit.inference.calibration.places import Group, Needs, Place
from lowbit.inference.calibration.ranks import Ranks
from lowbit.inference.calibration.states import Cache, States
from lowbit.tracing.batches import call, compared_tensor
from lowbit.tracing.block_inputs import NotAChain, capture

MOST_HELD = 2**30
"""Bytes of the model's outputs that are kept for batches held out. Blocks give hidden states, of which all are kept."""


@dataclass
class Entered:
    """A place whose weights are next, in high precision and in memory.

    Attributes:
        targets: its weights.
        run: runs it on a batch, by its number, as the model in high precision does.
        is_finished: an earlier process has rounded its weights, which come back next.
        folds: True if all that may change beside its weights is kept.
        block: the block; None outside of the blocks.
    """

    targets: Sequence[Target]
    run: Callable[[int], Any]
    is_finished: bool = False
    folds: bool = True
    block: nn.Module | None = None


@dataclass
class HeldOut:
    """A place whose weights are all rounded, and the batches that no step has seen.

    The whole model comes once more after its places, if it is in memory.

    Attributes:
        block: runs on these batches. Its targets are what the place gave before its weights were rounded.
        over: "model" if it gives what the model does.
    """

    block: Block
    over: Literal["blocks", "model"]


class Left(NamedTuple):
    """All weights of a place are rounded. `place`: "before" or "after" the blocks, or the number of one; `varied`:
    `Place.varied`."""

    place: str
    varied: Collection[str] = ()


class StageMemory:
    """What brings the weights of a place into memory, and out again. Here all are there at all times."""

    streams = False
    """True if only one place is in memory at a time."""
    way_out = "Find the batch that gives them, and load the model again"
    """What to do after an error."""

    def bring(self, block: nn.Module | None) -> None:
        """Bring a block, or what lies outside the blocks, into memory in high precision, unless it is there."""

    def drop(self, block: nn.Module | None) -> None:
        """Let go of the weights of a block, or of those in high precision outside the blocks."""

    def is_finished(self, place: str) -> bool:
        """True if an earlier process has rounded the weights of this place."""
        return False

    def restore(self, place: str, targets: list[Target]) -> None:
        """Put these weights back as that process left them. `targets` is emptied."""

    def finish(self, place: str) -> None:
        """Take note that the weights of this place are rounded."""


Stage = Entered | Group | Block | HeldOut | Left


def walk(
    model: nn.Module,
    targets: list[Target],
    batches: Batches,
    needs: Needs,
    blocks: Sequence[nn.Module] | None,
    cache: Cache,
    memory: StageMemory,
) -> Iterator[Stage]:
    """The groups of weights, as the module describes them. The caller rounds a group before it asks for the next one.
    Where a step needs blocks, each block comes after its last group, and the caller sets its targets.

    Args:
        model: in eval mode.
        targets: the weights; emptied.
        batches: of the model, on its device.
        needs: what the steps read.
        blocks: the chain of blocks; None finds it. [] takes the model as one block.
        cache: where hidden states are kept.
        memory: brings weights into memory.

    Raises NotAChain for `blocks` that are not one, and ValueError for a batch that the model does not take.
    """
    masks = [mask_of(batch) for batch in batches[: batches.seen]]
    chain = chain_of(model, targets) if blocks is None else list(blocks)
    states = None
    memory.bring(None)
    if chain:
        for block in first_of_each_class(chain):
            memory.bring(block)
        try:
            states = States(model, chain, batches, cache, needs.high)
        except NotAChain as error:
            if memory.streams:
                raise ValueError(
                    f"{error}. Such a model is calibrated whole, lowbit.calibrate(lowbit.load_pretrained(folder), …)"
                ) from error
            if blocks is not None:
                raise
        if not all(batches.ranks.gathered(states is not None)):
            states = None
    if states is None:
        yield from _as_one(model, targets, batches, needs, masks)
        return
    before, inside, after = _split(model, chain, targets, batches)
    targets.clear()
    run = partial(_called, states)
    whole = needs._replace(held_out=needs.held_out and not memory.streams)
    held = _held_out("the model", model, run, run, batches, whole, _in_host_memory)
    if before:
        yield from _before(states, before, needs, masks, memory)
        states.again()
    memory.drop(None)
    counts: dict[type, dict[Any, int]] = {}
    for at, own in enumerate(inside):
        yield from _block(states, at, own, needs, masks, memory, counts)
    memory.bring(None)
    yield from _after(states, after, needs, masks)
    yield from held


def _as_one(
    model: nn.Module,
    targets: list[Target],
    batches: Batches,
    needs: Needs,
    masks: Sequence[Tensor | None],
) -> Iterator[Stage]:
    """A model without blocks."""
    place = Place(lambda i: call(model, batches[i]), masks, batches.ranks)
    yield Entered(tuple(targets), place.run)
    held = _held_out("the model", model, place.run, place.run, batches, needs, list)
    if needs.pairs:
        twin = _twin(model)
        place.copies = _copies(model, twin, targets)
        place.high = lambda i: call(twin, batches[i])
    yield from place.groups(targets, needs)
    if needs.blocks:
        yield block_of(model, batches, masks)
    yield from held
    yield Left("after")


def _before(
    states: States,
    targets: list[Target],
    needs: Needs,
    masks: Sequence[Tensor | None],
    memory: StageMemory,
) -> Iterator[Stage]:
    """The weights before the blocks, from the model as it was."""
    if memory.is_finished("before"):
        memory.restore("before", targets)
        return
    run = partial(_called, states)
    if memory.streams:
        last = states.kept(states.low, copy=True)
        for at, block in enumerate(states.blocks):
            memory.bring(block)
            states.advance(last, at, block)
            memory.drop(block)
        run = partial(states.after, last)
    yield Entered(tuple(targets), run, folds=False)
    name, model, batches = "before the blocks", states.model, states.batches
    held = _held_out(name, model, run, run, batches, needs, states.kept)
    yield from Place(run, masks, batches.ranks).groups(targets, needs)
    yield from held
    yield Left("before")


def _called(states: States, number: int) -> Any:
    return call(states.model, states.batches[number])


def _block(
    states: States,
    at: int,
    targets: list[Target],
    needs: Needs,
    masks: Sequence[Tensor | None],
    memory: StageMemory,
    counts: dict[type, dict[Any, int]],
) -> Iterator[Stage]:
    """The weights of a block, which then runs on all batches. `counts`: `Place.counts` by the class of the block."""
    block, place = states.blocks[at], str(at)
    is_finished = memory.is_finished(place)

    def low(i: int) -> Tensor:
        return states.run(at, block, states.low[i], i)

    def high(i: int) -> Tensor:
        return states.run(at, block, states.high[i], i)

    if needs.high or not is_finished:
        memory.bring(block)
        yield Entered(tuple(targets), high, is_finished, block=block)
    # Without a comparison nobody advances the states in high precision.
    plain = high if needs.high else low
    compares = needs._replace(held_out=needs.held_out and bool(targets) and not is_finished)
    given = states.batches, compares, states.kept
    held = _held_out(f"block {at}", block, low, plain, *given, over="blocks")
    twin = _twin(block) if needs.pairs and not is_finished else None
    if needs.high and (is_finished or not (twin or needs.blocks)):
        states.advance(states.high, at, block)
    if is_finished:
        memory.restore(place, targets)
    else:
        inside = Place(low, masks, states.batches.ranks)
        if twin is not None:
            inside.copies = _copies(block, twin, targets)
            inside.high = lambda i: states.run(at, twin, states.high[i], i)
            inside.keep = states.high.__setitem__
            inside.counts = counts.setdefault(type(block), {})
        yield from inside.groups(targets, needs)
        if needs.blocks:
            count, ranks = len(states.low), states.batches.ranks
            rows = lambda i: states.low.shape(i)[0]  # noqa: E731
            own = Block(f"block {at}", block, count, rows, low, high, masks, ranks=ranks)
            own.keep = states.kept
            own.targets = states.high if inside.is_kept else None
            yield own
            assert own.targets is not None
            states.high = own.targets
        elif twin is not None:
            states.advance(states.high, at, twin, states.batches.seen if inside.is_kept else 0)
        yield from held
        yield Left(place, inside.varied)
    states.advance(states.low, at, block)
    memory.drop(block)


def _after(
    states: States, targets: list[Target], needs: Needs, masks: Sequence[Tensor | None]
) -> Iterator[Stage]:
    """The weights after the last block. In high precision what follows it differs by its input alone, so a weight there
    sees those before it as they are."""
    place = Place(partial(states.after, states.low), masks, states.batches.ranks)
    if targets:
        high = partial(states.after, states.high if needs.high else states.low)
        yield Entered(tuple(targets), high)
        given = states.batches, needs, states.kept
        held = _held_out("after the blocks", states.model, place.run, high, *given)
        if needs.pairs:
            place.copies = {target.fqn: target for target in targets}
            place.high = high
        yield from place.groups(targets, needs)
        if needs.blocks:
            count, name = len(states.low), "after the blocks"
            rows = [states.low.shape(i)[0] for i in range(count)]
            own = Block(name, states.model, count, rows.__getitem__, place.run, high, masks)
            own.ranks = states.batches.ranks
            yield own
        yield from held
    yield Left("after")


def _held_out(
    name: str,
    module: nn.Module,
    run: Callable[[int], Any],
    high: Callable[[int], Any],
    batches: Batches,
    needs: Needs,
    kept: Callable[[Iterable[Tensor]], MutableSequence[Tensor]],
    over: Literal["blocks", "model"] = "model",
) -> list[HeldOut]:
    """The outputs of a place for the batches held out, before its weights are rounded; [] without such batches, and
    where outputs hold no floats.

    Args:
        name, module: of the place.
        run, high: as those of a `Place`.
        kept: makes the sequence of targets.
        over: that of `HeldOut`.
    """
    if not needs.held_out:
        return []
    first = batches.seen
    found = map(compared_tensor, map(high, range(first, len(batches))))
    outputs = (output for output in found if output is not None)
    targets = kept(outputs if over == "blocks" else _as_many_as_fit(outputs))
    count = len(targets)
    if not any(batches.ranks.gathered(count)):
        return []
    masks = [mask_of(batch) for batch in batches[first : first + count]]
    here: Any = lambda i: run(first + i)  # noqa: E731
    block = Block(name, module, count, lambda i: 1, here, high, masks, targets, ranks=batches.ranks)
    return [HeldOut(block, over)]


def _in_host_memory(outputs: Iterable[Tensor]) -> list[Tensor]:
    return [output.to("cpu") for output in outputs]


def _as_many_as_fit(outputs: Iterator[Tensor]) -> Iterator[Tensor]:
    """The first outputs of a model, logits over a vocabulary, up to `MOST_HELD` bytes, and one in any case."""
    nbytes = 0
    for output in outputs:
        yield output
        nbytes += output.nbytes
        if nbytes >= MOST_HELD:
            return


def first_of_each_class(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that run to show what a block of their class gives beside the hidden state."""
    found: dict[type, nn.Module] = {}
    for block in blocks:
        found.setdefault(type(block), block)
    return list(found.values())


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
    ranks = batches.ranks if isinstance(batches, Batches) else Ranks()
    return Block("the model", model, len(batches), rows, run, run, own, ranks=ranks)


def chain_of(model: nn.Module, targets: Sequence[Target] | None) -> list[nn.Module]:
    """The blocks of the model: the children of the module list that holds the most of these weights, or of all (None).
    [] if there is none."""
    sizes: dict[int, int] = {}
    for target in targets or ():
        first = id(target.owners[0].module)
        sizes[first] = sizes.get(first, 0) + target.weight.numel()
    if targets is None:
        sizes = {
            id(m): sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()
        }
    best: list[nn.Module] = []
    most = 0
    for module in model.modules():  # parents come first, and win
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            size = sum(sizes.get(id(m), 0) for m in module.modules())
            if size > most:
                best, most = list(module), size
    return best


def _split(
    model: nn.Module, chain: Sequence[nn.Module], targets: Sequence[Target], batches: Batches
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
    before += [t for i, t in enumerate(outside) if i in early]
    return before, inside, [t for i, t in enumerate(outside) if i not in early]


def _called_before(
    chain: Sequence[nn.Module], outside: list[Target], model: nn.Module, batches: Batches
) -> set[int]:
    """The numbers of the weights outside the blocks that run before the first block."""
    early: set[int] = set()

    def seen(index: int, matrix: int, matrices: int, rows: Any, source: Any) -> None:
        early.add(index)

    with Watch(outside, seen):
        list(capture(model, chain, batches[:1], None))
    return batches.ranks.gathered(early)[batches.first]


def _twin(module: nn.Module) -> nn.Module:
    """A copy that stays in high precision. Its parameters view the memory of the originals, which the steps replace and
    do not write to."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _copies(module: nn.Module, twin: nn.Module, targets: Sequence[Target]) -> dict[str, Target]:
    """The weights of a copy of a module, by their names in the original."""
    others = dict(zip(map(id, module.modules()), twin.modules(), strict=True))
    found = {}
    for target in targets:
        owner = next(o for o in target.owners if id(o.module) in others)
        weight: Any = others[id(owner.module)]._parameters[owner.attribute]
        found[target.fqn] = replace(target, weight=weight)
    return found
