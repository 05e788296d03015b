"""Finished runs of the convergence recipe: a file with one JSON object a line."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from recipes import text
from recipes.command_line import UserError
from recipes.training import TrainingConfig

FIELDS = {
    *("run", "seed", "final_loss", "curve", "seconds", "device", "torch", "date", "settings"),
    "command",
}


def settings(config: TrainingConfig, data: text.Data) -> dict[str, Any]:
    """The values that compared runs must share: all settings except the seed, and the text."""
    values = dataclasses.asdict(config)
    unused = ("seed", "bits", "group_size", "sample_tokens", "save_every", "corpus")
    kept = {name: value for name, value in values.items() if name not in unused}
    return {
        **kept,
        "train_tokens": len(data.train),
        "first_tokens_sum": int(data.train[:100_000].sum()),
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """All finished runs, without a last line that was cut short. UserError for a file with other content."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or FIELDS - set(record):
            raise UserError(
                f"{path} holds something else than finished runs; give another --results"
            )
        records.append(record)
    return records


def append_result(path: Path, record: dict[str, Any]) -> None:
    """Add a line, also after one that was cut short. It is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def check_settings(records: list[dict[str, Any]], own: dict[str, Any], path: Path) -> None:
    """UserError when the file holds runs with other settings, which can't be compared."""
    wanted = json.loads(json.dumps(own))
    for record in records:
        found = record["settings"]
        for name in sorted({*wanted, *found}):
            if wanted.get(name) != found.get(name):
                raise UserError(
                    f"{path} holds a run with {name} {found.get(name)!r}, here it is {wanted.get(name)!r}; "
                    "give another --results, or the same settings and text"
                )
