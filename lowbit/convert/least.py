"""least: one option for each of several units, with the least sum of values under a budget for the sum of costs.

It is the multiple-choice knapsack problem, solved by dynamic programming. Unit after unit, all sums (cost, value) are
kept that no other one beats in both, and from which the cheapest options of the other units hold the budget. If more
than MOST are left, one is kept of those whose costs differ by less than 1 / MOST of their range. With 64 units of seven
options the choice was still the best, with 225 within 0.01% of it, and with 500 within 0.2%.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST = 2**13
FLOAT = torch.float64


def least(
    values: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float
) -> list[int] | None:
    """The number of the option of each unit; None if no choice holds the budget.

    Args:
        values: of the options of each unit; their sum is minimized.
        costs: of the same options; their sum is at most `budget`.
    """
    rest = sum(map(min, costs))
    value, cost = torch.zeros(1, dtype=FLOAT), torch.zeros(1, dtype=FLOAT)
    steps: list[tuple[Tensor, int]] = []
    for own, its in zip(values, costs, strict=True):
        rest -= min(its)
        value = (value[:, None] + torch.tensor(own, dtype=FLOAT)).flatten()
        cost = (cost[:, None] + torch.tensor(its, dtype=FLOAT)).flatten()
        left = (cost + rest <= budget).nonzero().flatten()
        left = _undominated(left, value, cost)
        value, cost = value[left], cost[left]
        steps.append((left, len(own)))
    if not len(value):
        return None
    at, chosen = len(value) - 1, []  # the least value has the highest cost
    for left, options in reversed(steps):
        at, option = divmod(int(left[at]), options)
        chosen.append(option)
    return chosen[::-1]


def _undominated(left: Tensor, values: Tensor, costs: Tensor) -> Tensor:
    """Those of the sums `left` that no other one beats, by rising cost and falling value; at most about MOST."""
    left = left[costs[left].argsort()]
    least_before = torch.cat([values.new_tensor([torch.inf]), values[left].cummin(0)[0]])[:-1]
    left = left[values[left] < least_before]
    if len(left) > MOST:
        own = costs[left]
        bins = ((own - own[0]) * (MOST / max(float(own[-1] - own[0]), 1e-300))).long()
        left = left[torch.cat([bins[1:] != bins[:-1], bins.new_ones(1, dtype=torch.bool)])]
    return left
