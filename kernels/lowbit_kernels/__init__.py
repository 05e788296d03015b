"""lowbit's kernels: plain tensors in, plain tensors out. They know nothing of lowbit.

Each op is a function of this package, and is also registered as ``torch.ops.lowbit.<name>``. On CUDA it runs a device
kernel, in CUDA C++ or Triton; everywhere else it runs PyTorch ops, which give the same bits unless the op's docstring
says otherwise.

A module is named as its op, so that an attribute of the package is the function; what else the module holds is
imported from it: ``from lowbit_kernels.round_rows import CASES, reference``.
"""

from __future__ import annotations

from lowbit_kernels.dequantize_int4 import dequantize_int4
from lowbit_kernels.dequantize_int8 import dequantize_int8
from lowbit_kernels.quantize_rowcol import quantize_rowcol
from lowbit_kernels.quantize_tokens import quantize_tokens
from lowbit_kernels.round_rows import round_rows
from lowbit_kernels.scaled_mm import float8_scaled_mm, int8_scaled_mm
from lowbit_kernels.ternary_mm import ternary_mm

__all__ = [
    "dequantize_int4",
    "dequantize_int8",
    "float8_scaled_mm",
    "int8_scaled_mm",
    "quantize_rowcol",
    "quantize_tokens",
    "round_rows",
    "ternary_mm",
]
