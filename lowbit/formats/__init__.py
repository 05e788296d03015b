"""Checkpoints in the formats of other programs: folders with config.json and *.safetensors, in and out.

`lowbit.export` and `lowbit.load_pretrained` are the whole of it for most users. `tensors(path)` reads a folder one
tensor at a time. A format of your own is one file, a subclass of `Format`, and `register(MyFormat())`.
"""

from lowbit.formats.base import Format, FormatError
from lowbit.formats.reading import load_pretrained, tensors
from lowbit.formats.registry import names, register
from lowbit.formats.writing import ExportReport, export

__all__ = [
    "ExportReport",
    "Format",
    "FormatError",
    "export",
    "load_pretrained",
    "names",
    "register",
    "tensors",
]
