"""QAT of one training run, as the callbacks of trainers do it: prepare, follow a schedule, convert."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from lowbit.convert import Filter, Report, Schemes, check_schemes
from lowbit.numerics.settings import check_flag
from lowbit.qat.qat import convert_, prepare_
from lowbit.qat.schedule import Schedule, checked_steps
from lowbit.schemes.scheme import Scheme


class QATRun:
    """The part that all callbacks share.

    Args:
        scheme, filter_fn: as `lowbit.qat.prepare_` takes them.
        convert: whether the model is converted when the training ends.
        start, freeze_observers: as `lowbit.qat.Schedule` takes them. They count optimizer steps.
        options: further ones of `lowbit.qat.prepare_`.

    Raises TypeError and ValueError for other values of these, except of `options`, which `prepare_` checks.

    Attributes:
        report: that of `prepare_`, and after the end that of `convert_`; None before.
        schedule: the `lowbit.qat.Schedule` of a prepared model; None before, and after the conversion.
    """

    def __init__(
        self,
        scheme: Schemes,
        filter_fn: Filter | None = None,
        *,
        convert: bool = True,
        start: int = 0,
        freeze_observers: int | None = None,
        **options: Any,
    ) -> None:
        check_flag("convert", convert)
        self._start, self._freeze_observers = checked_steps(start, freeze_observers)
        if scheme is not None:  # those of weights that are in low bits already
            check_schemes(scheme, Scheme)
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(
                f"filter_fn must be a function of a module and its name, or None, got {filter_fn!r}"
            )
        self.scheme, self.filter_fn, self.convert = scheme, filter_fn, convert
        self._options = options
        self.report: Report | None = None
        self.schedule: Schedule | None = None

    def prepared(self, model: nn.Module) -> bool:
        """True if this run prepared `model`, and has not converted it."""
        return self.schedule is not None and self.schedule.model is model

    def prepare(self, model: nn.Module) -> None:
        self.report = prepare_(model, self.scheme, self.filter_fn, **self._options)
        self.schedule = Schedule(model, start=self._start, freeze_observers=self._freeze_observers)

    def follow(self, steps: int) -> None:
        """Set the schedule to this many optimizer steps."""
        assert self.schedule is not None
        self.schedule.load_state_dict({"steps": steps})

    def finish(self, model: nn.Module) -> None:
        """Convert the model, if the run does so. A training that ended before `freeze_observers` sets scales first.

        Warns if it ended by `start`, so that no step had fake quantization.
        """
        assert self.schedule is not None
        steps = self.schedule.state_dict()["steps"]
        if 0 < steps <= self._start:
            warnings.warn(
                f"the training ended after {steps} steps, and fake quantization begins after start={self._start}: no "
                "step trained rounded weights; give a smaller start, or train longer",
                stacklevel=2,
            )
        if self.convert:
            self.schedule.finish_observers()
            self.report = convert_(model)
            self.schedule = None
