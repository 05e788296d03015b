"""Products of the rows of experts in float8 with a scale for each 128 elements along the sum: all experts in one launch.

`grouped_scaled_mm` with the operands of `block_scaled_mm`, as DeepSeek-V3 trains experts (arXiv 2412.19437, 3.3). Rows
(tokens) are sorted by expert, and `offsets` (int32 [E]) holds the end of each expert's rows. The dimensions of b tell two
products apart; G = 128 is the size of a group:

    b [E, N, K]    out[m, n]    = sum_g (sum_{k in group g} a[m, k] * b[e, n, k]) * a_scale[g, m] * b_scale[e, n // G, g]
                                  for the expert e of row m, offsets[e - 1] <= m < offsets[e]
    b [K, P]       out[e, n, k] = sum_g (sum_{p in group g} a[n, p] * b[k, p]) * a_scale[g, n] * b_scale[g, k]
                                  over the groups g of the columns of expert e

    a, b      float8_e4m3fn [M, K] or [N, P]; K and P are multiples of 128
    a_scale   float32 [K/128, M] or [P/128, N]
    b_scale   float32 [E, N/128 rounded up, K/128] or [P/128, K]
    out       [M, N] or [E, N, K], contiguous, in `out_dtype`: float32, bfloat16 or float16

`quantize_blocks` makes these operands, those of the second product with `offsets`: each expert's columns begin at a
multiple of 128 (`grouped_columns`), so no group belongs to two experts. The sum of a group is scaled and added in
float32, and the result is rounded once. Where one group has the scale NaN, the results that read it are NaN.

Rows that no expert has, and weights of experts without rows, are 0. Offsets are ascending, 0 to M. The op does not check
them, because reading them waits for the GPU.

Implementations, as `launches` reports them:

    sm90     compute capability 9.0: grouped_mm_sm90.cu, compiled at first use. The sum of a group has about 14 bits
    triton   other GPUs from capability 8.9 on
    torch    elsewhere: the float32 products of the dequantized operands, expert by expert. On a GPU the host waits for
             the offsets
    empty    a size is 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.matmul import grouped_columns, grouped_mm_sm90
from lowbit_kernels.matmul.block_scaled_mm import BLOCK, product
from lowbit_kernels.matmul.grouped_mm_triton import find_columns, find_tile
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import (
    jit,
    launch_kept,
    runs_on,
    stored_dtype,
    tl,
    triton,
)


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
    if runs_on(a.device) and (a.device.type == "cpu" or nvrtc.capability(a.device) >= (8, 9)):
        ran("grouped_block_mm", "triton")
        return _by_triton(*operands)
    ran("grouped_block_mm", "torch")
    return _by_expert(torch.float32, *operands)


def _shape(a: Tensor, b: Tensor, offsets: Tensor) -> tuple[int, ...]:
    return (offsets.shape[0], a.shape[0], b.shape[0]) if b.dim() == 2 else (a.shape[0], b.shape[1])


def _scales(b: Tensor) -> tuple[int, ...]:
    """The shape of b_scale."""
    rows, groups = b.shape[-2], b.shape[-1] // BLOCK
    return (groups, rows) if b.dim() == 2 else (b.shape[0], -(-rows // BLOCK), groups)


# ---- Triton ----------------------------------------------------------------------------------------------------------


@jit
def _place(tile, down, across, NEAR: tl.constexpr):
    """The row and the column of a tile, of `down` x `across`. NEAR rows run down together, so that the L2 cache holds
    what they read."""
    band = tile // (NEAR * across) * NEAR
    height = tl.minimum(down - band, NEAR)
    inside = tile % (NEAR * across)
    return band + inside % height, inside // height


@jit
def _rows_kernel(
    a,  # [m, k]
    b,  # [experts, n, k]
    out,  # [m, n]
    a_scale,
    b_scale,
    offsets,
    m,
    n,
    k,
    experts,
    down,  # tiles of rows that the offsets may need
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR: tl.constexpr,
):
    tile, column = _place(tl.program_id(0), down, tl.cdiv(n, BLOCK_N), NEAR)
    expert, tile, start, end = find_tile(offsets, m, experts, tile, EXPERTS, BLOCK_M, 1)
    if expert <= experts:
        rows = start.to(tl.int64) + tile * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if expert < experts:
            # Rows and columns beyond the ends are read from within, and not stored.
            row, own, along = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1), tl.arange(0, GROUP)
            x_at = a + row[:, None] * k + along[None, :]
            y_at = b + (expert.to(tl.int64) * n + own)[:, None] * k + along[None, :]
            of_rows, groups = a_scale + row, k // GROUP
            of_tile = b_scale + (expert * tl.cdiv(n, GROUP) + column * BLOCK_N // GROUP) * groups
            for group in tl.range(0, groups):
                x, y = tl.load(x_at), tl.load(y_at)
                scale = tl.load(of_rows) * tl.load(of_tile + group)
                sums += tl.dot(x, tl.trans(y)) * scale[:, None]
                x_at += GROUP
                y_at += GROUP
                of_rows += m
        wanted = (rows < end)[:, None] & (columns < n)[None, :]
        at = rows[:, None] * n + columns[None, :]
        tl.store(out + at, sums.to(out.dtype.element_ty), mask=wanted)


@jit
def _columns_kernel(
    a,  # [n, p]
    b,  # [k, p]
    out,  # [experts, n, k]
    a_scale,
    b_scale,
    offsets,
    n,
    k,
    p,
    experts,
    down,  # tiles of n
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NEAR: tl.constexpr,
):
    across = tl.cdiv(k, BLOCK_N)
    expert = tl.program_id(0) // (down * across)
    row, column = _place(tl.program_id(0) % (down * across), down, across, NEAR)
    place, count = find_columns(offsets, p, experts, expert, EXPERTS, GROUP)
    groups = tl.minimum((count + GROUP - 1) // GROUP, (p - place) // GROUP)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = (column * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row, own = tl.minimum(rows, n - 1), tl.minimum(columns, k - 1)
    along = place + tl.arange(0, GROUP)
    x_at = a + row[:, None] * p + along[None, :]
    y_at = b + own[:, None] * p + along[None, :]
    first = (place // GROUP).to(tl.int64)
    of_rows, of_columns = a_scale + first * n + row, b_scale + first * k + own
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, groups):
        x, y = tl.load(x_at), tl.load(y_at)
        row_scale, column_scale = tl.load(of_rows), tl.load(of_columns)
        sums += tl.dot(x, tl.trans(y)) * row_scale[:, None] * column_scale[None, :]
        x_at += GROUP
        y_at += GROUP
        of_rows += n
        of_columns += k
    wanted = (rows < n)[:, None] & (columns < k)[None, :]
    at = (expert.to(tl.int64) * n + rows)[:, None] * k + columns[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=wanted)


def _by_triton(a, b, a_scale, b_scale, offsets, out_dtype) -> Tensor:
    """The op where Triton runs. The operands are checked; no size is 0."""
    ragged, experts = b.dim() == 2, offsets.shape[0]
    out = a.new_empty(_shape(a, b, offsets), dtype=stored_dtype(out_dtype, a.device))
    tensors = (t.contiguous() for t in (a, b, out, a_scale, b_scale, offsets))
    tile, options = _blocks(a.device, ragged)
    (rows, summed), columns = a.shape, b.shape[-2]
    down = -(-rows // tile["BLOCK_M"]) if ragged else rows // tile["BLOCK_M"] + experts + 1
    sizes = (rows, columns, summed, experts, down)
    programs = down * -(-columns // tile["BLOCK_N"]) * (experts if ragged else 1)
    constants = {"GROUP": BLOCK, "EXPERTS": triton.next_power_of_2(experts + 1), **tile}
    with torch.cuda.device_of(a):
        kernel = _columns_kernel if ragged else _rows_kernel
        launch_kept(kernel, (programs,), (*tensors, *sizes), constants, **options)
    return out.to(out_dtype)


def _blocks(device: torch.device, ragged: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The tile of a program, whose columns share a scale of b, and the options of the launch."""
    if device.type == "cpu":  # the interpreter: small blocks
        return {"BLOCK_M": 32, "BLOCK_N": 32, "NEAR": 2}, {}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "NEAR": 8}, {"num_warps": 8, "num_stages": 3}
