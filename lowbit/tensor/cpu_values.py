"""Values of integer and float8 weights on a CPU by one compiled kernel, `lowbit_kernels.dequantize_cpu`.

To the bit what `Spec.dequantize` gives by PyTorch operations, of which a small weight takes 25 at a few microseconds
each: they, and not the arithmetic, were what decoding with a small low-bit model spent its time on.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit.scheme import Int, Spec
from lowbit.tensor import kernels

if TYPE_CHECKING:
    from lowbit_kernels.dequantize_cpu import Dequantizer


def layout_of(weight: Any) -> Dequantizer | None:
    """The kernel of an AffineTensor; None where there is none, or while what it does would be traced."""
    codes = weight.codes
    if torch.compiler.is_compiling() or type(codes) is not Tensor or not codes.is_cpu:
        return None
    # an op that is traced, or watched, has to be seen
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return None
    layout = _layout(weight.spec, weight.shape)
    if layout is None or not layout.fits(codes, weight.scale, weight.zero_point):
        return None
    return layout


@functools.lru_cache(maxsize=4096)
def _layout(spec: Spec, shape: tuple[int, ...]) -> Dequantizer | None:
    padded, blocks, block = spec.padded_shape(shape), spec.blocks(shape), spec.block_size(shape)
    rows, scale_rows = math.prod(padded[:-1]), math.prod(blocks[:-1])
    if 0 in padded or (scale_rows != 1 and any(size != 1 for size in block[:-2])):
        return None
    fmt = spec.format
    format: dict[str, Any] = {"bits": fmt.bits}
    if not isinstance(fmt, Int):
        format["exponent"] = 4 if fmt.dtype is torch.float8_e4m3fn else 5
    else:
        format["low"] = fmt.quant_min
        if spec.has_zero_point:
            format["zero_point"] = "value" if spec.mapping == "float_zero_point" else "code"
            format["mid"] = (fmt.quant_min + fmt.quant_max + 1) // 2
    return kernels.cpu_dequantizer(format, rows, padded[-1], block[-1], rows // scale_rows)
