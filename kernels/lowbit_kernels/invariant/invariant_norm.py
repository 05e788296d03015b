"""RMS norm of rows with the same bits on every device.

    e = exponent of max |x|        q[d] = floor(2^34 · (x[d] / 2^e)²)        m = 2^(2e - 34) · sum_d q[d] / D
    y[d] = (x[d] · (1 / sqrt(m + eps))) · (weight[d] + offset)

    x       float [..., D], D <= 2^17
    weight  float [D]
    offset  0, or 1 for models that store the weight minus 1
    y       x's dtype [..., D], contiguous

The sum is of integers in int64, so it is exact in any order. m and the sum with eps are float64, all else is float32,
and each operation rounds to nearest once. The squares lose less than 2^-34 of the largest one each. A row with an
infinity or a NaN gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.decoding.rms_norm import norm_of_rows
from lowbit_kernels.invariant.arithmetic import EXACT, in_float32, square_root
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, tl

MOST_COLUMNS = 2**17
"""Sums of more squares may not be exact in float64."""
_INFINITY = 0x7F800000


@op(
    "empty(x.dtype, *x.shape)",
    planned=True,
    x="float [..., D]",
    weight="float [D]",
    rules={"D <= MOST_COLUMNS": "rows of at most {MOST_COLUMNS} columns, got {D}; use rms_norm"},
)
def invariant_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """The norm of each row of x [..., D] times `weight` [D] + `offset`, in x's dtype; see the module's docstring."""
    wide = x.float()
    if x.numel() == 0:
        return x.clone(memory_format=torch.contiguous_format)
    bits = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True)
    exponent = ((bits >> 23) - 127).clamp(-60, 126)
    small = wide * ((127 - exponent) << 23).view(torch.float32)
    total = (small * small * 2.0**34).to(torch.int64).sum(-1, keepdim=True).double()
    unit = ((127 + exponent) << 23).view(torch.float32).double()
    mean = total / float(x.shape[-1]) * unit * unit * 2.0**-34
    own = (mean + in_float32(eps)).float()
    factor = torch.where(bits >= _INFINITY, torch.nan, 1.0 / square_root(own))
    return (wide * factor * (weight.float() + offset)).to(x.dtype).contiguous()


reference = invariant_norm.reference


@jit
def _loaded(x, begin, width, BLOCK: tl.constexpr):
    columns = begin + tl.arange(0, BLOCK)
    return tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)


@jit
def _kernel(x, weight, result, eps, offset, width, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    result += row * width
    bits = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        own = _loaded(x, begin, width, BLOCK).to(tl.int32, bitcast=True)
        bits = tl.maximum(bits, own & 0x7FFFFFFF)
    largest = tl.max(bits, 0)
    exponent = tl.minimum(tl.maximum((largest >> 23) - 127, -60), 126)
    shrink = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    squares = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, width, BLOCK):
        small = _loaded(x, begin, width, BLOCK) * shrink
        squares += (small * small * 17179869184.0).to(tl.int64)
    unit = ((127 + exponent) << 23).to(tl.float32, bitcast=True).to(tl.float64)
    mean = tl.sum(squares, 0).to(tl.float64) / width
    mean = mean * unit * unit * 5.820766091346741e-11  # 2^-34
    own = (mean + eps).to(tl.float32)
    factor = tl.div_rn(1.0, tl.sqrt_rn(own))
    factor = tl.where(largest >= 0x7F800000, float("nan"), factor)
    for begin in range(0, width, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < width
        own_weight = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
        y = _loaded(x, begin, width, BLOCK) * factor * own_weight
        tl.store(result + columns, y.to(result.dtype.element_ty), mask=inside)


@invariant_norm.kernel
def _launch(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    return norm_of_rows("invariant_norm", _kernel, x, weight, in_float32(eps), offset, **EXACT)
