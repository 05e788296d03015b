"""Which points of a product of axes the usual run takes.

A test with several `parametrize` decorators runs over their product. With `@pytest.mark.cover("pairs")` the usual run
takes so few points that each pair of values of two axes occurs; with `cover("values")`, so few that each value occurs.
The other points carry the marker `exhaustive`, and are deselected unless `-m` names that marker. Points
that the command line names are a product of their own.

What counts as an equal value of an argument is its place in the list of `parametrize`, or what the marker says:
`cover("pairs", case=lambda c: c.kind)` takes all cases of a kind for one value. A function that returns a tuple splits
the cases of a table into several axes: `case=lambda c: (c.format, c.shape)`. An empty tuple leaves the argument
out.

Points with other marks (`gpu`, a skip, an expected failure) are covered by themselves: the usual run of a machine
without a GPU meets each pair that a CPU can run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

STRENGTHS = {"values": 1, "pairs": 2}


def usually(cases: Iterable[Any], *names: str) -> list[Any]:
    """The cases for `parametrize`, by name; those that are not named here are `exhaustive`."""
    found = {getattr(case, "name", case): case for case in cases}
    assert found.keys() >= set(names), set(names) - found.keys()
    more = pytest.mark.exhaustive
    return [pytest.param(c, id=n, marks=() if n in names else more) for n, c in found.items()]


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


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few points of the product of the axes that hold each pair of values of two axes."""
    points = [*itertools.product(*axes)]
    places = [*itertools.product(*(range(len(axis)) for axis in axes))]
    return [points[at] for at in covering(places, STRENGTHS["pairs"])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test may also be marked `exhaustive` by hand."""
    points: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("cover") is not None and hasattr(item, "callspec"):
            assert isinstance(item, pytest.Function) and item.parent is not None
            points.setdefault((item.parent.nodeid, item.originalname), []).append(item)
    for own in points.values():
        marker = own[0].get_closest_marker("cover")
        kept = usual(own, *marker.args, **marker.kwargs)
        for at, item in enumerate(own):
            if at not in kept:
                item.add_marker("exhaustive")
    leave_out("exhaustive", config, items)


def leave_out(marker: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a marker, unless `-m` names it."""
    if marker not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if marker in item.keywords])
        items[:] = [item for item in items if marker not in item.keywords]


def usual(points: Sequence[pytest.Item], what: str, **parts: Callable[[Any], object]) -> set[int]:
    """The positions of the points that the usual run takes. `what` and `parts`: the arguments of the marker."""
    alike: dict[frozenset[str], list[int]] = {}
    for at, point in enumerate(points):
        marks = frozenset(mark.name for mark in point.callspec.marks)  # type: ignore[attr-defined]
        alike.setdefault(marks, []).append(at)
    kept: set[int] = set()
    for group in alike.values():
        places = [_places(points[at]) for at in group]
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        rows = [_row(points[at], own, parts, found) for at, own in zip(group, places, strict=True)]
        taken = [[*row, *own.values()] for row, own in zip(rows, places, strict=True)]
        kept |= {group[at] for at in covering(rows, STRENGTHS[what], taken)}
    return kept


def _places(point: Any) -> dict[str, Hashable]:
    """For each argument, what stands for its place in the list of `parametrize`: the objects there."""
    params: dict[str, Any] = point.callspec.params
    places: dict[str, Hashable] = {name: id(value) for name, value in params.items()}
    for mark in point.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        places |= dict.fromkeys(names, tuple(id(params[name]) for name in names))
    return places


def _row(
    point: Any,
    places: dict[str, Hashable],
    parts: dict[str, Callable[[Any], object]],
    found: dict[tuple[str, int], tuple[str, ...]],
) -> list[Hashable]:
    """The values of a point, axis by axis: its places, or what `parts` makes of a value, once (`found`)."""
    row: list[Hashable] = []
    for name, place in places.items():
        if name in parts:
            value = point.callspec.params[name]
            key = name, id(value)
            if key not in found:
                made = parts[name](value)
                found[key] = tuple(map(str, made if isinstance(made, tuple) else [made]))
            row += found[key]
        else:
            row.append(place)
    return row
