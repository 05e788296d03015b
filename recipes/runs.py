"""A run that can be interrupted and resumed: its folder, checkpoints, metrics, and Ctrl-C.

RUN/config.json            the settings
RUN/data/                  tokenizer and tokens (see text.py)
RUN/checkpoints/*.pt       one for each phase, with everything that training needs to go on
RUN/models/*.safetensors   the models of the report, written by lowbit.save
RUN/metrics.jsonl          one JSON object a line: every step, every probe, every result
RUN/report.md, report.html, *.png
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch

from lowbit import optional
from lowbit.files import new_path
from recipes import text
from recipes.command_line import UserError


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps its files."""

    path: Path

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def checkpoint(self, phase: str) -> Path:
        return self.path / "checkpoints" / f"{phase}.pt"

    def model(self, name: str) -> Path:
        return self.path / "models" / f"{name}.safetensors"

    def check_free(self) -> None:
        """UserError when the folder already holds something."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(
                f"--out {self.path} already exists; continue the run in it with --resume {self.path}, "
                "or give another --out"
            )

    def create(self, settings: dict[str, Any], data: text.Data) -> None:
        """Make the folder and write the inputs of a run. config.json comes last: with it the folder is a run."""
        self.check_free()
        for folder in (self.path, self.path / "checkpoints", self.path / "models"):
            folder.mkdir(parents=True, exist_ok=True)
        text.save(data, self.data)
        write_text(self.path / "config.json", json.dumps(settings, indent=2) + "\n")

    def settings(self) -> dict[str, Any]:
        """The settings that `create` wrote. UserError when there are none."""
        try:
            return json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.path} holds no run ({error}); name the folder that --out named"
            ) from error


def latest(parent: Path) -> RunFolder:
    """The newest run in `parent`. UserError when there is none."""
    found = sorted(parent.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(
            f"--resume: no run in {parent.resolve()}; name one, --resume DIR, or leave it out"
        )
    return RunFolder(found[-1].parent)


# ---- files that appear whole or not at all -----------------------------------------------------------------


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end."""
    with new_path.new_file(path) as temporary, temporary.open("xb") as file:
        yield file


def write_text(path: Path, content: str) -> None:
    with _replacement(path) as file:
        file.write(content.encode())


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """`torch.save` that keeps the old file until the new one is on the disk."""
    with _replacement(path) as file:
        torch.save(content, file)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The content that `save_checkpoint` wrote, on the CPU. UserError when the file is damaged or not a checkpoint."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not {"phase", "step", "model"} <= content.keys():
            raise ValueError("it is not a checkpoint of a recipe")
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} can't be read; it is truncated, damaged, or not a training checkpoint ({reason}). "
            "Delete it to run its phase again, or restore it"
        ) from error
    return content


# ---- metrics -----------------------------------------------------------------------------------------------


class Tracker:
    """Writes one JSON object a line to `metrics.jsonl`, and the same values to Weights & Biases unless disabled.

    `wandb_mode`: "offline", "online" or "disabled". UserError when wandb is asked for and can't start.
    """

    def __init__(self, folder: RunFolder, settings: dict[str, Any], wandb_mode: str) -> None:
        self.path = folder.metrics
        self._wandb = start_wandb(folder, settings, wandb_mode)
        self._file = self.path.open("a", encoding="utf-8")

    def drop(self, phase: str, after_step: float = -1) -> None:
        """Remove the records of `phase` that come after `after_step`, and any line that a crash cut short."""
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
        """Write the records to the disk, before a checkpoint that follows them."""
        self._file.flush()

    def log(self, phase: str, **values: Any) -> None:
        self._file.write(json.dumps({"phase": phase, **values}) + "\n")
        if self._wandb is not None:
            label = values.get("model", phase)
            numbers = {k: v for k, v in values.items() if isinstance(v, int | float)}
            step = {"step": numbers.pop("step")} if "step" in numbers else {}
            self._wandb.log({**{f"{label}/{k}": v for k, v in numbers.items()}, **step})

    def close(self, exit_code: int) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=exit_code)


def read_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """All records, in the order in which they were written."""
    with open(folder.metrics, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check_wandb(mode: str) -> None:
    """UserError when wandb can't work in this mode. Called before anything is written."""
    if mode == "disabled":
        return
    wandb = optional.imported("wandb", f"--wandb {mode} needs", "wandb", UserError)
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        raise UserError(
            "--wandb online needs a key: run `wandb login` or set WANDB_API_KEY; or use --wandb offline "
            "(keeps the records in the run folder) or --wandb disabled"
        )


def start_wandb(folder: RunFolder, settings: dict[str, Any], mode: str) -> Any:
    check_wandb(mode)
    if mode == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project="lowbit-quickstart",
            name=folder.path.name,
            group=folder.path.name,  # a resumed run is another wandb run of the same group
            dir=str(folder.path),
            config=settings,
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
    except Exception as error:  # wandb raises many kinds: usage, communication, authentication
        raise UserError(f"--wandb {mode}: wandb can't start ({error})") from error
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


class DelayedInterrupt:
    """While open, the first Ctrl-C sets `requested`, so that the step in progress can finish; the second one raises
    KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> DelayedInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nstopping after this step (Ctrl-C again: at once)\n")  # print may be in use
