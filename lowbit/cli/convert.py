"""`lowbit quantize` and `lowbit export`: folders in, folders out, a few tensors at a time.

A scheme with static activations is the exception: the model is whole in memory, because a text passes through it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from lowbit import formats
from lowbit.cli.arguments import Context, Device, Json, Limit, Model
from lowbit.cli.calibrated import calibrated, has_static
from lowbit.cli.language_model import tokenizer_of
from lowbit.cli.output import decibel, percent, print_json, print_table, size
from lowbit.cli.schemes import chosen
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.reading import opened
from lowbit.formats.registry import FORMATS, target
from lowbit.formats.shards import check_free

_WORST = 5
"""How many layers with the lowest signal-to-noise ratio a report names."""

Out = Annotated[Path, typer.Option(help="The folder to make; a file for gguf.")]
Format = Annotated[
    str, typer.Option(metavar="NAME", help=f"One of {', '.join(f.name for f in FORMATS)}.")
]
SchemeName = Annotated[
    str,
    typer.Option(metavar="NAME", help="int4, int8, float8, int8_int8, … or a preset with options."),
]
GroupSize = Annotated[int | None, typer.Option(help="Inputs that share a scale.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN=SCHEME", help="A scheme, or none, for some layers; repeat it."),
]
Scales = Annotated[
    str | None,
    typer.Option(
        help='"minmax", or "searched" with a smaller error and more time. Default: "searched" for 1 and 2 bits.'
    ),
]
Lossy = Annotated[
    bool, typer.Option("--lossy", help="Round what the format cannot hold, and state the loss.")
]
Data = Annotated[
    Path | None,
    typer.Option(metavar="TEXT", help="A file of text, in UTF-8, for static activations."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint at --out.")]
ShardSize = Annotated[str, typer.Option(help="The largest size of a shard.")]


def quantize(
    model: Model,
    out: Out,
    scheme: SchemeName = "int4",
    group_size: GroupSize = None,
    layers: Layers = None,
    format: Format = "compressed-tensors",
    scales: Scales = None,
    lossy: Lossy = False,
    overwrite: Overwrite = False,
    max_shard_size: ShardSize = "500MB",
    data: Data = None,
    context: Context = None,
    limit: Limit = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Quantize a folder of plain weights, layer by layer, into a folder that vLLM and transformers take.

    The model is never whole in memory, unless a scheme has static activations: their scales are found on --data, which
    needs the extra hf. Embeddings, the output head and routers stay in high precision unless --layers names them.

    \b
    Examples:
      lowbit quantize model --scheme int4 --group-size 128 --out model-int4
      lowbit quantize model --scheme int8 --format lowbit --out model-int8 --json
      lowbit quantize model --layers lm_head=int8 --layers '*.0.*=none' --out model-mixed
      lowbit quantize model --scheme int8_int8_static --data text.txt --out model-static
    """
    _check_format(format)
    patterns = chosen(scheme, group_size, layers or ())
    options = {"lossy": lossy, "overwrite": overwrite, "max_shard_size": max_shard_size}
    if not has_static(patterns):
        of_data = {"--data": data, "--context": context, "--limit": limit}
        if given := [name for name, value in of_data.items() if value is not None]:
            raise ValueError(
                f"{given[0]} is for static activations, and --scheme {scheme} has none; accepted there: e.g. "
                "int8_int8_static, float8_float8_static"
            )
        options |= {"scheme": patterns, "scales": scales, "device": device}
        _write(model, model, out, format, json, options)
        return
    if data is None:
        raise ValueError(
            f"--scheme {scheme} has static activations: give --data TEXT, on which their scales are found"
        )
    if format != "gguf":  # which is a file
        check_free(out, overwrite)
    source = calibrated(model, patterns, data, context, limit, scales, device)
    options["tokenizer"] = model if model.is_dir() else tokenizer_of(model)
    _write(model, source, out, format, json, options)


def export(
    model: Model,
    out: Out,
    format: Format,
    scheme: Annotated[
        str | None, typer.Option(metavar="NAME", help="Quantize a plain folder on the way.")
    ] = None,
    group_size: GroupSize = None,
    lossy: Lossy = False,
    overwrite: Overwrite = False,
    max_shard_size: ShardSize = "500MB",
    json: Json = False,
) -> None:
    """Write a model in low bits in another format, with the same values to the bit.

    \b
    Examples:
      lowbit export model-int4 --format lowbit --out model-lowbit
      lowbit export model-int4 --format gptq --lossy --out model-gptq
      lowbit export model --scheme int8 --format compressed-tensors --out model-int8
    """
    _check_format(format)
    if scheme is None and group_size is not None:
        raise ValueError("--group-size belongs to a scheme; give --scheme too")
    patterns = None if scheme is None else chosen(scheme, group_size, ())
    options = {"scheme": patterns, "lossy": lossy, "overwrite": overwrite}
    _write(model, model, out, format, json, {**options, "max_shard_size": max_shard_size})


def _check_format(name: str) -> None:
    """Raises ValueError for an unknown format, and for one of programs."""
    if isinstance(target(name), ProgramFormat):
        raise ValueError(
            f"{name} holds a program, which is traced with inputs: write it from Python, by lowbit.export(model, out, "
            f"{name!r}, example_inputs=(x,)), or take another --format"
        )


def _write(
    model: Path,
    source: Path | nn.Module,
    out: Path,
    format: str,
    as_json: bool,
    options: dict[str, Any],
) -> None:
    """Export `source`, which is `model` or was made of it, and print the report. options: of `lowbit.export`."""
    before = opened(model).nbytes
    start = time.monotonic()
    report = formats.export(source, out, format, **options)
    seconds = time.monotonic() - start
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
