"""The int8 product with scales in Triton, for GPUs that ``scaled_mm_sm90`` does not support and for the interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul.mm_tiles_triton import in_groups, store
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.triton_runtime import has_large_tiles, jit, stored_dtype, tl, triton


@jit
def _tile(x, row, column, m, k, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS elements of x [m, k]; zeros outside."""
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(x + at, mask=(rows < m)[:, None] & (columns < k)[None, :], other=0)


@jit
def _kernel(
    a,  # int8 [m, k], row stride a_stride
    b,  # int8 [n, k], row stride b_stride
    out,  # [m, n], contiguous
    a_scale,
    b_scale,
    bias,  # unused unless HAS_BIAS
    m,
    n,
    k,
    a_stride,
    b_stride,
    A_SCALES: tl.constexpr,  # 1: one for each row; 0: one for all
    B_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # rows of tiles whose tiles follow each other, to share b in the L2 cache
):
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_row, tile_column = in_groups(tile, m, n, BLOCK_M, BLOCK_N, GROUP)
        row, column = tile_row * BLOCK_M, tile_column * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        columns = column + tl.arange(0, BLOCK_N)

        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in tl.range(0, k, BLOCK_K):
            x = _tile(a, row, start, m, k, a_stride, BLOCK_M, BLOCK_K)
            y = _tile(b, column, start, n, k, b_stride, BLOCK_N, BLOCK_K)
            sums = tl.dot(x, tl.trans(y), sums, out_dtype=tl.int32)

        row_scale = tl.load(a_scale + rows * A_SCALES, mask=rows < m, other=0)
        column_scale = tl.load(b_scale + columns * B_SCALES, mask=columns < n, other=0)
        result = sums.to(tl.float32) * row_scale[:, None] * column_scale[None, :]
        store(out, result, bias, rows, columns, m, n, HAS_BIAS)


def int8_mm(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    """``lowbit::scaled_mm`` of int8 where Triton runs. The operands are checked; M, N, K > 0."""
    (m, k), n = a.shape, b.shape[0]
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    out = a.new_empty((m, n), dtype=stored_dtype(out_dtype, a.device))
    blocks = _blocks(m, n, a.device)
    tiles = triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(n, blocks["BLOCK_N"])
    with torch.cuda.device_of(a):
        _kernel[(min(tiles, _programs(a.device)),)](
            a,
            b,
            out,
            a_scale.contiguous(),
            b_scale.contiguous(),
            a_scale if bias is None else bias.contiguous(),
            m,
            n,
            k,
            a.stride(0),
            b.stride(0),
            A_SCALES=int(a_scale.numel() > 1),
            B_SCALES=int(b_scale.numel() > 1),
            HAS_BIAS=bias is not None,
            **blocks,
        )
    return out.to(out_dtype)


def _blocks(m: int, n: int, device: torch.device) -> dict[str, int]:
    """Block sizes for a result of m x n. They are fixed, so that no call waits for autotuning."""
    if device.type == "cpu":  # the interpreter: small blocks
        sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "GROUP": 2}
    elif has_large_tiles(device):
        wide = triton.cdiv(m, 128) * triton.cdiv(n, 256) >= _programs(device)
        sizes = {"BLOCK_M": 128, "BLOCK_N": 256 if wide else 128, "BLOCK_K": 128, "GROUP": 8}
        sizes |= {"num_warps": 8, "num_stages": 3 if wide else 4}
    else:
        sizes = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP": 8}
        sizes |= {"num_warps": 4, "num_stages": 3}
    return sizes


def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 3
    return nvrtc.multiprocessors(device) * (1 if has_large_tiles(device) else 2)
