"""Quantization-aware training under the Trainer of Lightning.

    callback = lowbit.lightning.QATCallback(lowbit.Int4WeightOnly(32), start=100, bits={100: 8, 300: 4})
    lightning.Trainer(callbacks=[callback]).fit(module, data)               # module is in int4 afterwards

lowbit's optimizers, `lowbit.train.prepare_` and models of `lowbit.quantize_` need nothing of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback

from lowbit import qat
from lowbit.convert import Filter, Report, Schemes


class QATCallback(Callback):
    """Prepares the module before it makes its optimizers, runs a schedule, and converts when `fit` ends.

    Checkpoints hold the plain weights that are trained. A run that Lightning resumes continues the schedule.

    Args:
        scheme, filter_fn: as `lowbit.qat.prepare_` takes them.
        convert: whether the module is converted at the end of `fit`.
        start, bits, freeze_scales: as `lowbit.qat.Schedule` takes them. They count optimizer steps.
        options: further ones of `lowbit.qat.prepare_`.

    Attributes:
        report: that of `prepare_`, and after the end that of `convert_`; None before.
    """

    def __init__(
        self,
        scheme: Schemes,
        filter_fn: Filter | None = None,
        *,
        convert: bool = True,
        start: int = 0,
        bits: Mapping[int, int] | None = None,
        freeze_scales: int | None = None,
        **options: Any,
    ) -> None:
        self.scheme, self.filter_fn, self.convert = scheme, filter_fn, convert
        self._settings: dict[str, Any] = {
            "start": start,
            "bits": bits,
            "freeze_scales": freeze_scales,
        }
        self._options = options
        self.report: Report | None = None
        self._schedule: qat.Schedule | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare the module."""
        if stage != "fit":
            return
        if self._schedule is None or self._schedule.model is not pl_module:
            self.report = qat.prepare_(pl_module, self.scheme, self.filter_fn, **self._options)
            self._schedule = qat.Schedule(pl_module, **self._settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the schedule to the step that a resumed run begins with."""
        self._continue(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Continue the schedule."""
        self._continue(trainer)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Convert the module. Lightning has written its last checkpoint."""
        if self.convert:
            self.report = qat.convert_(pl_module)
            self._schedule = None

    def _continue(self, trainer: Any) -> None:
        assert self._schedule is not None
        self._schedule.load_state_dict({"steps": trainer.global_step})
