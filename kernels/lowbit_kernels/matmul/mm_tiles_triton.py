"""The order of the tiles of a product in Triton, and how a tile of its result is stored."""

from __future__ import annotations

from lowbit_kernels.runtime.triton_runtime import jit, tl


@jit
def in_groups(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(row, column) of the tile of this number. GROUP rows of tiles are counted together, column by column, so that
    they share the second operand in the L2 cache."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % (GROUP * tiles_n)
    return first + within % height, within // height


@jit
def store(out, result, bias, rows, columns, m, n, HAS_BIAS: tl.constexpr):
    """Store a tile of the result in out [m, n], contiguous, after adding the bias of its columns."""
    if HAS_BIAS:
        shift = tl.load(bias + columns, mask=columns < n, other=0)
        result += shift.to(tl.float32)[None, :]
    tl.store(
        out + rows.to(tl.int64)[:, None] * n + columns[None, :],
        result.to(out.dtype.element_ty),
        mask=(rows < m)[:, None] & (columns < n)[None, :],
    )
