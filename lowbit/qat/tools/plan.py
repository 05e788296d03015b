"""Plan: a scheme for each weight under a budget of bits, from what each scheme costs and loses.

The choice is greedy:

1. Every weight starts with the choice that takes the most bytes.
2. While the weights take more than the budget, one of them changes to a smaller choice: the change that adds the least
   loss for each byte that it saves. A change may skip choices in between.
3. The last change may save more than was needed. While changes back fit into the rest, the one that takes away the
   most loss for each byte is made.

Losses of weights are added up, as if the rounding of one did not change what that of another costs. The choice of
bits under this assumption is that of HAWQ-V3 (arXiv 2011.10680), which solves it as an integer program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lowbit.schemes.scheme import Scheme


@dataclass(frozen=True)
class Choice:
    """A scheme for one weight, or None to leave it as it is. `names`: of the weight, all of a tied one."""

    names: tuple[str, ...]
    scheme: Scheme | None
    nbytes: int
    loss: float


class Plan(dict[str, Scheme | None]):
    """Patterns to schemes, one for each weight: an argument of `lowbit.qat.prepare_` and `lowbit.quantize_`.

    Args:
        schemes: by the names of the weights.
        bits: mean bits an element of these weights, scales included.
        loss: the estimated addition to the measure.
    """

    def __init__(self, schemes: Mapping[str, Scheme | None], bits: float, loss: float) -> None:
        super().__init__(schemes)
        self.bits, self.loss = bits, loss


def choose(choices: list[Choice], elements: Mapping[str, int], bits: float) -> Plan:
    """The plan of the module. `elements`: of each weight, by its first name.

    Raises ValueError for a budget that the smallest choices exceed.
    """
    options: dict[str, list[Choice]] = {}
    for choice in choices:
        options.setdefault(choice.names[0], []).append(choice)
    count = sum(elements.values())
    budget = bits * count / 8
    least = sum(min(c.nbytes for c in own) for own in options.values())
    if not least <= budget:
        raise ValueError(
            f"a plan of {bits} bits an element: the smallest choices take {8 * least / max(count, 1):.3f}, scales "
            "included; accepted: that or more, or a report of schemes with fewer bits or larger groups"
        )
    taken = {name: max(own, key=lambda c: (c.nbytes, -c.loss)) for name, own in options.items()}
    while sum(c.nbytes for c in taken.values()) > budget:
        smaller = [c for name, own in options.items() for c in own if c.nbytes < taken[name].nbytes]
        best = min(smaller, key=lambda c: _rate(taken[c.names[0]], c))
        taken[best.names[0]] = best
    while True:
        rest = budget - sum(c.nbytes for c in taken.values())
        better = [
            c
            for name, own in options.items()
            for c in own
            if c.loss < taken[name].loss and c.nbytes - taken[name].nbytes <= rest
        ]
        if not better:
            break
        best = max(better, key=lambda c: _rate(c, taken[c.names[0]]))
        taken[best.names[0]] = best
    total = sum(c.nbytes for c in taken.values())
    schemes = {_pattern(c.names): c.scheme for c in taken.values()}
    return Plan(schemes, 8 * total / max(count, 1), sum(c.loss for c in taken.values()))


def _rate(larger: Choice, smaller: Choice) -> float:
    """Loss that the smaller choice adds for each byte that it saves; infinite where it saves none."""
    saved, added = larger.nbytes - smaller.nbytes, smaller.loss - larger.loss
    return added / saved if saved > 0 else float("inf")


def _pattern(names: tuple[str, ...]) -> str:
    """A pattern that matches these names and no others. A tied weight needs one, since a pattern that chooses no weight
    is refused, and the filter may select one of its modules only."""
    (first, *others) = names
    if not others and not set(first) & set("*?["):
        return first
    return "re:" + "|".join(map(re.escape, names))
