"""The formats, a line each. A format of your own is a subclass of `lowbit.formats.Format` or
`lowbit.formats.ProgramFormat`, and `register(MyFormat())`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from lowbit.formats.awq import Awq
from lowbit.formats.base import Format, FormatError
from lowbit.formats.bitsandbytes import BitsandbytesInt8
from lowbit.formats.bitsandbytes_4bit import Bitsandbytes4bit
from lowbit.formats.compressed_tensors import CompressedTensors
from lowbit.formats.fp8 import Float8Blocks
from lowbit.formats.gguf.format import Gguf
from lowbit.formats.gptq import Gptq, GptqV2
from lowbit.formats.modelopt import ModelOpt
from lowbit.formats.mxfp4 import Mxfp4
from lowbit.formats.own import Own
from lowbit.formats.programs.aoti import Aoti
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.programs.executorch import ExecuTorch
from lowbit.formats.programs.onnx_file import Onnx
from lowbit.formats.torchao import TorchAo

Named = TypeVar("Named", bound=Format | ProgramFormat)

FORMATS: list[Format] = [
    Own(),
    CompressedTensors(),
    Float8Blocks(),
    Gptq(),
    GptqV2(),
    Awq(),
    BitsandbytesInt8(),
    Bitsandbytes4bit(),
    Mxfp4(),
    ModelOpt(),
    TorchAo(),
    Gguf(),
]
"""Formats of weights. Reading asks them in this order."""
PROGRAMS: list[ProgramFormat] = [Aoti(), ExecuTorch(), Onnx()]
"""Formats of programs, which are written but not read."""


def register(format: Format | ProgramFormat) -> None:
    """Add `format` to those of `lowbit.export`. Raises ValueError for a name that another format has, and
    TypeError for anything but a format."""
    if not isinstance(format, Format | ProgramFormat):
        raise TypeError(
            f"register takes an object of a subclass of Format or ProgramFormat, got {format!r}"
        )
    if format.name in names():
        raise ValueError(f"there is a format {format.name!r} already; give yours another name")
    if isinstance(format, ProgramFormat):
        PROGRAMS.append(format)
    else:
        FORMATS.append(format)


def names() -> list[str]:
    """The names that `lowbit.export(…, format=name)` takes."""
    return [format.name for format in _all()]


def by_name(name: str) -> Format:
    """The format of weights with this name. Raises FormatError for an unknown name."""
    return _found(name, FORMATS)


def target(name: str) -> Format | ProgramFormat:
    """The format, of weights or programs, with this name. Raises FormatError for an unknown name."""
    return _found(name, _all())


def _all() -> list[Format | ProgramFormat]:
    return [*FORMATS, *PROGRAMS]


def _found(name: str, known: Sequence[Named]) -> Named:
    found = next((format for format in known if format.name == name), None)
    if found is None:
        accepted = ", ".join(format.name for format in known)
        raise FormatError(f"unknown format {name!r}; accepted: {accepted}")
    return found


def by_config(config: Mapping[str, Any]) -> Format:
    """The format that a "quantization_config" describes. Raises FormatError for a format that lowbit does not read."""
    found = next((format for format in FORMATS if format.reads(config)), None)
    if found is None:
        raise FormatError(
            f"quant_method {config.get('quant_method')!r} in config.json is not one that lowbit reads; accepted: "
            f"{', '.join(format.name for format in FORMATS)}, auto-round"
        )
    return found
