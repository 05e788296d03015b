"""Programs from the C++ and CUDA files of this package: macros that select a variant, then the files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

FLOAT_MACROS = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
"""The names of dtypes in the sources."""
SM90 = "runtime/ptx.cuh", "runtime/sm90.cuh"
"""The files before the kernels for compute capability 9.0."""


def program(macros: Mapping[str, object], *parts: str) -> str:
    """The source of a variant. A part is a file by its path in this package, or source text of several lines."""
    values = {name: int(v) if isinstance(v, bool) else v for name, v in macros.items()}
    defines = [f"#define {name.upper()} {value}" for name, value in values.items()]
    return "\n".join([*defines, *[part if "\n" in part else _text(part) for part in parts]])


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
