"""Which points of a product of axes the usual run takes.

A test with several `parametrize` decorators runs over their product. With `@pytest.mark.cover("pairs")` the usual run
takes so few points that each pair of values of two axes occurs; with `cover("values")`, so few that each value occurs.
The other points carry the marker `exhaustive`. They are not even collected unless `-m` names that marker.

What counts as an equal value of an argument is its place in the list of `parametrize`, or what the marker says:
`cover("pairs", case=lambda c: c.kind)` takes all cases of a kind for one value. A function that returns a tuple splits
the cases of a table into several axes: `case=lambda c: (c.format, c.shape)`.

Points with other marks (`gpu`, a skip, an expected failure) are covered by themselves: the usual run of a machine
without a GPU meets each pair that a CPU can run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import replace
from typing import Any

import pytest

STRENGTHS = {"values": 1, "pairs": 2}


def covering(
    rows: Sequence[Sequence[Hashable]], strength: int, spread: Sequence[Sequence[Hashable]] = ()
) -> list[int]:
    """The positions of a few rows that hold each combination of `strength` values that any of the rows holds.

    A greedy search: the next row adds the most combinations; among equals, its values were taken least often so far,
    and then the first row wins. The same rows give the same answer.

    Args:
        rows: points of a product, or of a part of one; the values of one axis stand at the same place of each row.
        strength: 1 for each value, 2 for each pair of values of two axes.
        spread: for each row, the values to take equally often; the values of the row by default.
    """
    spread = spread or rows
    parts = [set(itertools.combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing, taken, chosen = set().union(*parts), Counter[Hashable](), []
    queue = [(-len(part), 0, at) for at, part in enumerate(parts)]
    heapq.heapify(queue)
    while missing:
        at = heapq.heappop(queue)[2]
        now = (-len(parts[at] & missing), sum(taken[v] for v in enumerate(spread[at])), at)
        if queue and now > queue[0]:  # others may be better by now; a row itself only gets worse
            heapq.heappush(queue, now)
            continue
        chosen.append(at)
        missing -= parts[at]
        taken.update(enumerate(spread[at]))
    return sorted(chosen)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    yield
    marker = metafunc.definition.get_closest_marker("cover")
    if marker is not None:
        kept = usual(metafunc._calls, *marker.args, **marker.kwargs)
        extra = pytest.mark.exhaustive.mark
        metafunc._calls[:] = [
            call if at in kept else replace(call, marks=[*call.marks, extra])
            for at, call in enumerate(metafunc._calls)
            if at in kept or _asks_for_all(metafunc.config)
        ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test may also be marked `exhaustive` by hand."""
    leave_out("exhaustive", config, items)


def leave_out(marker: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a marker, unless `-m` names it."""
    if marker not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if marker in item.keywords])
        items[:] = [item for item in items if marker not in item.keywords]


def _asks_for_all(config: pytest.Config) -> bool:
    return "exhaustive" in config.option.markexpr


def usual(calls: Sequence[Any], what: str, **parts: Callable[[Any], object]) -> set[int]:
    """The positions of the points that the usual run takes. `what` and `parts`: the arguments of the marker."""
    alike: dict[frozenset[str], list[int]] = {}
    for at, call in enumerate(calls):
        alike.setdefault(frozenset(mark.name for mark in call.marks), []).append(at)
    kept: set[int] = set()
    for group in alike.values():
        rows = [_row(calls[at], parts) for at in group]
        taken = [[*row, *calls[at].indices.values()] for row, at in zip(rows, group, strict=True)]
        kept |= {group[at] for at in covering(rows, STRENGTHS[what], taken)}
    return kept


def _row(call: Any, parts: dict[str, Callable[[Any], object]]) -> list[Hashable]:
    """The values of a point, axis by axis: places in the lists of `parametrize`, or what `parts` makes of a value."""
    row: list[Hashable] = []
    for name, position in call.indices.items():
        if name in parts:
            found = parts[name](call.params[name])
            row += map(str, found if isinstance(found, tuple) else [found])
        else:
            row.append(position)
    return row
