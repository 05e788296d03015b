"""GPTQ's inner loop: columns of a weight rounded one after another, each error passed on to the columns that follow.

For the columns w_j of a weight, j = 0 … C − 1 in the order in which they are rounded, and an upper triangular U [C, C]:

    v_j = the value nearest to w_j that its scale allows,    e_j = (w_j − v_j) / U_jj,    w_k ← w_k − U_jk e_j,  k > j

    columns     float32 [C, N], the columns as rows, contiguous
    upper       float32 [C, C], rows may be strided
    group       int64 [C], the row of scale, least, most and offset that each column has
    scale       float32 [G, N]; it may be negative
    least, most float32 [G, N], of integers: the smallest and the largest code, less the code of 0 or of the offset
    offset      float32 [G, N], the value of code 0, or None for 0
    levels      float32 [T], ascending: the values at scale 1; empty for integers
    kept        bool [C, N], False where v_j is 0 whatever w_j is (a pruned weight), or None for True
    values      float32 [C, N], the v_j
    errors      float32 [C, N], the e_j, which the caller passes on to the columns after these: w ← w − Uᵀ e

Integers: v = clamp(round((w − offset) / scale), least, most) · scale + offset, ties to even. Levels: the nearest of the
levels times scale + offset; a tie takes the smaller.

On a GPU a program holds all C columns of some rows of the weight in registers, so C is at most 128, and the rest of the
weight is updated by a matrix product a call. A column costs a few hundred cycles, where PyTorch's operations cost ten
launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, tl, triton

MOST = 128
"""Columns of a call."""
ROWS = 32
"""Rows of the weight, which lie along N, of a program."""

_OF_GROUPS = "float32 [G, N]"


@op(
    "(torch.empty_like(columns), torch.empty_like(columns))",
    columns="float32 [C, N]",
    upper="float32 [C, C]",
    group="int64 [C]",
    scale=_OF_GROUPS,
    least=_OF_GROUPS,
    most=_OF_GROUPS,
    offset=_OF_GROUPS,
    levels="float32 [T]",
    kept="bool [C, N]",
    rules={"C <= MOST": "a call takes up to 128 columns, got {C}"},
)
def round_columns(
    columns: Tensor,
    upper: Tensor,
    group: Tensor,
    scale: Tensor,
    least: Tensor,
    most: Tensor,
    offset: Tensor | None,
    levels: Tensor,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """values and errors; see the module's docstring."""
    left = columns.clone()
    values, errors = torch.empty_like(columns), torch.empty_like(columns)
    groups, inverse, one_over = group.tolist(), upper.diagonal().reciprocal(), scale.reciprocal()
    middle = (levels[1:] + levels[:-1]) / 2
    for j, g in enumerate(groups):
        x = left[j] if offset is None else left[j] - offset[g]
        x = x * one_over[g]
        is_integer = not len(levels)
        x = (
            x.round_().clamp_(least[g], most[g])
            if is_integer
            else levels[torch.bucketize(x, middle)]
        )
        torch.add(x * scale[g], 0 if offset is None else offset[g], out=values[j])
        if kept is not None:
            values[j].masked_fill_(~kept[j], 0)
        torch.sub(left[j], values[j], out=errors[j]).mul_(inverse[j])
        left[j + 1 :].addr_(upper[j, j + 1 :], errors[j], alpha=-1)
    return values, errors


reference = round_columns.reference


@jit
def _round(
    columns, upper, group, scale, least, most, offset, levels, kept, values, errors, C, N, T,
    HAS_OFFSET: tl.constexpr, HAS_LEVELS: tl.constexpr, IS_PRUNED: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    inside = n < N
    at = c.to(tl.int64)[:, None] * N + n[None, :]
    left = tl.load(columns + at, mask=(c < C)[:, None] & inside[None, :], other=0.0)
    for j in range(0, C):
        w = tl.sum(tl.where(c[:, None] == j, left, 0.0), 0)
        own = tl.load(group + j) * N + n
        s = tl.load(scale + own, mask=inside, other=1.0)
        x = w
        if HAS_OFFSET:
            o = tl.load(offset + own, mask=inside, other=0.0)
            x = w - o
        x = x * tl.div_rn(1.0, s)
        if HAS_LEVELS:
            below = tl.load(levels)
            v = tl.zeros_like(x) + below
            for t in range(1, T):
                above = tl.load(levels + t)
                v = tl.where(x > (below + above) / 2, above, v)
                below = above
        else:
            low = tl.load(least + own, mask=inside, other=0.0)
            high = tl.load(most + own, mask=inside, other=0.0)
            v = tl.minimum(tl.maximum(x, low), high)
            v = (v + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds half to even
        v = v * s
        if HAS_OFFSET:
            v = v + o
        row = n.to(tl.int64) + j * N
        if IS_PRUNED:
            v = tl.where(tl.load(kept + row, mask=inside, other=0) != 0, v, 0.0)
        e = tl.div_rn(w - v, tl.zeros_like(w) + tl.load(upper + j * C + j))
        tl.store(values + row, v, mask=inside)
        tl.store(errors + row, e, mask=inside)
        u = tl.load(upper + j * C + c, mask=(c > j) & (c < C), other=0.0)
        left -= u[:, None] * e[None, :]


@round_columns.kernel
def _launch(
    columns, upper, group, scale, least, most, offset, levels, kept
) -> tuple[Tensor, Tensor] | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(columns.device) or columns.numel() == 0:
        return None
    ran("round_columns", "triton")
    columns, upper, group, levels = (t.contiguous() for t in (columns, upper, group, levels))
    scale, least, most = (t.contiguous() for t in (scale, least, most))
    offset = None if offset is None else offset.contiguous()
    kept = None if kept is None else kept.contiguous()
    values, errors = torch.empty_like(columns), torch.empty_like(columns)
    count, rows = columns.shape
    with torch.cuda.device_of(columns):
        _round[(triton.cdiv(rows, ROWS),)](
            *(columns, upper, group, scale, least, most, offset, levels, kept, values, errors),
            *(count, rows, len(levels)),
            HAS_OFFSET=offset is not None,
            HAS_LEVELS=len(levels) > 0,
            IS_PRUNED=kept is not None,
            COLUMNS=MOST,
            ROWS=ROWS,
            num_warps=4,
        )
    return values, errors
