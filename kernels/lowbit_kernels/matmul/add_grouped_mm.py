"""Products of experts with few terms, such as those of adapters, added to a result in its memory.

    y[m, n] += scale * sum_r a[m, r] * b[e, r, n]      for offsets[e - 1] <= m < offsets[e]

    y         bfloat16, float16 or float32 [M, N], contiguous
    a         y's dtype [M, R]
    b         y's dtype [E, R, N], any strides
    offsets   int32 [E], ascending, 0 to M. Rows from the last one on stay. None: E is 1, and all rows are its own.

Sums are float32, and y is rounded once. On GPUs one Triton kernel reads and writes y once. Without Triton, with more
than 128 terms, or with some 2 million rows, torch multiplies. With offsets a GPU then stores the product first, which
rounds it too, and R must be a multiple of 8, as for `torch._grouped_mm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul.grouped_mm_triton import find_tile
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.triton_runtime import jit, launch_kept, runs_on, tl, triton

ROWS, COLUMNS, WARPS = 32, 256, 4
"""A program's part of y."""
MOST_TERMS = 128
"""The largest R of the kernel."""
MOST_TILES = 65535
"""The largest second size of a CUDA grid: tiles of rows."""


@jit
def _kernel(
    y,
    a,
    b,
    offsets,
    scale,
    m,
    n,
    terms,
    experts,
    a_stride,
    b_expert,
    b_term,
    b_column,
    TERMS: tl.constexpr,  # a power of two, at least `terms`
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`; 0 without offsets
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.program_id(1)
    start = tile * 0
    expert, end = start, m
    if EXPERTS:
        expert, tile, start, end = find_tile(offsets, m, experts, tile, EXPERTS, BLOCK_M)
    if expert < experts:
        rows = start.to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        term = tl.arange(0, TERMS)
        row_inside, column_inside = (rows < end)[:, None], (columns < n)[None, :]
        at = y + rows[:, None] * n + columns[None, :]
        old = tl.load(at, mask=row_inside & column_inside, other=0.0)
        x = tl.load(
            a + rows[:, None] * a_stride + term[None, :],
            mask=row_inside & (term < terms)[None, :],
            other=0.0,
        )
        b += expert.to(tl.int64) * b_expert
        w = tl.load(
            b + term[:, None] * b_term + columns[None, :].to(tl.int64) * b_column,
            mask=(term < terms)[:, None] & column_inside,
            other=0.0,
        )
        sums = old.to(tl.float32) + scale * tl.dot(x, w, input_precision="ieee")
        tl.store(at, sums.to(y.dtype.element_ty), mask=row_inside & column_inside)


def add_grouped_mm_(
    y: Tensor, a: Tensor, b: Tensor, offsets: Tensor | None, scale: float
) -> Tensor:
    """y, changed in place; see the module's docstring."""
    (m, n), (experts, terms, _) = y.shape, b.shape
    if y.numel() == 0 or experts == 0:
        return y
    tiles = -(-m // ROWS) if offsets is None else m // ROWS + experts
    fits = terms <= MOST_TERMS and tiles <= MOST_TILES
    if not (fits and a.stride(1) == 1 and y.is_contiguous() and runs_on(y.device)):
        ran("add_grouped_mm", "torch")
        return _without_kernel(y, a, b, offsets, scale)
    ran("add_grouped_mm", "triton")
    constants = {
        "TERMS": max(16, triton.next_power_of_2(terms)),
        "EXPERTS": 0 if offsets is None else triton.next_power_of_2(experts),
        "BLOCK_M": ROWS,
        "BLOCK_N": COLUMNS,
    }
    grid = triton.cdiv(n, COLUMNS), tiles
    sizes = (m, n, terms, experts, a.stride(0), *b.stride())
    given = y if offsets is None else offsets
    arguments: tuple[Tensor | float, ...] = (y, a, b, given, float(scale), *sizes)
    with torch.cuda.device_of(y):
        launch_kept(_kernel, grid, arguments, constants, num_warps=WARPS)
    return y


def _without_kernel(
    y: Tensor, a: Tensor, b: Tensor, offsets: Tensor | None, scale: float
) -> Tensor:
    if offsets is None:
        return y.addmm_(a, b[0], alpha=scale)
    if y.device.type != "cpu":
        b = b.mT.clone(memory_format=torch.contiguous_format).mT  # rows of R, which torch can read
        inside = torch.arange(len(y), device=y.device).unsqueeze(1) < offsets[-1]
        return y.add_(torch._grouped_mm(a, b, offs=offsets).where(inside, 0), alpha=scale)
    start = 0
    for own, end in zip(b, offsets.tolist(), strict=True):
        if end > start:
            y[start:end].addmm_(a[start:end], own, alpha=scale)
        start = end
    return y
