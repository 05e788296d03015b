"""Products of many matrices of one shape, of which only one half is computed where the product is symmetric.

    out[i] = alpha * a[i] @ b[i] + beta * addend[i] + gamma * I

    a         float16 or bfloat16 [count, m, k]
    b         [count, k, n], dtype of a
    addend    [count, m, n], contiguous, dtype of a; None: alpha, beta and gamma must be 1, 0 and 0
    out       [count, m, n] in `out_dtype`, contiguous

Each operand is contiguous, or the transposed view (``.mT``) of a contiguous tensor; any other is copied first. Products
are summed in float32 and rounded once. gamma is added on the diagonal.

``symmetric``: the caller knows that every product is a symmetric matrix, as ``x @ x.mT`` and the product of two
polynomials of one symmetric matrix are. The elements on and below the diagonal count, and each of those below is stored
a second time, transposed; so the result is symmetric to the last bit. The kernel leaves out the tiles above the
diagonal, which are nearly half the work.

The bits of ``out[i]`` do not depend on the other matrices of the batch or on their number: the tiles are chosen by m, n
and k alone, and each element is one sum in the order of k. Optimizers rely on this, since ranks hold different parts
of a batch.

The kernel runs a program for each multiprocessor, which works through the tiles of all matrices. On Hopper and later
the copy engine loads the tiles (tensor maps made on the host) if m, n and k are multiples of 64, and it loads the
addend and stores the result if m is one of 128. Elsewhere each thread moves its elements. Without Triton, and on the
CPU, PyTorch multiplies one matrix after another. `symmetric_mm_sm90` runs symmetric products ``a @ b.mT`` of contiguous
float16 matrices on Hopper, where m is a multiple of 128.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.matmul import symmetric_mm_sm90 as sm90
from lowbit_kernels.matmul.mm_tiles_triton import in_groups
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import (
    has_large_tiles,
    jit,
    runs_on,
    stored_dtype,
    tl,
    triton,
)

GRANULE = 64
"""The tensor maps see all matrices as one. A tile along k stays inside its matrix only if this number divides the
sizes."""
LARGEST = 2**31 - 2**20
"""Elements of a matrix, and rows of all matrices, that the kernel can count."""


@op(
    "empty(out_dtype or a.dtype, B, M, N)",
    flops="2 * B * M * N * K",
    a="half [B, M, K]",
    b="half [B, K, N]",
    addend="half [B, M, N]",
    out_dtype="float",
    rules={
        "M == N or not symmetric": "a symmetric product is square, got m={M} and n={N}",
        "addend is not None or (alpha == 1 and beta == gamma == 0)": (
            "without addend, alpha, beta and gamma must be 1, 0 and 0, got {alpha}, {beta} and {gamma}"
        ),
    },
    types={
        "a.dtype == b.dtype and (addend is None or addend.dtype == a.dtype)": (
            "a, b and addend must have one dtype, got {a.dtype}, {b.dtype} and {getattr(addend, 'dtype', None)}"
        )
    },
)
def batched_mm(
    a: Tensor,
    b: Tensor,
    *,
    addend: Tensor | None = None,
    symmetric: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    gamma: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The products; see the module's docstring."""
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=out_dtype or a.dtype)
    for i in range(
        a.shape[0]
    ):  # not a batched product, whose bits may depend on the number of matrices
        product = a[i].float() @ b[i].float()
        if addend is not None:
            product = product.mul_(alpha).add_(addend[i].float(), alpha=beta)
            product.diagonal().add_(gamma)
        out[i] = product.tril().add_(product.tril(-1).mT) if symmetric else product
    return out


reference = batched_mm.reference


# ---- the kernel -------------------------------------------------------------------------------------------------


@jit
def _tile(
    x, matrix, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MAPS: tl.constexpr
):  # fmt: skip
    """ROWS x COLUMNS elements of a matrix of x [count, rows, columns]. Outside there are zeros, but a tensor map gives
    the rows of the next matrix below the last row."""
    if MAPS:
        return x.load([matrix * rows + row, column])
    else:
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, COLUMNS)
        start = x + matrix.to(tl.int64) * rows * columns
        at = at_row.to(tl.int64)[:, None] * columns + at_column[None, :]
        inside = (at_row < rows)[:, None] & (at_column < columns)[None, :]
        return tl.load(start + at, mask=inside, other=0)


@jit
def _store(
    out, tile, matrix, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MAPS: tl.constexpr
):  # fmt: skip
    """Store a tile where `_tile` would load it."""
    if MAPS:
        out.store([matrix * rows + row, column], tile)
    else:
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, COLUMNS)
        at = at_row.to(tl.int64)[:, None] * columns + at_column[None, :]
        inside = (at_row < rows)[:, None] & (at_column < columns)[None, :]
        tl.store(out + matrix.to(tl.int64) * rows * columns + at, tile, mask=inside)


@jit
def _below_diagonal(tile):
    """(row, column), column <= row, of the tile of this number, counted along the rows of the triangle."""
    row = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > tile, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= tile, row + 1, row)
    return row, tile - row * (row + 1) // 2


@jit(do_not_specialize=["tiles", "total"])
def _kernel(
    a,  # [count, m, k], or [count, k, m] if A_TRANSPOSED; a pointer or a tensor map
    b,  # [count, k, n], or [count, n, k] if B_TRANSPOSED
    addend,  # unused unless HAS_ADDEND; a tensor map if OUT_MAPS, as out
    out,
    m,
    n,
    k,
    alpha,
    beta,
    gamma,
    tiles,  # of a matrix
    total,  # of all matrices
    SYMMETRIC: tl.constexpr,
    MIRRORED: tl.constexpr,  # symmetric, but the elements of a tile on the diagonal are not, to the last bit
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    MAPS: tl.constexpr,
    OUT_MAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles whose tiles follow each other, to share b in the L2 cache
):
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        matrix = work // tiles
        tile = work % tiles
        if SYMMETRIC:
            tile_row, tile_column = _below_diagonal(tile)
            is_below = tile_row != tile_column
        else:
            tile_row, tile_column = in_groups(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        row = tile_row * BLOCK_M
        column = tile_column * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, k, BLOCK_K):
            if A_TRANSPOSED:
                x = tl.trans(_tile(a, matrix, start, row, k, m, BLOCK_K, BLOCK_M, MAPS))
            else:
                x = _tile(a, matrix, row, start, m, k, BLOCK_M, BLOCK_K, MAPS)
            if B_TRANSPOSED:
                y = tl.trans(_tile(b, matrix, column, start, n, k, BLOCK_N, BLOCK_K, MAPS))
            else:
                y = _tile(b, matrix, start, column, k, n, BLOCK_K, BLOCK_N, MAPS)
            sums = tl.dot(x, y, sums)

        own_row, own_column = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        if HAS_ADDEND:
            added = _tile(addend, matrix, row, column, m, n, BLOCK_M, BLOCK_N, OUT_MAPS)
            sums = alpha * sums + beta * added.to(tl.float32)
            sums = tl.where(own_row[:, None] == own_column[None, :], sums + gamma, sums)
        result = sums.to(out.dtype if OUT_MAPS else out.dtype.element_ty)
        if MIRRORED:
            counts = is_below | (own_row[:, None] >= own_column[None, :])
            result = tl.where(counts, result, tl.trans(result))
        _store(out, result, matrix, row, column, m, n, BLOCK_M, BLOCK_N, OUT_MAPS)
        if SYMMETRIC:  # a tile on the diagonal is stored twice: it is its own transpose
            _store(out, tl.trans(result), matrix, column, row, m, n, BLOCK_N, BLOCK_M, OUT_MAPS)


@batched_mm.kernel
def _launch(a, b, addend, symmetric, alpha, beta, gamma, out_dtype) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    count, (m, k), n = a.shape[0], a.shape[1:], b.shape[2]
    is_countable = max(m * k, k * n, m * n, count * m, count * k, count * n) < LARGEST
    if not runs_on(a.device) or 0 in (count, m, k, n) or not is_countable:
        return None
    out_dtype = out_dtype or a.dtype
    a_turned, b_turned = _is_transposed(a), _is_transposed(b)
    # x x^T, whose sums are those of its transpose
    is_square = a.data_ptr() == b.data_ptr() and a_turned != b_turned
    a, b = (aligned(x.mT if turned else x) for x, turned in ((a, a_turned), (b, b_turned)))
    is_kept = symmetric and not a_turned and b_turned
    if is_kept and nvrtc.runs_on_hopper(a.device) and sm90.takes(m, k, a.dtype, out_dtype):
        ran("batched_mm", "sm90")
        added = None if addend is None else aligned(addend)
        return sm90.symmetric_mm(a, b, added, alpha, beta, gamma)
    out = a.new_empty((count, m, n), dtype=stored_dtype(out_dtype, a.device))
    maps = has_large_tiles(a.device) and all(size % GRANULE == 0 for size in (m, n, k))
    blocks = _blocks(a.device, symmetric)
    size_m, size_n, size_k = (blocks[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    tiles_m, tiles_n = triton.cdiv(m, size_m), triton.cdiv(n, size_n)
    tiles = tiles_m * (tiles_m + 1) // 2 if symmetric else tiles_m * tiles_n
    ran("batched_mm", "maps" if maps else "triton")
    # A tile that ends below its matrix would be stored over the next one. In float32 only one square tile has room.
    has_room = out.element_size() == 2 or (symmetric and addend is None)
    out_maps = maps and m % size_m == 0 and has_room
    added = out if addend is None else aligned(addend)
    programs = 3 if a.device.type == "cpu" else nvrtc.multiprocessors(a.device)
    with torch.cuda.device_of(a):
        _kernel[(min(count * tiles, programs),)](
            _map(a, (size_k, size_m) if a_turned else (size_m, size_k)) if maps else a,
            _map(b, (size_n, size_k) if b_turned else (size_k, size_n)) if maps else b,
            _map(added, (size_m, size_n)) if out_maps else added,
            _map(out, (size_m, size_n)) if out_maps else out,
            *(m, n, k, alpha, beta, gamma, tiles, count * tiles),
            SYMMETRIC=symmetric,
            MIRRORED=symmetric and not is_square,
            A_TRANSPOSED=a_turned,
            B_TRANSPOSED=b_turned,
            HAS_ADDEND=addend is not None,
            MAPS=maps,
            OUT_MAPS=out_maps,
            **blocks,
        )
    return out.to(out_dtype)


def _is_transposed(x: Tensor) -> bool:
    """True if x is read as the transposed view of a contiguous tensor."""
    return not x.is_contiguous() and x.mT.is_contiguous()


def _map(x: Tensor, block: tuple[int, int]) -> Any:
    """The tensor map by which the copy engine loads blocks of x, whose matrices lie below each other."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows, columns = x.shape[0] * x.shape[1], x.shape[2]
    return TensorDescriptor(x, [rows, columns], [columns, 1], list(block))


@functools.cache
def _blocks(device: torch.device, symmetric: bool) -> dict[str, int]:
    """Sizes of the tiles, which are fixed, so that no call waits for autotuning; measured, see benchmarks/LOG.md."""
    if device.type == "cpu":  # the interpreter: small blocks
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 2}
    sizes = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8, "num_warps": 8}
    if not has_large_tiles(device):
        return {**sizes, "num_stages": 3}
    if symmetric:  # square tiles
        return {**sizes, "num_stages": 4}
    return {**sizes, "BLOCK_N": 256, "num_stages": 3}
