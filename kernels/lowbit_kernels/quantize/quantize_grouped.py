"""The rows of experts quantized along rows and, in the same pass, along the columns of each expert.

The rows (tokens) are sorted by expert; `offsets` holds the end of each expert's rows, as in ``torch._grouped_mm``. This
is `quantize_rowcol` for each expert e with the rows R(e), of which only the device knows how many there are:

    codes[m, :], scale[m]                   those of the row x[m, k] * f[k]; f = row_factor[e] for m in R(e), or 1
    codes_t[k, place(m)], scale_t[e, k]     those of the column x[m, k] for m in R(e)

    x           float32, bfloat16 or float16 [M, K], any strides
    offsets     int32 [E]; ascending, 0 to M
    row_factor  float32 [E, K], or None
    codes       in `format`, as of `quantize_rowcol` [M, K rounded up to a multiple of 16], 0 in the padding
    scale       float32 [M]
    codes_t     like codes, [K, W]: the columns of experts as `grouped_columns` places them
    scale_t     float32 [E, K]; 1 for experts without rows

Codes and scales of rows that no expert has, and columns of codes_t after the last expert's, have any values. A pair
that is not requested comes back empty. Scales of zeros, NaN and infinities, and stochastic rounding with ``seed``, are
as in `quantize_rowcol`.

So the products of experts (`grouped_scaled_mm`) sum over contiguous elements: those of a weight over `codes`, those of
its gradient over `codes_t`. Where the other operand has scales along the dimension that is summed over, `row_factor`
multiplies them in.

On Hopper `quantize_grouped_sm90.cu` makes both passes over x in one launch. Elsewhere PyTorch operations do the same,
without waiting for the offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.quantize import quantize_grouped_sm90, quantize_rowcol
from lowbit_kernels.quantize.quantize_rowcol import (
    FORMATS,
    Result,
    draws_of,
    encode,
    scale_of,
    sizes,
)
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op


@op(
    "allocate(x, offsets, format, rows, columns)",
    planned=True,
    x="float [M, K]",
    offsets="int32 [E]",
    seed="int64 [] or [1]",
    row_factor="float32 [E, K]",
    rules={"quantize_rowcol.check_format(format, False)": ""},
)
def quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = True,
    seed: Tensor | None = None,
    row_factor: Tensor | None = None,
) -> Result:
    """codes, scale, codes_t, scale_t; see the module's docstring."""
    (m, k), experts = x.shape, offsets.shape[0]
    codes, scale, codes_t, scale_t = allocate(x, offsets, format, rows, columns)
    values, counts = x.to(torch.float32), grouped_columns.counts(offsets, m)
    row = torch.arange(m, device=x.device)
    # `experts` for rows that no expert has
    owner = torch.searchsorted(counts.cumsum(0), row, right=True)
    if rows:
        factored = values
        if row_factor is not None:
            factored = values * torch.cat([row_factor, row_factor.new_ones(1, k)])[owner]
        codes, scale, _, _ = quantize_rowcol.reference(factored, format, columns=False, seed=seed)
    if columns:
        size = torch.where(values.isfinite(), sizes(values, format), torch.inf)
        index = owner[:, None].expand(m, k)
        found = values.new_zeros(experts + 1, k).scatter_reduce_(0, index, size, "amax")
        scale_all = scale_of(found, format)
        draws = None if seed is None else draws_of(m, k, seed)
        own = encode(values, scale_all[owner], format, draws)
        width = codes_t.shape[1]
        place = grouped_columns.places(offsets, m, width)
        spread = own.new_zeros((width + 1, k)).view(torch.uint8)
        spread.index_copy_(0, place, own.view(torch.uint8))
        codes_t = spread[:width].T.contiguous().view(own.dtype)
        scale_t = scale_all[:experts]
    return codes, scale, codes_t, scale_t


reference = quantize_grouped.reference


def results_of(
    m: int, k: int, experts: int, format: str, rows: bool, columns: bool
) -> tuple[Buffer, ...]:
    """codes, scale, codes_t and scale_t, empty where they are not wanted; scales of columns are 1 before they are
    written."""
    dtype = FORMATS[format][0]
    return (
        Buffer((m, k + -k % 16) if rows else (0, 0), dtype),
        Buffer((m,) if rows else (0,), torch.float32),
        Buffer((k, grouped_columns.width(m, experts)) if columns else (0, 0), dtype),
        Buffer((experts, k) if columns else (0, 0), torch.float32, fill=1.0 if columns else None),
    )


def allocate(x: Tensor, offsets: Tensor, format: str, rows: bool, columns: bool) -> Result:
    """The results before they are written; scales of columns are 1."""
    (m, k), experts = x.shape, offsets.shape[0]
    results = results_of(m, k, experts, format, rows, columns)
    codes, scale, codes_t, scale_t = (one.empty(x) for one in results)
    return codes, scale, codes_t, scale_t.fill_(1.0)


@quantize_grouped.kernel
def _launch(x, offsets, format, rows, columns, seed, row_factor) -> Result | None:
    arguments = (x, offsets, format, rows, columns, seed, row_factor)
    if x.numel() and offsets.numel() and (rows or columns) and nvrtc.runs_on_hopper(x.device):
        ran("quantize_grouped", "sm90")
        results = results_of(x.shape[0], x.shape[1], offsets.shape[0], format, rows, columns)
        made = quantize_grouped_sm90.tokens(*arguments, results)
        return made[0], made[1], made[2], made[3]
    return None
