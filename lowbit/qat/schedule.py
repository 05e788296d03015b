"""Schedules of QAT: begin after some steps, lower the bits in stages, freeze observers and learned scales.

    schedule = qat.Schedule(model, start=100, bits={100: 8, 300: 6, 500: 4})
    schedule = qat.Schedule(model, freeze_observers=50, freeze_scales=900)
    for batch in batches:
        ...
        optimizer.step()
        schedule.step()

A stage changes what the prepared weights do, in place. Weights, optimizer and its states stay. torch.compile makes one
graph for each stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from lowbit import optional
from lowbit.calibration import Calibration, prepared_layers
from lowbit.numerics.number_format import Int
from lowbit.qat.scales import learned_parameters
from lowbit.qat.switch import change, prepared_weights
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.regather import reshard
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import named_scales
from lowbit.tracing.observer import PERCENTILE, Method, all_ranks, check_range


class Stage(NamedTuple):
    """What holds at a step."""

    on: bool
    bits: int | None
    frozen: bool
    observed: bool


class Schedule:
    """Changes a prepared model at given steps. Make it directly after `prepare_`, which gives the final schemes.

    Args:
        model: prepared by `lowbit.qat.prepare_`; it may be sharded or compiled later.
        start: how many optimizer steps run without fake quantization, as the plain model.
        bits: step → bits of integer weights from that step on. No weight gets fewer bits than its scheme has, so that
            {0: 8, 400: 6, 800: 4} takes a model of int4 and int6 weights down in stages. The last entry must reach
            every scheme. Weights in float8 stay as they are.
        freeze_scales: how many steps train learned scales and zero points, those of inputs too. From then on they get
            no gradients, and those of weights follow them by the factors found. None: the schedule leaves them alone.
        freeze_observers: how many steps observe the inputs of layers with a static activation, which products then take
            unrounded. After the last of them the scales are set, the same on all ranks, from the batches in train mode,
            as `lowbit.calibrate` does. Training goes on with them, or trains them on where they are learned. None: the
            schedule leaves them alone.
        method, percentile: how observers choose a range, as for `lowbit.calibrate`.

    While it observes, the state dict of the model has the observers. So a training that is stopped there continues.
    DistributedDataParallel needs find_unused_parameters=True where scales are learned: they have no gradients before
    `start`, after `freeze_scales`, and, those of inputs, while observers see them.

    Raises:
        TypeError: `model` is not a module, or `bits` is not a mapping.
        ValueError: nothing is prepared; a step or a number of bits out of range; bits that do not reach the schemes, or
            with learned scales, which would no longer fit; `freeze_scales` without learned scales; an unknown `method`
            or an impossible `percentile`, or one without `freeze_observers`; `freeze_observers` without a static
            activation, or, at its last step, a layer that saw no batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: int = 0,
        bits: Mapping[int, int] | None = None,
        freeze_scales: int | None = None,
        freeze_observers: int | None = None,
        method: Method = "squared_error",
        percentile: float = 99.99,
    ) -> None:
        if bits is not None and not isinstance(bits, Mapping):
            raise TypeError(f"bits must map steps to bits, such as {{0: 8, 100: 4}}, got {bits!r}")
        self.model, self.start = model, start
        self.bits = dict(sorted((bits or {}).items()))
        self.freeze_scales, self.freeze_observers = freeze_scales, freeze_observers
        self._observers: dict[str, Any] = {"method": method, "percentile": percentile}
        self._calibration: Calibration | None = None
        self.steps = 0
        self._schemes = {fqn: w.scheme for fqn, w in prepared_weights(model).items()}
        self._check()
        self._stage: Stage | None = None
        self._apply()

    def _check(self) -> None:
        given = {
            "start": self.start,
            "freeze_scales": self.freeze_scales or 0,
            "freeze_observers": self.freeze_observers or 0,
        }
        given |= {f"the step of bits={self.bits}": step for step in self.bits}
        for name, step in given.items():
            if not isinstance(step, int) or step < 0:
                raise ValueError(f"{name} must be a number of steps, 0 or more, got {step!r}")
        check_range(**self._observers)
        if self.freeze_observers is not None:
            prepared_layers(self.model)
        elif self._observers != {"method": "squared_error", "percentile": PERCENTILE}:
            raise ValueError(
                f"{self._observers} are for observers, and without freeze_observers there are none; give the number of "
                "steps in which they observe, or leave method and percentile out"
            )
        if self.freeze_scales is not None and not learned_parameters(self.model):
            raise ValueError(
                f"freeze_scales={self.freeze_scales}, but no scale is learned; accepted: a model prepared with "
                "scales='learned', or no freeze_scales"
            )
        if not self.bits:
            return
        for count in self.bits.values():
            if not isinstance(count, int) or not 1 <= count <= 8:
                raise ValueError(f"bits={self.bits}; accepted: step → 1 to 8 bits")
        own = {fqn: _bits(s) for fqn, s in self._schemes.items() if _bits(s) is not None}
        if not own:
            raise ValueError(f"bits={self.bits}, but no prepared weight is in integers")
        last = list(self.bits.values())[-1]
        least = min(own, key=lambda fqn: own[fqn] or 0)
        if last > (own[least] or 0):
            raise ValueError(
                f"bits={self.bits} end at {last}, and {least} is prepared for {own[least]} bits, which convert_ would "
                f"not reach; accepted: a last stage of {own[least]} bits or fewer"
            )
        if learned := list(named_scales(self.model)):
            raise ValueError(
                f"bits with learned scales ({learned[0]}), which belong to one number of bits; accepted: a model that "
                "is prepared without them, or no bits"
            )

    def step(self) -> None:
        """Count one optimizer step. Call it after `optimizer.step()`, on every rank."""
        self.steps += 1
        self._apply()

    def stage(self, steps: int) -> Stage:
        """What holds after this many steps."""
        reached = [count for step, count in self.bits.items() if step <= steps]
        frozen = self.freeze_scales is not None and steps >= self.freeze_scales
        observed = self.freeze_observers is not None and steps < self.freeze_observers
        return Stage(steps >= self.start, reached[-1] if reached else None, frozen, observed)

    def state_dict(self) -> dict[str, Any]:
        """{"steps": int}. The settings are those of the constructor; observers are in the state dict of the model."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the steps of another schedule.

        Raises ValueError for anything but what `state_dict` gives.
        """
        steps = state.get("steps")
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(
                f"{dict(state)!r} is not a state of a Schedule; accepted: {{'steps': n}}"
            )
        self.steps = steps
        self._apply()

    def callback(self) -> Any:
        """A TrainerCallback of transformers, `Trainer(callbacks=[schedule.callback()])`. The Trainer's own count of
        steps decides, so a training that it resumes continues the schedule."""
        transformers = optional.imported("transformers", "Schedule.callback needs", "hf")
        schedule = self

        class ScheduleCallback(transformers.TrainerCallback):  # type: ignore[name-defined]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                schedule.load_state_dict({"steps": state.global_step})

            on_step_end = on_train_begin

        return ScheduleCallback()

    # ---- the changes ---------------------------------------------------------------------------------------------

    def _apply(self) -> None:
        stage = self.stage(self.steps)
        if stage == self._stage:
            return
        before, self._stage = self._stage, stage

        def assign(fqn: str, weight: FakeQuantizedTensor) -> None:
            if fqn in self._schemes:
                weight.scheme = _with_bits(self._schemes[fqn], stage.bits)
                if before is None or before.on != stage.on:  # else the user's own choice stays
                    weight.switch(stage.on, stage.on)

        change(self.model, prepared_weights(self.model), assign)
        self._observe(stage.observed)
        if self.freeze_scales is not None:
            _freeze(self.model, stage.frozen)

    def finish_observers(self) -> None:
        """Set the scales of inputs from what the observers saw up to now, if they still observe. Every rank calls
        it."""
        self._observe(False)

    def _observe(self, observed: bool) -> None:
        if observed and self._calibration is None:
            self._calibration = Calibration.of_training(self.model, **self._observers)
        elif not observed and self._calibration is not None:
            calibration, self._calibration = self._calibration, None
            try:
                calibration.finish(all_ranks(), keep=True)
            finally:
                calibration.remove()


def _bits(scheme: Scheme) -> int | None:
    return scheme.weight.format.bits if isinstance(scheme.weight.format, Int) else None


def _with_bits(scheme: Scheme, bits: int | None) -> Scheme:
    """The scheme with `bits` for the weight, where it has fewer."""
    own = scheme.weight.format
    if not isinstance(own, Int) or bits is None or bits <= own.bits:
        return scheme
    return replace(scheme, weight=replace(scheme.weight, format=replace(own, bits=bits)))


def _freeze(model: nn.Module, frozen: bool) -> None:
    reshard(model)  # an optimizer holds the shards; FSDP2 passes on whether they need a gradient
    for param in learned_parameters(model).values():
        param.requires_grad_(not frozen)
        if frozen:
            param.grad = None  # an optimizer would use it again
