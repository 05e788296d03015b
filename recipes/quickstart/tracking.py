"""metrics.jsonl, and Weights & Biases beside it for who wants it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from typing import Any

from recipes.quickstart.config import QuickstartConfig, UserError
from recipes.quickstart.folder import RunFolder, write_text

WANDB_MODES = ("offline", "online", "disabled")
WAY_OUT = "use --wandb offline (keeps the records in the run folder) or --wandb disabled"


class Tracker:
    """Writes one JSON object a line to `metrics.jsonl`, and the same values to wandb unless disabled.

    UserError when wandb is asked for and missing, has no key, or can't start.
    """

    def __init__(self, folder: RunFolder, config: QuickstartConfig, mode: str) -> None:
        self.path = folder.metrics
        self._wandb = None if mode == "disabled" else _start_wandb(folder, config, mode)
        self._file = self.path.open("a", encoding="utf-8")

    def drop(self, phase: str, after_step: float) -> None:
        """Take out the records of `phase` that come after `after_step`, and any line cut short by a crash."""
        self._file.close()
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["phase"] != phase or record.get("step", math.inf) <= after_step:
                kept.append(line + "\n")
        write_text(self.path, "".join(kept))
        self._file = self.path.open("a", encoding="utf-8")

    def flush(self) -> None:
        """Write out all records so far, as a checkpoint does with what it stands for."""
        self._file.flush()

    def log(self, phase: str, **values: Any) -> None:
        self._file.write(json.dumps({"phase": phase, **values}) + "\n")
        if self._wandb is not None:
            label = values.get("model", phase)
            numbers = {
                k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"
            }
            step = {"step": values["step"]} if "step" in values else {}
            self._wandb.log({**{f"{label}/{k}": v for k, v in numbers.items()}, **step})

    def close(self, exit_code: int) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)


def check_wandb(mode: str) -> None:
    """UserError when wandb in this mode can't work, before anything is written."""
    if mode == "disabled":
        return
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            f"--wandb {mode} needs the wandb package: pip install wandb; or leave --wandb out"
        ) from error
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        raise UserError(
            "--wandb online needs a key: run `wandb login` or set WANDB_API_KEY; or " + WAY_OUT
        )


def _start_wandb(folder: RunFolder, config: QuickstartConfig, mode: str) -> Any:
    check_wandb(mode)
    import wandb

    try:
        run = wandb.init(
            project="lowbit-quickstart",
            name=folder.path.name,
            group=folder.path.name,  # a resumed run is another run of the group
            dir=str(folder.path),
            config=asdict(config),
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
    except (
        Exception
    ) as error:  # UsageError, CommError, AuthenticationError, and those of its service
        raise UserError(f"--wandb {mode}: wandb can't start ({error}); {WAY_OUT}") from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """All records, in the order in which they were written."""
    with open(folder.metrics, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
