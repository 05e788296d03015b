"""least: one option for each of several units, with the least sum of values under a budget for the sum of costs.

It is the multiple-choice knapsack problem, solved exactly:

1. A price λ ≥ 0 of the cost gives a bound: Σ min (value + λ · cost) − λ · budget over the options of each unit. The λ
   with the highest bound is found by bisection, and its choice, filled up, is the first solution.
2. Unit after unit, all sums (cost, value) that no other one beats in both are kept. Sums that cannot lead below the
   first solution, by the bound of the units that follow, are left out, which are most.

If more than MOST sums are left, then of those whose costs differ by less than 1e-6 of their range one is kept. What is
found then holds the budget, and is almost the least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2**17
BISECTIONS = 80
FLOAT = torch.float64


def least(
    values: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> list[int] | None:
    """The number of the option of each unit; None if no choice holds the budget.

    Args:
        values: of the options of each unit; their sum is minimized.
        costs: of the same options; their sum is at most `budget`.
    """
    v = [torch.tensor(own, dtype=FLOAT) for own in values]
    c = [torch.tensor(own, dtype=FLOAT) for own in costs]
    smallest = [int(_first_least(own, other)) for own, other in zip(c, v, strict=True)]
    if not _total(c, smallest) <= budget:
        return None
    free = [int(_first_least(own, other)) for own, other in zip(v, c, strict=True)]
    if _total(c, free) <= budget:
        return free
    price, found = _priced(v, c, budget, smallest)
    _fill(v, c, budget, found)
    order = sorted(range(len(v)), key=lambda i: -float(v[i].max() - v[i].min()))
    own = [v[i] for i in order], [c[i] for i in order]
    better = _by_sums(*own, budget, price, _total(v, found))
    if better is not None:
        found = [better[order.index(i)] for i in range(len(v))]
    return found


def _first_least(keys: Tensor, ties: Tensor) -> Tensor:
    """The number of the least key, of several the one with the least tie."""
    return torch.where(keys == keys.min(), ties, torch.inf).argmin()


def _total(each: list[Tensor], chosen: list[int]) -> float:
    return sum(float(own[i]) for own, i in zip(each, chosen, strict=True))


def _priced(
    v: list[Tensor], c: list[Tensor], budget: float, smallest: list[int]
) -> tuple[float, list[int]]:
    """The price with the highest bound, and a choice at this price that holds the budget."""

    def chosen(price: float) -> list[int]:
        pairs = zip(v, c, strict=True)
        return [int(_first_least(own + price * cost, cost)) for own, cost in pairs]

    low, high, found = 0.0, 1.0, smallest
    for _ in range(200):  # prices may have any unit
        if _total(c, chosen(high)) <= budget:
            break
        low, high = high, 4 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        at = chosen(middle)
        if _total(c, at) <= budget:
            high, found = middle, at
        else:
            low = middle
    return high, found


def _fill(v: list[Tensor], c: list[Tensor], budget: float, chosen: list[int]) -> None:
    """Change single options while that lowers the values and holds the budget, in place."""
    rest = budget - _total(c, chosen)
    while True:
        best, at = 0.0, None
        for i, (own, cost) in enumerate(zip(v, c, strict=True)):
            gain = torch.where(cost - cost[chosen[i]] <= rest, own[chosen[i]] - own, -torch.inf)
            if float(gain.max()) > best:
                best, at = float(gain.max()), (i, int(gain.argmax()))
        if at is None:
            return
        i, option = at
        rest -= float(c[i][option] - c[i][chosen[i]])
        chosen[i] = option


def _by_sums(
    v: list[Tensor], c: list[Tensor], budget: float, price: float, known: float
) -> list[int] | None:
    """The options whose values add up to less than `known`; None if there are none."""
    bounds = [float((own + price * cost).min()) for own, cost in zip(v, c, strict=True)]
    least_costs = [float(cost.min()) for cost in c]
    rest, rest_cost = sum(bounds), sum(least_costs)
    slack = 1e-12 * max(abs(known), abs(budget * price))
    value, cost = torch.zeros(1, dtype=FLOAT), torch.zeros(1, dtype=FLOAT)
    steps: list[tuple[Tensor, int]] = []
    for i, (own, its) in enumerate(zip(v, c, strict=True)):
        rest, rest_cost = rest - bounds[i], rest_cost - least_costs[i]
        values = (value[:, None] + own).flatten()
        costs = (cost[:, None] + its).flatten()
        bound = values + price * (costs - budget) + rest
        left = ((bound < known + slack) & (costs + rest_cost <= budget)).nonzero().flatten()
        left = left[_undominated(values[left], costs[left])]
        if len(left) > MOST:
            left = _thinned(left, costs)
        value, cost = values[left], costs[left]
        steps.append((left, len(own)))
    if not len(value) or not float(value.min()) < known:
        return None
    at, chosen = int(_first_least(value, cost)), []
    for left, options in reversed(steps):
        at, option = divmod(int(left[at]), options)
        chosen.append(option)
    return chosen[::-1]


def _undominated(values: Tensor, costs: Tensor) -> Tensor:
    """The numbers of the sums that no other one beats in both, by rising cost."""
    order = values.argsort(stable=True)
    order = order[costs[order].argsort(stable=True)]
    sorted_values = values[order]
    before = torch.cat([sorted_values.new_full((1,), torch.inf), sorted_values.cummin(0)[0]])[:-1]
    return order[sorted_values < before]


def _thinned(left: Tensor, costs: Tensor) -> Tensor:
    """One of each few sums with almost the same cost: the last, which has the least value. `left` is sorted by cost."""
    own = costs[left]
    bins = ((own - own[0]) * (1e6 / max(float(own[-1] - own[0]), 1e-300))).long()
    return left[torch.cat([bins[1:] != bins[:-1], bins.new_ones(1, dtype=torch.bool)])]
