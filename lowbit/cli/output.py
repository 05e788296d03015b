"""The output of commands: tables for people, JSON for programs, pictures."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from lowbit import optional
from lowbit.files import new_path

_PICTURES = (".png", ".svg", ".pdf")
_WIDE = 10_000
"""Columns of a table, so that nothing is cut off. A narrower terminal wraps the lines."""


def print_json(content: Any) -> None:
    """Print `content` as JSON, which has no infinite numbers and no NaN: they become null."""
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. The first column is text; each other column is aligned as numbers if all of its entries are."""
    if title:
        typer.echo(title)
    options: dict[str, Any] = {"box": None, "pad_edge": False, "show_header": any(header)}
    table = Table(header_style="bold", **options)
    lines = list(rows)
    for i, name in enumerate(header):
        numbers = i > 0 and all(line[i][:1] in _NUMBERS for line in lines)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    if sys.stdout is not None:  # the caller may have closed it
        Console(width=_WIDE, highlight=False, markup=False).print(table)


_NUMBERS = {*"0123456789-<∞", ""}


def size(nbytes: float) -> str:
    """Bytes for people: 512 B, 3.4 MB, 16.1 GB, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0.0%"


def decibel(snr: float | None) -> str:
    """A signal-to-noise ratio: "21.3 dB"; "∞" if nothing was lost; "" for None."""
    if snr is None:
        return ""
    return f"{snr:.1f} dB" if math.isfinite(snr) else "∞"


def check_picture(path: Path | None) -> None:
    """Raise, before the work begins, if a picture cannot be drawn or written.

    Raises ImportError without matplotlib, and ValueError for another suffix or a folder that is missing.
    """
    if path is None:
        return
    if path.suffix not in _PICTURES:
        raise ValueError(
            f"--picture {path}: the suffix is {path.suffix!r}; accepted: {', '.join(_PICTURES)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"--picture {path}: {path.parent} is not a folder; make it first")
    optional.imported("matplotlib", "--picture needs", "cli")


def save_picture(figure: Any, path: Path) -> None:
    """Write a matplotlib figure. The file appears whole or not at all. Raises ValueError if it cannot be written."""
    try:
        with new_path.new_file(path) as file:
            figure.savefig(file, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
