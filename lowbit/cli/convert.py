"""`lowbit quantize` and `lowbit export`: folders in, folders out, a few tensors at a time, or with a text a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from lowbit import formats
from lowbit.cli.calibrated import BATCH, calibrate, steps_of
from lowbit.cli.language_model import check
from lowbit.cli.output import decibel, percent, print_json, print_table, size
from lowbit.cli.schemes import chosen
from lowbit.convert import has_static
from lowbit.formats.gguf.mixes import MIXES
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.registry import target
from lowbit.formats.report import ExportReport
from lowbit.formats.writing import default_format
from lowbit.inference import CalibrationReport
from lowbit.schemes.scheme import Scheme

_WORST = 5
"""How many layers with the lowest signal-to-noise ratio a report names."""


def quantize(
    model: Path,
    out: Path,
    scheme: str,
    group_size: int | None,
    layers: list[str] | None,
    plan: Path | None,
    format: str | None,
    scales: str | None,
    lossy: bool,
    overwrite: bool,
    max_shard_size: str,
    method: str | None,
    data: Path | None,
    context: int | None,
    limit: int | None,
    batch: int | None,
    kv_cache: Any,
    device: str,
    json: bool,
) -> None:
    """The command `quantize`. Args: those of `lowbit.cli.app.quantize`."""
    format = default_format(model) if format is None else format
    _check_format(format)
    is_mix = plan is None and _is_mix(scheme, format)
    if is_mix:
        patterns: Any = _mix(model, scheme, group_size, layers or ())
    else:
        patterns = chosen(scheme, group_size, layers or (), plan)
    options: dict[str, Any] = {"format": format, "lossy": lossy, "overwrite": overwrite}
    options |= {"max_shard_size": max_shard_size}
    if data is None:
        of_data = {"--context": context, "--limit": limit, "--batch": batch, "--kv-cache": kv_cache}
        if given := [name for name, value in of_data.items() if value is not None]:
            raise ValueError(f"{given[0]} is for batches of a text: give --data TEXT too")
        if has_static(patterns):
            raise ValueError(
                f"--scheme {scheme} has static activations: give --data TEXT, on which their scales are found"
            )
    if data is None and method is None:
        scales = scales or ("searched" if is_mix else None)
        options |= {"scheme": patterns, "scales": scales, "device": device}
        _write(model, out, json, lambda: formats.export(model, out, **options))
        return
    if scales is not None:
        raise ValueError(
            f"--scales {scales} is for weights without --data and --method, which chooses them; accepted: "
            "e.g. --method search"
        )
    steps = steps_of(method, patterns)
    _write(
        model,
        out,
        json,
        lambda: calibrate(
            *(model, out, patterns, steps, data, context, limit, batch or BATCH, device),
            *(kv_cache, options),
        ),
    )


def _is_mix(scheme: str, format: str) -> bool:
    """True if the scheme names a mix of gguf. Raises ValueError if it does and the format is another one."""
    if scheme in MIXES and format != "gguf":
        raise ValueError(f"--scheme {scheme} is for --format gguf, got --format {format}")
    return scheme in MIXES


def _mix(
    model: Path, name: str, group_size: int | None, layers: Sequence[str]
) -> dict[str, Scheme | None]:
    """The patterns of a mix of gguf for the folder `model`, after those of --layers."""
    if group_size is not None:
        raise ValueError(
            f"--group-size is not for --scheme {name}, whose types have groups of their own"
        )
    own = chosen("int4", None, layers)
    named = dict(own) if isinstance(own, Mapping) else {}
    named.pop("*", None)
    return {**named, **formats.gguf_mix(name, check(model).config)}


def export(
    model: Path,
    out: Path,
    format: str,
    scheme: str | None,
    group_size: int | None,
    lossy: bool,
    overwrite: bool,
    max_shard_size: str,
    json: bool,
) -> None:
    """The command `export`. Args: those of `lowbit.cli.app.export`."""
    _check_format(format)
    if scheme is None and group_size is not None:
        raise ValueError("--group-size belongs to a scheme; give --scheme too")
    patterns: Any = scheme
    if scheme is not None and not _is_mix(scheme, format):
        patterns = chosen(scheme, group_size)
    options: dict[str, Any] = {"scheme": patterns, "lossy": lossy, "overwrite": overwrite}
    options |= {"format": format, "max_shard_size": max_shard_size}
    _write(model, out, json, lambda: formats.export(model, out, **options))


def _check_format(name: str) -> None:
    """Raise ValueError for an unknown format, and for a format of programs."""
    if isinstance(target(name), ProgramFormat):
        raise ValueError(
            f"{name} holds a program, which is traced with inputs: write it from Python, by lowbit.export(model, out, "
            f"{name!r}, example_inputs=(x,)), or take another --format"
        )


def _write(
    model: Path, out: Path, as_json: bool, make: Callable[[], ExportReport | CalibrationReport]
) -> None:
    """Make `out` of `model`, and print the report."""
    before = check(model).nbytes
    start = time.monotonic()
    found = make()
    seconds = time.monotonic() - start
    layers = found.layers if isinstance(found, CalibrationReport) else {}
    report = found.written if isinstance(found, CalibrationReport) else found
    assert report is not None
    worst = sorted(report.snr.items(), key=lambda entry: entry[1])[:_WORST]
    if as_json:
        print_json(
            {
                "out": str(out),
                "format": report.format,
                "bytes_before": before,
                "bytes_after": report.nbytes,
                "low_bit_bytes": report.low_bit_nbytes,
                "parameters": report.parameters,
                "low_bit_parameters": report.low_bits,
                "seconds": seconds,
                "snr_db": report.snr,
                "calibrated": {name: asdict(layer) for name, layer in layers.items()},
                "left": report.left,
                "notes": report.notes,
            }
        )
        return
    share = percent(report.low_bit_nbytes, report.nbytes)
    typer.echo(f"{out}: {report.format}, written in {seconds:.1f} s and read back")
    typer.echo(
        f"{size(before)} before, {size(report.nbytes)} now; {share} of the bytes are in low bits"
    )
    if report.left:
        names = ", ".join(list(report.left)[:_WORST])
        more = f" and {len(report.left) - _WORST} more" if len(report.left) > _WORST else ""
        typer.echo(f"in high precision: {names}{more}")
    for note in report.notes:
        typer.echo(note)
    if worst:
        rows = [(name, decibel(snr)) for name, snr in worst]
        print_table("Lowest signal-to-noise ratios", ("weight", "SNR"), rows)
    if layers:
        most = sorted(layers.values(), key=lambda layer: -layer.after)[:_WORST]
        shown = [(one.name, one.method, f"{one.before:.2e}", f"{one.after:.2e}") for one in most]
        columns = ("weight", "method", "to nearest", "now")
        print_table("Largest relative squared errors of outputs", columns, shown)
