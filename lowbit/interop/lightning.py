"""Quantization-aware training under the Trainer of Lightning.

    callback = lowbit.lightning.QATCallback(lowbit.Int4WeightOnly(32), start=100)
    lightning.Trainer(callbacks=[callback]).fit(module, data)               # module is in int4 afterwards

lowbit's optimizers, `lowbit.train.prepare_` and models of `lowbit.quantize_` do not need this module.
"""

from __future__ import annotations

from typing import Any

from lowbit import optional
from lowbit.qat.run import QATRun

optional.imported("lightning", "lowbit.lightning needs", "lightning")
from lightning.pytorch import Callback  # noqa: E402


class QATCallback(QATRun, Callback):
    """Prepares the module before its optimizers are made, runs a schedule, and converts when `fit` ends.

    Checkpoints hold the plain weights that are trained. A run that Lightning resumes continues the schedule. The
    arguments are those of `lowbit.qat.run.QATRun`: `scheme`, `filter_fn`, `convert`, `start`, `freeze_observers`
    and further ones of `prepare_`. `report` is that of `prepare_`, and after the end that of `convert_`.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and not self.prepared(pl_module):
            self.prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the schedule to the step that a resumed run begins with."""
        self.follow(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.follow(trainer.global_step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Convert the module. Lightning has written its last checkpoint."""
        self.finish(pl_module)
