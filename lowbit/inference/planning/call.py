"""autoquant: a plan for a model, by the damage and the time of each choice.

plan = lowbit.autoquant(model, batches, bits=4)                              # least damage
plan = lowbit.autoquant(model, batches, damage=0.01, timed=[(ids[:1, :1], 256)])   # least time
lowbit.quantize_(model, plan)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from lowbit.convert import Costs, Filter, Plan, PlanChoice, Schemes, budget_of, check_module
from lowbit.convert.plan import shown
from lowbit.inference.calibration.batches import as_list
from lowbit.inference.planning.clock import Clock, in_turns
from lowbit.inference.planning.fisher import estimated
from lowbit.inference.planning.units import Option, Unit, units_of, whole
from lowbit.numerics.search import Scales, check_scales
from lowbit.numerics.settings import check_flag, check_nonnegative
from lowbit.progress import progress
from lowbit.schemes.presets import Int4WeightOnly, Int8WeightOnly, IntxWeightOnly
from lowbit.tracing.batches import on_device_of
from lowbit.tracing.damage import Changed, Measure, damages

SCHEMES = (
    *(IntxWeightOnly(bits, 32) for bits in (2, 3)),
    *(Int4WeightOnly(32), Int4WeightOnly(128), IntxWeightOnly(6, 128), Int8WeightOnly()),
)
"""What weights choose among, besides high precision, where the user gives no schemes."""
_ROUNDS = 8
"""Plans that are measured to meet a budget of damage."""
_KEPT = 2**32
"""Bytes of plain weights up to which all quantized ones are kept in memory while they are measured."""
_NEAR = 0.97
"""A plan that takes this share of the budget is good enough."""
_WORTH = 0.98
"""A plan of several schemes takes at most this share of a single scheme's time. Two copies of a model, at other
addresses, differ by up to 2%."""


def autoquant(
    model: nn.Module,
    batches: Iterable[Any],
    schemes: Sequence[Schemes] | Costs | None = None,
    filter_fn: Filter | None = None,
    *,
    bits: float | None = None,
    damage: float | None = None,
    milliseconds: float | None = None,
    timed: Iterable[tuple[Any, float]] = (),
    held_out: Iterable[Any] | None = None,
    scales: Scales | None = None,
    loss: Measure = "kl",
    estimate: bool = False,
) -> Plan:
    """Choose a scheme for each weight of `model` under one budget, and measure the plan. The model stays as it is.

        plan = lowbit.autoquant(model, batches, bits=4, held_out=others)
        print(plan)
        plan.save("plan.json")
        lowbit.quantize_(model, plan)       # or calibrate(model, plan, batches), qat.prepare_(model, plan)

    Each unit is rounded alone by each scheme, as `lowbit.quantize_` rounds it, which takes one pass over the batches. A
    unit is a weight; siblings that multiply one input (q, k and v; gate and up; `lowbit.register_siblings`), so that
    one launch may serve them; or the stacked experts of a module. Damages and times of units are added up, and
    `lowbit.convert.least` finds the best choice. Then the whole plan is measured. For a budget of damage this is
    repeated, until what the whole plan loses on the held-out batches meets the budget. With `timed` the whole model
    then runs by the plan and by the fastest single scheme that meets the budget, in turns. The single scheme is
    returned unless the plan takes at least 2% less time.

    Args:
        model: a plain model.
        batches: each is a mapping of keyword arguments, a tuple or list of arguments, or one argument of the model, on
            any device. Read once, and kept.
        schemes: the schemes or dicts of patterns to choose among; high precision is always a choice. None: 2, 3, 4, 6
            and 8 bits. Or the `costs` of an earlier plan, which are then not measured again; only whole models are
            timed then.
        filter_fn: that of `lowbit.quantize_`. None takes embeddings, too.
        bits: at most so many bits a weight on average, scales included; the damage is the least.
        damage: at most this damage, of the whole plan on `held_out`; the time is the least, or without `timed` the
            bytes.
        milliseconds: at most this time of the modules that hold the weights; the damage is the least.
        timed: batches whose products are timed on this machine, and how often each counts, e.g.
            `[(ids[:1, :512], 1), (ids[:1, :1], 256)]` for 256 tokens after a prompt of 512
            (`lowbit.inference.planning.clock`).
        held_out: batches that measure the whole plan; None: `batches`.
        scales: that of `lowbit.quantize_`, with which the damage is measured.
        loss: the measure of damage. "kl": the divergence of the logits, in nats a row. "error": ‖y − ŷ‖² / ‖y‖² of the
            output y. A function: the scalar that `loss(model, batch)` gives. None: the output's `loss` where it has
            one, else "kl" of its `logits`, else "error".
        estimate: True estimates the damage of units by gradients, in one forward and backward pass a batch for all of
            them together, for large models (`lowbit.inference.planning.fisher`).

    Returns:
        The plan, with its figures, and the `costs` from which other budgets make other plans.

    Raises:
        TypeError: not exactly one budget; a model, scheme or loss of another kind; one batch in place of a list.
        NotImplementedError: a scheme with a static activation.
        ValueError: nothing holds the budget; no batches; what `lowbit.quantize_` refuses.
    """
    check_module(model)
    name, budget = budget_of(bits=bits, damage=damage, milliseconds=milliseconds)
    check_scales(scales)
    check_flag("estimate", estimate)
    if not (loss is None or loss in ("kl", "error") or callable(loss)):
        raise TypeError(f"loss must be 'kl', 'error', a function or None, got {loss!r}")
    seen = [on_device_of(model, batch) for batch in as_list(batches)]
    moved = [(on_device_of(model, batch), count) for batch, count in _pairs(timed)]
    if isinstance(schemes, Costs):
        costs = schemes
    else:
        given: Any = SCHEMES if schemes is None else schemes
        candidates = list(given) if isinstance(given, list | tuple) else []
        if not candidates:
            raise ValueError(
                f"schemes must be a list of one Scheme or more, such as [Int4WeightOnly()], got {schemes!r}"
            )
        units = units_of(model, candidates, filter_fn, scales)
        lost, measure = _damages(model, seen, units, loss, estimate)
        lost = _scaled(model, seen, units, lost, loss)
        times = _times(model, moved, units)
        costs = _costs(units, lost, times, measure)
    if name == "milliseconds" or not costs.timed:
        costs.plan(**{name: budget})  # raises before anything is measured
    if held_out is not None:
        seen = [on_device_of(model, batch) for batch in as_list(held_out, "held_out")]

    def changed(plan: Plan) -> Changed:
        """Gives the context in which the model is rounded by the plan."""
        if all(scheme is None for scheme in plan.values()):
            return nullcontext
        return whole(model, plan, filter_fn, scales).changed()

    def measured(plan: Plan) -> Plan:
        """The plan, with what the model loses by it."""
        plan.measured = damages(model, seen, [changed(plan)], loss).added[0]
        return plan

    def whole_times(plan: Plan, single: Plan) -> tuple[float, float]:
        """The times of the whole model by the two."""
        own, other = in_turns(model, moved, [changed(plan), changed(single)])
        return own, other

    return _found(measured, whole_times if moved else None, costs, name, budget)


def _pairs(timed: Any) -> list[tuple[Any, float]]:
    """`timed` as a list of pairs. Raises TypeError for anything else."""
    pairs = list(timed) if isinstance(timed, Iterable) else [timed]
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                "timed must be a list of pairs of a batch and how often it counts, such as [(ids, 1)], got "
                f"{type(pair).__name__}"
            )
        check_nonnegative("a count of timed", pair[1])
    return pairs


def _damages(
    model: nn.Module, batches: list[Any], units: list[Unit], loss: Measure, estimate: bool
) -> tuple[list[list[float]], str]:
    """What each option of each unit costs, and the measure."""
    if estimate:
        if loss != "kl":
            raise ValueError(f"estimate=True estimates loss='kl', got {loss!r}")
        with progress("estimating weights", len(batches), unit="batches") as advance:
            return estimated(model, batches, units, lambda: advance(1)), "kl"
    keep = sum(t.weight.nbytes for unit in units for t in unit.weights.values()) <= _KEPT
    contexts = [option.changed(keep) for unit in units for option in unit.options[1:]]
    total = len(contexts) * operator.length_hint(batches)
    with progress("measuring weights", total, unit="passes") as advance:
        found = damages(model, batches, contexts, loss, passed=lambda: advance(1))
    added = iter(found.added)
    return [[0.0, *(next(added) for _ in unit.options[1:])] for unit in units], found.measure


def _scaled(
    model: nn.Module, batches: list[Any], units: list[Unit], lost: list[list[float]], loss: Measure
) -> list[list[float]]:
    """The damages, scaled so that those of each scheme add up to that of the model with all units rounded by it."""
    schemes = {unit.uniform(i): None for unit in units for i in range(1, len(unit.options))}
    known = [s for s in schemes if s is not None]
    taken = [
        [
            (u, i)
            for u, unit in enumerate(units)
            for i in range(len(unit.options))
            if unit.uniform(i) == s
        ]
        for s in known
    ]
    scaled = [list(own) for own in lost]
    for own in taken:
        options = [units[u].options[i] for u, i in own]
        # No name holds the quantized model, so that it is freed before the next one is made.
        (together,) = damages(model, batches, [_together(options)], loss).added
        alone = sum(lost[u][i] for u, i in own)
        if alone > 0 and 0 < together < math.inf:
            for u, i in own:
                scaled[u][i] *= together / alone
    return scaled


def _together(options: list[Option]) -> Changed:
    """Gives the context in which these units are rounded."""
    targets = tuple(t for option in options for t in option.targets)
    return Option(targets, (), options[0].scales).changed()


def _times(
    model: nn.Module, timed: list[tuple[Any, float]], units: list[Unit]
) -> list[list[float | None]]:
    """Milliseconds of each option of each unit; None without batches to time."""
    if not timed:
        return [[None] * len(unit.options) for unit in units]
    clock = Clock(model, timed, [module for unit in units for module in unit.modules])
    with progress("timing weights", len(units), unit="units") as advance:
        found: list[list[float | None]] = []
        for unit in units:
            found.append([clock.milliseconds(unit, option) for option in unit.options])
            advance(1)
    return found


def _costs(
    units: list[Unit], lost: list[list[float]], times: list[list[float | None]], measure: str
) -> Costs:
    for unit, own in zip(units, lost, strict=True):
        for option, damage in zip(unit.options, own, strict=True):
            if not math.isfinite(damage):
                raise ValueError(
                    f"{unit.name} in {next(iter(option.schemes.values()))} gives a damage of {damage}: the rounded "
                    "model overflows on a batch; leave the scheme out, or find the batch"
                )
    choices = [
        PlanChoice(unit.name, option.schemes, option.nbytes(), damage, time)
        for unit, damages, own in zip(units, lost, times, strict=True)
        for option, damage, time in zip(unit.options, damages, own, strict=True)
    ]
    elements = sum(t.weight.numel() for unit in units for t in unit.weights.values())
    return Costs(tuple(choices), elements, measure)


def _found(
    measured: Callable[[Plan], Plan],
    whole_times: Callable[[Plan, Plan], tuple[float, float]] | None,
    costs: Costs,
    name: str,
    budget: float,
) -> Plan:
    """The plan of `lowbit.autoquant`. `measured` measures a finished plan. `whole_times` gives the times of the model
    by two of them; None where there are no batches to time."""
    if name != "damage":
        return measured(costs.plan(**{name: budget}))
    single: Plan | None = None
    for uniform in sorted(costs.uniform(), key=_cost):
        if measured(uniform).measured <= budget:  # type: ignore[operator]
            single = uniform
            break
    best = single
    low, high, own, missed = 0.0, None, budget, 0
    for _ in range(_ROUNDS):
        found = measured(costs.plan(damage=own))
        assert found.measured is not None
        if found.measured <= budget:
            low, missed = own, 0
            if best is None or _cost(found) < _cost(best):
                best = found
            if found.measured >= _NEAR * budget or not any(found.values()):
                break
        else:
            high, missed = own, missed + 1
        share = budget / found.measured if found.measured > 0 else 2.0
        own *= share ** (1 + missed)  # large damages grow more slowly than their estimates
        if high is not None and not low < own < high:
            own = (low + high) / 2
    if best is None:
        best = measured(costs.plan(damage=0.0))
        best.why = f"no other plan that was measured loses at most {budget:.4g}"
        return best
    if single is None:
        best.why = f"no single scheme for all weights loses at most {budget:.4g}"
        return best
    name = _name(single)
    least = "takes the least time" if costs.timed else "takes the fewest bytes"
    if best is single or dict(best) == dict(single):
        best.why = f"{name}: of the plans that lose at most {budget:.4g} it {least}"
        return best
    best.why = (
        f"of the plans that lose at most {budget:.4g} it {least}; of single schemes that is {name}"
    )
    if costs.timed and whole_times is not None:
        own, other = whole_times(best, single)
        compared = f"the whole model takes {own:.4g} ms by the plan of several and {other:.4g} ms by {name}"
        best.why = single.why = (
            f"{compared}, the best single scheme that loses at most {budget:.4g}"
        )
        if own > _WORTH * other:
            single.why += "; at least 2% less time is needed to leave it"
            return single
    return best


def _name(single: Plan) -> str:
    """A single scheme in words."""
    scheme = next(iter(single.values()), None)
    return (
        "high precision for all weights" if scheme is None else f"{shown(scheme)} for all weights"
    )


def _cost(plan: Plan) -> tuple[float, float]:
    """What a plan under a budget of damage should have the least of."""
    bits = plan.bits or 0.0
    return (bits if plan.milliseconds is None else plan.milliseconds, bits)
