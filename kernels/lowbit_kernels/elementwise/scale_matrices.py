"""Norms of the rows of matrices, and matrices with their rows and columns scaled.

    row_norms         norms[i, r] = (sum_c |x[i, r, c]|**order)**(1 / order),  order 1 or 2
    scale_matrices    out[i, r, c] = x[i, r, c] * rows[i, r] * columns[i, c]

    x          float32, bfloat16 or float16 [count, R, C], contiguous
    norms      float32 [count, R]
    rows       float32 [count, R]; None: 1
    columns    float32 [count, C]; None: 1
    out        [count, R, C] in `out_dtype`

Both compute in float32, and `scale_matrices` rounds once. The sum of a row has a fixed order, so its bits do not depend
on the other rows or matrices, as those of PyTorch's sums do. Optimizers rely on this, since ranks hold different parts
of a batch.

Each op is one Triton kernel, which reads x once. Without Triton, and on the CPU, PyTorch takes one matrix after
another; these norms differ in their last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton

MOST_COLUMNS = 4096
"""Elements of a row that a program takes at once."""
LARGEST = 2**31 - MOST_COLUMNS
"""Rows of all matrices, and columns, that the kernels can count."""


@op(
    "empty(torch.float32, B, R)",
    x="float [B, R, C]",
    rules={"order in (1, 2)": "order must be 1 or 2, got {order}"},
)
def row_norms(x: Tensor, order: int) -> Tensor:
    """The norms of the rows; NaN where a row holds one. See the module's docstring."""
    norms = x.new_empty(x.shape[:2], dtype=torch.float32)
    for matrix, out in zip(x, norms, strict=True):
        out.copy_(torch.linalg.vector_norm(matrix.float(), order, -1, dtype=torch.float64))
    return norms


@op(
    "torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)",
    x="float [B, R, C]",
    rows="float32 [B, R]",
    columns="float32 [B, C]",
    out_dtype="float",
)
def scale_matrices(
    x: Tensor,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The scaled matrices; see the module's docstring."""
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    for i, matrix in enumerate(x):
        scaled = matrix.float()
        scaled = scaled if rows is None else scaled * rows[i].unsqueeze(1)
        out[i] = scaled if columns is None else scaled * columns[i]
    return out


reference = scale_matrices.reference


# ---- the kernels ------------------------------------------------------------------------------------------------


@jit
def _norms(x, norms, columns, IS_ROOT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x += row.to(tl.int64) * columns
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(x + at, mask=at < columns, other=0).to(tl.float32)
        sums += values * values if IS_ROOT else tl.abs(values)
    total = tl.sum(sums)
    tl.store(norms + row, tl.sqrt_rn(total) if IS_ROOT else total)


@jit
def _scale(
    x,
    by_row,  # unused without HAS_ROWS
    by_column,  # unused without HAS_COLUMNS
    out,
    rows,
    columns,
    HAS_ROWS: tl.constexpr,
    HAS_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    base = row.to(tl.int64) * columns
    for start in tl.range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(x + base + at, mask=inside, other=0).to(tl.float32)
        if HAS_ROWS:
            values *= tl.load(by_row + row)
        if HAS_COLUMNS:
            values *= tl.load(by_column + (row // rows).to(tl.int64) * columns + at, mask=inside)
        tl.store(out + base + at, values.to(out.dtype.element_ty), mask=inside)


@row_norms.kernel
def _launch_norms(x: Tensor, order: int) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    if not _takes(x):
        return None
    ran("row_norms", "triton")
    x, (count, rows, columns) = x.contiguous(), x.shape
    norms = x.new_empty((count, rows), dtype=torch.float32)
    with torch.cuda.device_of(x):
        _norms[(count * rows,)](x, norms, columns, IS_ROOT=order == 2, **_blocks(columns))
    return norms


@scale_matrices.kernel
def _launch(x, rows, columns, out_dtype) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    if not _takes(x):
        return None
    ran("scale_matrices", "triton")
    x, out_dtype = x.contiguous(), out_dtype or x.dtype
    out = torch.empty(x.shape, dtype=stored_dtype(out_dtype, x.device), device=x.device)
    with torch.cuda.device_of(x):
        _scale[(x.shape[0] * x.shape[1],)](
            x,
            x if rows is None else rows.contiguous(),
            x if columns is None else columns.contiguous(),
            out,
            x.shape[1],
            x.shape[2],
            HAS_ROWS=rows is not None,
            HAS_COLUMNS=columns is not None,
            **_blocks(x.shape[2]),
        )
    return out.to(out_dtype)


def _takes(x: Tensor) -> bool:
    """True if a kernel runs for x, whose rows and columns it can count."""
    return runs_on(x.device) and x.numel() > 0 and max(x.shape[:2].numel(), x.shape[2]) < LARGEST


def _blocks(columns: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(columns), MOST_COLUMNS)
    return {"BLOCK": block, "num_warps": 4 if block >= 1024 else 1}
