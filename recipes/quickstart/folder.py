"""The run folder, and training checkpoints that appear whole or not at all.

RUN/config.json            the settings, as JSON
RUN/data/                  tokenizer and tokens (see data.py)
RUN/checkpoints/*.pt       one per phase, with everything that training needs to go on
RUN/models/*.safetensors   what is reported on, written by lowbit.save
RUN/metrics.jsonl          one JSON object a line: every step, every probe, every result
RUN/report.md, report.html, *.png
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from recipes.quickstart.config import QuickstartConfig, UserError, from_json, to_json
from recipes.quickstart.data import Data
from recipes.quickstart.data import save as save_data


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

    def create(self, config: QuickstartConfig, data: Data) -> None:
        """Make the folder and keep what a run starts from; config.json, written last, makes it one."""
        self.check_free()
        for folder in (self.path, self.path / "checkpoints", self.path / "models"):
            folder.mkdir(parents=True, exist_ok=True)
        save_data(data, self.data)
        write_text(self.path / "config.json", to_json(config))

    def config(self) -> QuickstartConfig:
        """The settings of the run in this folder. UserError when there is none."""
        path = self.path / "config.json"
        try:
            return from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{self.path} holds no run ({error}); give --resume the folder that --out named"
            ) from error


def latest(parent: Path) -> RunFolder:
    """The run in `parent` whose settings were written last. UserError when there is none."""
    found = sorted(parent.glob("*/config.json"), key=lambda p: p.stat().st_mtime)
    if not found:
        raise UserError(
            f"--resume: no run in {parent.resolve()}; name one, --resume DIR, or leave it out"
        )
    return RunFolder(found[-1].parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all."""
    with _replacement(path) as file:
        file.write(text.encode())


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """`torch.save` that leaves the old file in place until the new one is whole and on the disk."""
    with _replacement(path) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at the end. Nobody can foresee its name and put a link there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote, on the CPU. UserError when it can't be read or isn't one."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not {"phase", "step", "model"} <= content.keys():
            raise ValueError("it is not a checkpoint of the quick start")
    except Exception as error:  # torch.load raises many kinds for a damaged file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} can't be read; it is truncated, damaged, or not a training checkpoint ({reason}). "
            "Delete it to run its phase again, or restore it"
        ) from error
    return content
