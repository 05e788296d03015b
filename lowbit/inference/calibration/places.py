"""A place of a model, such as a block, and its weights in groups, each with the sums over its inputs.

The weights of one group see inputs that the groups before it, already rounded, give. Weights that multiply the same
tensor (q, k and v) are one group, and so are those of experts in a list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lowbit.convert import Target, is_turned, of_any_expert, shape_of_blocks
from lowbit.inference.calibration.inputs import Moments, Seen, Watch
from lowbit.inference.calibration.ranks import Ranks


class Needs(NamedTuple):
    """What the steps of a calibration read: all of each Hessian, or its diagonal; the inputs in high precision beside
    those of the rounded model; blocks whose weights are all rounded; blocks in high precision (`Entered`); outputs for
    batches that no step sees (`HeldOut`). `disk`: the folder on whose disk the sums of stacked experts lie; None: in
    memory."""

    full: bool
    pairs: bool
    blocks: bool = False
    entered: bool = False
    held_out: bool = False
    disk: Path | None = None

    @property
    def high(self) -> bool:
        """True if the model runs in high precision too."""
        return self.pairs or self.blocks or self.entered


@dataclass
class Group:
    """Weights that are calibrated together.

    Attributes:
        source: a key of the tensor that the first one multiplies; None if no batch reaches these weights.
        names: of the weights, with one name for the same weight of all experts of a list.
        targets: the weights.
        moments: the sums over the inputs of each.
        products: of these weights in each batch, by its number, once they were counted. Those of experts are not, since
            weights that are rounded before may send tokens to others.
        kind: the same for a group of another place that looks like this one.
    """

    source: Any
    names: set[str]
    targets: list[Target]
    moments: list[Moments]
    products: dict[int, int] = field(default_factory=dict)
    kind: Any = None

    @property
    def is_routed(self) -> bool:
        """True for experts: the group names the weight of any, or a weight is a stack."""
        return any(m.stack for m in self.moments) or not self.names <= {t.fqn for t in self.targets}

    def last(self, batch: int) -> int | None:
        """How many products of these weights a batch has; None if that is not known, or not the same in all batches:
        then rounding the weights before these may change it."""
        counts = set(self.products.values())
        return self.products.get(batch) if len(counts) == 1 and counts != {0} else None

    def complete(self) -> None:
        """Tell the sums whether they are of one weight alone, and which, if it has no more outputs than inputs."""
        for target, moments in zip(self.targets, self.moments, strict=True):
            shape = shape_of_blocks(target)
            if self.moments.count(moments) > 1:
                moments.shared = {}
            elif moments.pairs and len(shape) == 2 and shape[0] <= shape[1]:
                plain = target.weight.detach()
                moments.weight = plain.mT if is_turned(target) else plain.reshape(shape)

    def twin(self, size: int) -> Moments | None:
        """The sums of a weight that multiplies the same tensor."""
        return next((m for m in self.moments if m.once and m.size == size), None)


@dataclass
class Place:
    """What weights lie in, and how it runs on each batch.

    Attributes:
        run: runs it on a batch, by its number.
        masks: for each batch the tokens that count; None: all.
        ranks: the processes that calibrate together.
        high: runs a copy that stays in high precision, on the inputs that it has in the model in high precision.
        copies: name of a weight → the weight in that copy.
        keep: takes what `high` gives for a batch, by its number, in the last of its runs. None: nobody wants it.
        is_kept: True once `keep` has had all batches.
        counts: how many products of a group each batch has in earlier places of this kind, by what the groups look
            like. With `keep`, where all groups are alike, runs end early from the first on. The last runs of `high` are
            whole, and tell whether that was right.
        varied: names of weights for which it was not.
    """

    run: Callable[[int], Any]
    masks: Sequence[Tensor | None]
    ranks: Ranks
    high: Callable[[int], Any] | None = None
    copies: dict[str, Target] = field(default_factory=dict)
    keep: Callable[[int, Any], None] | None = None
    is_kept: bool = False
    counts: dict[Any, int] = field(default_factory=dict)
    varied: set[str] = field(default_factory=set)
    _last: Group | None = None
    """The group with which `keep` gets what it takes."""
    _taken: list[tuple[set[str], int]] = field(default_factory=list)
    """Names of groups, and their products by `counts`. Each run of `high` counts those of the last group anew."""

    def groups(self, targets: list[Target], needs: Needs) -> Iterator[Group]:
        """The weights in the order of their calls, each group with the sums over its inputs at this time. `targets` is
        emptied, so that the weights of a group can be freed."""
        found = self._ordered(targets, needs)
        targets.clear()
        for group in found:
            group.complete()
        products = [(group.kind, group.products) for group in found]
        while found:
            group = found.pop(0)
            if group.source is not None:
                self._collect([group, *found], needs)
            group.source = None
            yield group
        if self.varied:
            self.counts.clear()
            return
        for kind, own in products:
            counts = set(own.values())
            if len(own) == len(self.masks) and len(counts) == 1 and counts != {0}:
                self.counts[kind] = counts.pop()

    def _ordered(self, targets: list[Target], needs: Needs) -> list[Group]:
        """The groups, from the calls in the first batches, as many as it takes to see every weight."""
        first: dict[int, tuple[Any, bool]] = {}
        calls: dict[int, int] = {}
        for rank, called in enumerate(self.ranks.gathered(self._called(targets))):
            for index, (source, is_plain, count) in called.items():
                first.setdefault(index, ((rank, source), is_plain))
                calls[index] = max(count, calls.get(index, 0))
            if len(first) == len(targets):
                break
        groups: list[Group] = []
        for index, (source, is_plain) in first.items():
            target = targets[index]
            own = of_any_expert(target.fqn)
            group = next((g for g in groups if source == g.source or own in g.names), None)
            if group is None:
                group = Group(source, set(), [], [])
                groups.append(group)
            shape = shape_of_blocks(target)
            once = calls[index] == 1 and len(shape) == 2 and is_plain
            twin = group.twin(shape[-1]) if once and source == group.source else None
            is_routed = len(shape) == 3 or own != target.fqn
            pairs = needs.pairs and not is_routed  # other tokens may reach an expert
            device = target.weight.device
            moments = twin or Moments(shape, device, needs.full, pairs, once, needs.disk)
            group.names.add(own)
            group.targets.append(target)
            group.moments.append(moments)
        rest = [targets[i] for i in range(len(targets)) if i not in first]
        if rest:
            never = [
                Moments(shape_of_blocks(t), t.weight.device, needs.full, needs.pairs) for t in rest
            ]
            groups.append(Group(None, set(), rest, never))
        self._foresee([group for group in groups if group.source is not None], targets, calls)
        return groups

    def _foresee(
        self, groups: Sequence[Group], targets: Sequence[Target], calls: dict[int, int]
    ) -> None:
        """Find the last group, and the products of groups that are like those of an earlier place.

        `calls`: by number of the target, in the batches that ran."""
        number = {id(target): i for i, target in enumerate(targets)}
        for at, group in enumerate(groups):
            shapes = tuple(tuple(shape_of_blocks(t)) for t in group.targets)
            group.kind = at, shapes, tuple(calls[number[id(t)]] for t in group.targets)
        # Sums that weights share may have to be found again, by another run.
        if self.keep is None or not groups or len({*groups[-1].moments}) < len(groups[-1].moments):
            return
        self._last = groups[-1]
        counted = [group for group in groups if not group.is_routed]
        if all(group.kind in self.counts for group in counted):
            for group in counted:
                count = self.counts[group.kind]
                group.products = dict.fromkeys(range(len(self.masks)), count)
                self._taken += [(group.names, count)] if group is not self._last else []

    def _called(self, targets: Sequence[Target]) -> dict[int, tuple[int, bool, int]]:
        """For each weight that is called, in the order of calls: the number of the tensor that it multiplies, whether
        that is a plain tensor, and the most calls in a batch."""
        first: dict[int, Any] = {}
        calls = dict.fromkeys(range(len(targets)), 0)

        def seen(index: int, matrix: int, matrices: int, rows: Tensor, source: Any) -> None:
            calls[index] += 1
            first.setdefault(index, source)

        for number in range(len(self.masks)):
            begun = dict(calls)
            with Watch(targets, seen):
                self.run(number)
            calls = {i: max(calls[i] - begun[i], begun[i]) for i in calls}
            if len(first) == len(targets):
                break
        numbers: dict[int, int] = {}
        return {
            i: (numbers.setdefault(id(x), len(numbers)), type(x) is Tensor, calls[i])
            for i, x in first.items()
        }

    def _collect(self, groups: Sequence[Group], needs: Needs) -> None:
        """Find the sums of the first group; the others come after it."""
        group = groups[0]
        alike = self._counted(groups, needs)
        if not all(self.ranks.gathered(alike)):
            pairs = zip(group.targets, group.moments, strict=True)
            group.moments = [
                Moments(shape_of_blocks(t), t.weight.device, m.full, m.pairs, disk=needs.disk)
                for t, m in pairs
            ]
            self._counted(groups, needs)
        for moments in dict.fromkeys(group.moments):
            moments.add_up(self.ranks)

    def _counted(self, groups: Sequence[Group], needs: Needs) -> bool:
        """Sum over all batches. False: weights that share their sums multiply other tensors in some batch."""
        group = groups[0]
        high: dict[int, list[Tensor]] = {}
        leads = {id(m): i for i, m in reversed(list(enumerate(group.moments)))}
        lead_of = {i: leads[id(m)] for i, m in enumerate(group.moments)}
        sharing = {i for pair in lead_of.items() if pair[0] != pair[1] for i in pair}
        multiplied: dict[int, list[Any]] = {}
        alike, ends = True, group is self._last
        has_pairs = any(m.pairs for m in group.moments)
        unread = sharing if len({*group.moments}) == 1 else ()

        def remember(index: int, matrix: int, matrices: int, rows: Tensor, source: Any) -> None:
            moments = group.moments[index]
            if moments.pairs and not isinstance(rows, int) and lead_of[index] == index:
                high.setdefault(index, []).append(rows)

        def count(index: int, matrix: int, matrices: int, rows: Any, source: Any) -> None:
            moments = group.moments[index]
            if index in sharing:
                multiplied[index].append(source)
            if lead_of[index] != index:
                return
            if isinstance(rows, int):
                moments.looked_up += rows
                return
            waiting = high.get(index)
            moments.add(matrix, rows, waiting.pop(0) if waiting else None, matrices)

        for number, mask in enumerate(self.masks):
            high.clear()
            multiplied = {i: [] for i in sharing}
            if ends:
                self._end(number, mask, remember, group)
            elif has_pairs and self.high is not None:
                self._watched(self.high, number, mask, remember, groups, unread, self.copies)
            self._watched(self.run, number, mask, count, groups, unread)
            numbers = {i: list(map(id, sources)) for i, sources in multiplied.items()}
            alike = alike and all(numbers[i] == numbers[lead_of[i]] for i in sharing)
        self.is_kept = self.is_kept or ends
        return alike

    def _end(self, number: int, mask: Tensor | None, seen: Seen, group: Group) -> None:
        """Run `high` on a batch for the last time, for the last group and for `keep`."""
        assert self.high is not None and self.keep is not None
        names = list(dict.fromkeys([*(t.fqn for t in group.targets), *self.copies]))
        watch = Watch([self.copies[n] for n in names], seen, mask, None, len(group.targets))
        with watch:
            found = self.high(number)
        self.keep(number, found)
        products = dict(zip(names, watch.products, strict=True))
        if not group.is_routed:
            group.products[number] = sum(products[n] for n in group.names)
        for own, count in self._taken:
            if sum(products[n] for n in own) != count:
                self.varied |= own

    def _watched(
        self,
        run: Callable[[int], Any],
        number: int,
        mask: Tensor | None,
        seen: Seen,
        groups: Sequence[Group],
        unread: Collection[int],
        copies: dict[str, Target] | None = None,
    ) -> None:
        """Run batch `number`, and let `seen` have the inputs of the first group. The run ends with that group's last
        product where this is known. Otherwise it counts the products of all groups.

        Args:
            unread: numbers of the group's weights, if all share their sums, and so their input.
            copies: name of a weight → the weight that runs in its place.
        """
        group = groups[0]
        most = group.last(number)
        targets = [t for g in (groups if most is None else groups[:1]) for t in g.targets]
        if copies is not None:
            targets = [copies[t.fqn] for t in targets]
        watch = Watch(targets, seen, mask, most, len(group.targets), unread)
        try:
            with watch:
                run(number)
        except Exception:  # `Reached`, or what the model made of it
            if not watch.is_over:
                raise
        if most is not None:
            return
        counts = iter(watch.products)
        for g in groups:
            products = sum(islice(counts, len(g.targets)))
            if not g.is_routed:
                g.products[number] = products
