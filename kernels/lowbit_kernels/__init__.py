"""lowbit's kernels: plain tensors in, plain tensors out. They know nothing of lowbit.

Each op is one module, and is also registered as ``torch.ops.lowbit.<name>``. On CUDA it runs a device kernel
where Triton is installed; everywhere else it runs the PyTorch reference, which gives the same bits.
"""

from __future__ import annotations

from lowbit_kernels.dequantize_int4 import dequantize_int4

__all__ = ["dequantize_int4"]
