"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
Device = Annotated[str, typer.Option(help='Where tensors are computed: "cpu", "cuda", "cuda:1".')]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also draw a picture: a .png, .svg or .pdf file."),
]
