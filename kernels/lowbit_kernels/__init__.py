"""lowbit's kernels: plain tensors in, plain tensors out. They know nothing of lowbit.

Each op is one module, and is also registered as ``torch.ops.lowbit.<name>``. On CUDA it runs a device kernel, in CUDA
C++ or Triton; everywhere else it runs PyTorch ops, which give the same bits unless the op's docstring says otherwise.
"""

from __future__ import annotations

from lowbit_kernels.dequantize_int4 import dequantize_int4
from lowbit_kernels.scaled_mm import float8_scaled_mm, int8_scaled_mm

__all__ = ["dequantize_int4", "float8_scaled_mm", "int8_scaled_mm"]
