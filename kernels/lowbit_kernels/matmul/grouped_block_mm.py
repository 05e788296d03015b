"""Products of the rows of experts in float8 with a scale for each 128 elements along the sum, in one launch.

`grouped_scaled_mm` with the operands of `block_scaled_mm`, as DeepSeek-V3 trains experts (arXiv 2412.19437, 3.3). Rows
(tokens) are sorted by expert, and `offsets` (int32 [E]) holds the end of each expert's rows. The dimensions of b tell
two products apart; group g is the elements 128 g .. 128 g + 127:

    b [E, N, K]    out[m, n] = sum_g (sum_{k in g} a[m, k] * b[e, n, k]) * a_scale[g, m] * b_scale[e, n // 128, g]
                               for the expert e of row m, offsets[e - 1] <= m < offsets[e]
    b [K, P]       out[e, n, k] = sum_g (sum_{p in g} a[n, p] * b[k, p]) * a_scale[g, n] * b_scale[g, k]
                                  over the groups g of the columns of expert e

    a, b      float8_e4m3fn [M, K] or [N, P]; K and P are multiples of 128
    a_scale   float32 [K/128, M] or [P/128, N]
    b_scale   float32 [E, N/128 rounded up, K/128] or [P/128, K]
    out       [M, N] or [E, N, K], contiguous, in `out_dtype`: float32, bfloat16 or float16

`quantize_blocks` makes these operands, those of the second product with `offsets`: each expert's columns begin at a
multiple of 128 (`grouped_columns`), so no group belongs to two experts. The sum of a group is scaled and added in
float32, and the result is rounded once. Where one group has the scale NaN, the results that read it are NaN.

Rows that no expert has, and weights of experts without rows, are 0. Offsets are as of `grouped_scaled_mm`: ascending, 0
to M, and not checked.

Implementations, as `launches` reports them:

    sm90     compute capability 9.0: grouped_mm_sm90.cu, compiled at first use. The sum of a group has about 14 bits
    torch    elsewhere: the float32 products of the dequantized operands, expert by expert. On a GPU the host waits for
             the offsets
    empty    a size is 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns, grouped_mm_sm90
from lowbit_kernels.matmul.block_scaled_mm import BLOCK, product
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op


@op(
    "empty(out_dtype, *_shape(a, b, offsets))",
    planned=True,
    flops="2 * M * b.shape[-2] * (K if b.dim() == 3 else grouped_columns.tokens(K, E))",
    a="float8_e4m3fn [M, K]; flatten leading dimensions first",
    b="float8_e4m3fn [...]",
    a_scale="float32 [K // BLOCK, M]",
    b_scale="float32 [...]",
    offsets="int32 [E]",
    out_dtype="float",
    rules={
        "b.dim() in (2, 3) and b.shape[-1] == K": (
            "a [M, K] and b [E, N, K], or a [N, P] and b [K, P] are multiplied, got {tuple(a.shape)} and "
            "{tuple(b.shape)}; pass b transposed"
        ),
        "K % BLOCK == 0": "K must be a multiple of {BLOCK}, got {K}; pad both operands with zeros",
        "b.dim() == 2 or b.shape[0] == E": (
            "offsets must have the shape ({b.shape[0]},), got {tuple(offsets.shape)}"
        ),
        "b_scale.shape == _scales(b)": "b_scale must have the shape {_scales(b)}, got {tuple(b_scale.shape)}",
    },
)
def grouped_block_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The scaled products of all experts; see the module's docstring."""
    return _by_expert(torch.float64, a, b, a_scale, b_scale, offsets, out_dtype)


reference = grouped_block_mm.reference


def _by_expert(dtype: torch.dtype, a, b, a_scale, b_scale, offsets, out_dtype) -> Tensor:
    ragged = b.dim() == 2
    tokens = grouped_columns.counts(offsets, a.shape[1] if ragged else a.shape[0])
    first = grouped_columns.starts(tokens) if ragged else tokens.cumsum(0) - tokens
    out = a.new_zeros(_shape(a, b, offsets), dtype=out_dtype)
    for e, (start, count) in enumerate(zip(first.tolist(), tokens.tolist(), strict=True)):
        if count and ragged:
            groups = slice(start // BLOCK, -(-(start + count) // BLOCK))
            own = slice(start, groups.stop * BLOCK)
            operands = a[:, own], b[:, own], a_scale[groups], b_scale[groups]
            out[e] = product(dtype, *operands, None, out_dtype)
        elif count:
            own = slice(start, start + count)
            out[own] = product(dtype, a[own], b[e], a_scale[:, own], b_scale[e], None, out_dtype)
    return out


@grouped_block_mm.kernel
def _launch(a, b, a_scale, b_scale, offsets, out_dtype) -> Tensor:
    operands = (a, b, a_scale, b_scale, offsets, out_dtype)
    if 0 in (*a.shape, *b.shape, offsets.shape[0]):
        ran("grouped_block_mm", "empty")
        return a.new_zeros(_shape(a, b, offsets), dtype=out_dtype)
    if nvrtc.runs_on_hopper(a.device):
        ran("grouped_block_mm", "sm90")
        return grouped_mm_sm90.grouped_mm(*operands, blocks=True)
    ran("grouped_block_mm", "torch")
    return _by_expert(torch.float32, *operands)


def _shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    return (offsets.shape[0], a.shape[0], b.shape[0]) if b.dim() == 2 else (a.shape[0], b.shape[1])


def _scales(b: Tensor) -> tuple[int, ...]:
    """The shape of b_scale."""
    rows, groups = b.shape[-2], b.shape[-1] // BLOCK
    return (groups, rows) if b.dim() == 2 else (b.shape[0], -(-rows // BLOCK), groups)
