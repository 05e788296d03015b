"""`lowbit inspect`: what a folder holds, and how near its weights are to the original."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from torch import Tensor

from lowbit.cli.language_model import check
from lowbit.cli.output import decibel, percent, print_json, print_table, size
from lowbit.formats.base import FormatError
from lowbit.formats.folder import Folder
from lowbit.formats.gguf.file import GgufFile
from lowbit.formats.gguf.format import Gguf
from lowbit.numerics.snr import snr
from lowbit.progress import progress
from lowbit.tensor.core.base import LowbitTensor


@dataclass(frozen=True)
class StoredWeight:
    """A tensor of the folder. `stored_as`: the scheme or the dtype. `snr_db`: None without an original."""

    name: str
    shape: tuple[int, ...]
    stored_as: str
    low_bit: bool
    nbytes: int
    snr_db: float | None


def inspect(model: Path, against: Path | None, json: bool) -> None:
    """The command `inspect`. Args: those of `lowbit.cli.app.inspect`."""
    folder = check(model)
    original = None if against is None else check(against)
    weights = sorted(_weights(folder, original), key=_in_order)
    if json:
        about = {"path": str(model), "format": _format_of(folder), "left_out": [*folder.left_out]}
        print_json({**about, **summary(weights)})
        return
    _print(folder, weights)


def _format_of(folder: Folder | GgufFile) -> str | None:
    """The name of the format; None for plain weights."""
    if isinstance(folder, GgufFile):
        return Gguf.name
    return None if folder.format is None else folder.format.name


def _weights(
    folder: Folder | GgufFile, original: Folder | GgufFile | None
) -> Iterable[StoredWeight]:
    known = set() if original is None else {*original.names()}
    with progress(f"reading {folder.path.name}", folder.nbytes) as advance:
        for item in folder.items():
            value = item.value
            low = isinstance(value, LowbitTensor)
            stored_as = value.stored_format() if low else str(value.dtype).removeprefix("torch.")  # type: ignore[attr-defined]
            ratio = None
            if original is not None:
                if item.name not in known:
                    raise FormatError(
                        f"{original.path} has no {item.name}: --against takes the model that was quantized"
                    )
                ratio = _snr(original.read(item.name), value, original.path)
            yield StoredWeight(item.name, tuple(value.shape), stored_as, low, item.nbytes, ratio)
            advance(item.nbytes)


def _snr(original: Tensor, value: Tensor, path: Path) -> float | None:
    """The ratio in dB; None for integers."""
    if original.shape != value.shape:
        raise FormatError(
            f"{path} is another model: shape {tuple(original.shape)}, and here {tuple(value.shape)}"
        )
    if not value.is_floating_point():
        return None
    own, got = (t.dequantize() if isinstance(t, LowbitTensor) else t for t in (original, value))
    return snr(own, got)


def summary(weights: Iterable[StoredWeight]) -> dict[str, Any]:
    """The sums, a row a scheme, and all weights."""
    weights = list(weights)
    schemes: dict[str, dict[str, int]] = {}
    for weight in weights:
        row = schemes.setdefault(weight.stored_as, {"weights": 0, "parameters": 0, "nbytes": 0})
        row["weights"] += 1
        row["parameters"] += _numel(weight)
        row["nbytes"] += weight.nbytes
    return {
        "nbytes": sum(w.nbytes for w in weights),
        "low_bit_nbytes": sum(w.nbytes for w in weights if w.low_bit),
        "parameters": sum(map(_numel, weights)),
        "low_bit_parameters": sum(_numel(w) for w in weights if w.low_bit),
        "schemes": schemes,
        "weights": [asdict(weight) for weight in weights],
    }


def _in_order(weight: StoredWeight) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(p), "") if p.isdecimal() else (-1, p) for p in weight.name.split(".")]


def _numel(weight: StoredWeight) -> int:
    return math.prod(weight.shape)


def _print(folder: Folder | GgufFile, weights: list[StoredWeight]) -> None:
    found = summary(weights)
    low = percent(found["low_bit_nbytes"], found["nbytes"])
    kind = _format_of(folder) or "plain"
    typer.echo(
        f"{folder.path}: {kind}, {found['parameters']:,} parameters in {size(found['nbytes'])}; "
        f"{low} of the bytes are in low bits"
    )
    for note in folder.left_out:
        typer.echo(note)
    rows = [
        (
            scheme,
            f"{row['weights']}",
            f"{row['parameters']:,}",
            size(row["nbytes"]),
            percent(row["nbytes"], found["nbytes"]),
            f"{8 * row['nbytes'] / max(1, row['parameters']):.2f}",
        )
        for scheme, row in found["schemes"].items()
    ]
    header = ("stored as", "tensors", "parameters", "bytes", "share", "bits each")
    print_table("", header, rows)
    compared = any(w.snr_db is not None for w in weights)
    columns = ("#", "weight", "shape", "stored as", "bytes", *(("SNR",) if compared else ()))
    lines = [
        (
            f"{number}",
            w.name,
            "x".join(map(str, w.shape)),
            w.stored_as,
            size(w.nbytes),
            *((decibel(w.snr_db),) if compared else ()),
        )
        for number, w in enumerate(weights, 1)
    ]
    typer.echo("")
    print_table("", columns, lines)
