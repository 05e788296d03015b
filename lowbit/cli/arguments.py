"""Arguments and options of the commands. Importing them does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FORMATS = (
    *("lowbit", "compressed-tensors", "fp8", "gptq", "gptq_v2", "awq"),
    *("bitsandbytes-int8", "bitsandbytes-4bit", "mxfp4", "modelopt", "torchao", "gguf"),
)
"""The names of `lowbit.formats.registry.FORMATS`, whose import takes seconds. A test compares the two."""


def path(given: str) -> Path:
    """The path. Raises BadParameter for an empty path, which a shell makes of a variable that is not set."""
    if not given:
        raise typer.BadParameter("it is empty; give a path")
    return Path(given)


def usable_device(given: str | None) -> str | None:
    """`given`, if torch can use it. Raises ValueError for a device that torch does not know or see."""
    if given in (None, "cpu"):
        return given
    import torch

    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        seen = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise ValueError(
            f"--device {given!r} cannot be used; torch sees: {seen}. `lowbit doctor` says why"
        ) from error
    return given


Model = Annotated[
    Path,
    typer.Argument(
        parser=path,
        metavar="MODEL",
        help="Folder with config.json and *.safetensors, or a GGUF file.",
    ),
]
Models = Annotated[
    list[Path],
    typer.Argument(
        parser=path,
        metavar="MODEL…",
        help="Folders with config.json and *.safetensors, or GGUF files.",
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        parser=path, metavar="ORIGINAL", help="The model in high precision, to compare with."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        callback=usable_device, help='Where tensors are computed: "cpu", "cuda", "cuda:1".'
    ),
]
AnyDevice = Annotated[
    str | None,
    typer.Option(
        callback=usable_device, help='"cpu" or "cuda"; default: the GPU, if there is one.'
    ),
]
Context = Annotated[
    int | None,
    typer.Option(help="Tokens of a window. Default: what the model takes, at most 2048."),
]
Limit = Annotated[int | None, typer.Option(min=2, help="Use only the first tokens of the text.")]
CalibrationLimit = Annotated[
    int | None,
    typer.Option(min=2, help="Use only the first tokens of the text. Default: 128 windows."),
]
CalibrationBatch = Annotated[
    int | None, typer.Option(min=1, help="Windows of the text that make a batch. Default: 8.")
]
KVCache = Annotated[
    str | None,
    typer.Option(
        metavar="float8",
        help="Also find static scales of keys and values, for servers that cache them in float8.",
    ),
]
Text = Annotated[Path, typer.Option(parser=path, metavar="TEXT", help="A file of text, in UTF-8.")]
ByLayer = Annotated[
    bool, typer.Option("--by-layer", help="Also measure each layer alone in low bits.")
]
Tasks = Annotated[
    str,
    typer.Option(
        metavar="NAME,…", help="Also run tasks of lm-eval, which reads them from its hub."
    ),
]
Examples = Annotated[int | None, typer.Option(min=1, help="Use only the first examples of a task.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Picture = Annotated[
    Path | None,
    typer.Option(
        parser=path, metavar="FILE", help="Also draw a picture: a .png, .svg or .pdf file."
    ),
]

Out = Annotated[
    Path, typer.Option(parser=path, metavar="PATH", help="The folder to make; a file for gguf.")
]
Format = Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(FORMATS)}.")]
FormatOfFolder = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(FORMATS)}. The default is compressed-tensors, and lowbit for a model of diffusers.",
    ),
]
SchemeName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="int4, int8, float8, int8_int8, … or a preset with options; for gguf also Q4_K_M, …",
    ),
]
OnTheWay = Annotated[
    str | None, typer.Option(metavar="NAME", help="Quantize a plain folder on the way.")
]
GroupSize = Annotated[int | None, typer.Option(help="Inputs that share a scale.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN=SCHEME", help="A scheme, or none, for some layers; repeat it."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        parser=path,
        metavar="FILE",
        help="A plan of lowbit.autoquant, with a scheme for each weight, in place of --scheme.",
    ),
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
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,…",
        help="Steps of a calibration in their order, also with options: gptq, awq, smoothquant, search, "
        "learned-rounding, rotate, prune24, prune-experts; none rounds to nearest. Default with --data: gptq; none "
        "for static activations.",
    ),
]
CalibrationData = Annotated[
    Path | None,
    typer.Option(
        parser=path,
        metavar="TEXT",
        help="A file of text, in UTF-8, to calibrate on, or sampled: tokens that the model itself draws. Static "
        "activations need one of the two.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint at --out.")]
ShardSize = Annotated[str, typer.Option(help="The largest size of a shard.")]

Prompt = Annotated[str, typer.Option(help="The text to continue.")]
NewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to add.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token; higher values vary more.")
]
Seed = Annotated[int, typer.Option(help="For temperatures above 0.")]

Config = Annotated[
    Path,
    typer.Argument(
        parser=path, metavar="CONFIG", help="A config.json, a folder that has one, or a GGUF file."
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences at a time.")]
Sequence = Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Training computes each layer again in backward.")
]
Compiled = Annotated[
    bool, typer.Option("--compiled", help="Layers and loss run under torch.compile.")
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Fewer weights and shorter, for a first look.")
]
