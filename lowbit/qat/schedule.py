"""Schedules of QAT: begin after some steps, freeze observers.

    schedule = qat.Schedule(model, start=100)
    schedule = qat.Schedule(model, freeze_observers=50)
    for batch in batches:
        ...
        optimizer.step()
        schedule.step()

A stage changes what the prepared weights do, in place. Weights, optimizer and its states stay. torch.compile makes one
graph for each stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from lowbit import optional
from lowbit.calibration import Calibration, prepared_layers
from lowbit.numerics.settings import check_whole
from lowbit.qat.switch import change, prepared_weights
from lowbit.tracing.observer import Method, all_ranks, check_method


class Stage(NamedTuple):
    """What holds at a step."""

    on: bool
    observed: bool


def checked_steps(start: Any, freeze_observers: Any) -> tuple[int, int | None]:
    """Both as numbers of steps. Raises ValueError for anything that `Schedule` does not take."""
    first = check_whole("start", start, least=0)
    if freeze_observers is None:
        return first, None
    return first, check_whole("freeze_observers", freeze_observers, least=0)


class Schedule:
    """Changes a prepared model at given steps. Make it directly after `prepare_`.

    Args:
        model: prepared by `lowbit.qat.prepare_`; it may be sharded or compiled later.
        start: how many optimizer steps run without fake quantization, as the plain model.
        freeze_observers: how many steps observe the inputs of layers with a static activation, which products then take
            unrounded. After the last of them the scales are set, the same on all ranks, from the batches in train mode,
            as `lowbit.calibrate` does. Training goes on with them, or trains them on where they are learned. None: the
            schedule leaves them alone.
        method: how observers choose a range, as for `lowbit.calibrate`.

    While it observes, the state dict of the model has the observers. So a training that is stopped there continues.
    DistributedDataParallel needs find_unused_parameters=True where scales are learned: they have no gradients before
    `start`, and, those of inputs, while observers see them.

    Raises:
        TypeError: `model` is not a module.
        ValueError: nothing is prepared; a step out of range; an unknown `method`, or one without `freeze_observers`;
            `freeze_observers` without a static activation, or, at its last step, a layer that saw no batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: int = 0,
        freeze_observers: int | None = None,
        method: Method = "squared_error",
    ) -> None:
        self.model = model
        self.start, self.freeze_observers = checked_steps(start, freeze_observers)
        self._method: Method = method
        self._calibration: Calibration | None = None
        self.steps = 0
        self._check()
        self._stage: Stage | None = None
        self._apply()

    def _check(self) -> None:
        check_method(self._method)
        if self.freeze_observers is not None:
            prepared_layers(self.model)
        elif self._method != "squared_error":
            raise ValueError(
                f"method={self._method!r} is for observers, and without freeze_observers there are none; give the "
                "number of steps in which they observe, or leave method out"
            )

    def step(self) -> None:
        """Count one optimizer step. Call it after `optimizer.step()`, on every rank."""
        self.steps += 1
        self._apply()

    def stage(self, steps: int) -> Stage:
        """What holds after this many steps."""
        observed = self.freeze_observers is not None and steps < self.freeze_observers
        return Stage(steps >= self.start, observed)

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

        if before is None or before.on != stage.on:  # else the user's own choice stays
            weights = prepared_weights(self.model)
            change(self.model, weights, lambda fqn, weight: weight.switch(stage.on, stage.on))
        self._observe(stage.observed)

    def finish_observers(self) -> None:
        """Set the scales of inputs from what the observers saw up to now, if they still observe. Every rank calls
        it."""
        self._observe(False)

    def _observe(self, observed: bool) -> None:
        if observed and self._calibration is None:
            self._calibration = Calibration.of_training(self.model, self._method)
        elif not observed and self._calibration is not None:
            calibration, self._calibration = self._calibration, None
            try:
                calibration.finish(all_ranks(), keep=True)
            finally:
                calibration.remove()
