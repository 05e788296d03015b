"""Checkpoints in the formats of other programs: folders with config.json and *.safetensors, in and out.

Most users need only `lowbit.export` and `lowbit.load_pretrained`. `tensors(path)` reads a folder one tensor at a time.
A format of your own is one file, a subclass of `Format`, and `register(MyFormat())`. `export` also writes programs, for
AOTInductor, ExecuTorch and ONNX: `lowbit.formats.programs`.
"""

from lowbit.formats.base import Format, FormatError
from lowbit.formats.gguf.format import gguf_scheme
from lowbit.formats.gguf.mixes import gguf_mix
from lowbit.formats.programs.base import ProgramFormat
from lowbit.formats.programs.decompositions import decompositions
from lowbit.formats.reading import load_pretrained, tensors
from lowbit.formats.registry import names, register
from lowbit.formats.report import ExportReport
from lowbit.formats.scheme_grid import grid
from lowbit.formats.writing import export

__all__ = [
    "ExportReport",
    "Format",
    "FormatError",
    "ProgramFormat",
    "decompositions",
    "export",
    "gguf_mix",
    "gguf_scheme",
    "grid",
    "load_pretrained",
    "names",
    "register",
    "tensors",
]
