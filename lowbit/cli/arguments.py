"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="Folder with config.json and *.safetensors, or a GGUF file."
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(metavar="ORIGINAL", help="The model in high precision, to compare with."),
]


def usable_device(given: str | None) -> str | None:
    """`given`, where torch can use it. Raises ValueError for a device that it does not know or see."""
    if given is None:
        return None
    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:
        seen = ", ".join(["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))])
        raise ValueError(
            f"--device {given} cannot be used; torch sees: {seen}. `lowbit doctor` says why"
        ) from error
    return given


Device = Annotated[
    str,
    typer.Option(
        callback=usable_device, help='Where tensors are computed: "cpu", "cuda", "cuda:1".'
    ),
]
Context = Annotated[int | None, typer.Option(help="Tokens of a window.")]
Limit = Annotated[int | None, typer.Option(min=2, help="Use only the first tokens of the text.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also draw a picture: a .png, .svg or .pdf file."),
]
