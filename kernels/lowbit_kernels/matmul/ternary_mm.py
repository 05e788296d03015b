"""The product of int8 rows and a ternary matrix stored at 2 bits an element, scaled back.

    out[m, n] = (sum_k a[m, k] * (code[n, k] - 2)) * a_scale[m] * b_scale + bias[n]

    a         int8 [M, Ka], Ka at least K; columns beyond K are zero, as `quantize_rowcol` pads
    packed    uint8 [N, ceil(K / 4)]: codes 1, 2, 3 for -1, 0, 1; four in a byte, the first in the lowest bits
    a_scale   float32 [M]
    b_scale   float32 [1]
    bias      float32, bfloat16 or float16 [N], or None
    out       out_dtype, one of these three [M, N]

The sum is exact in int32. The other steps are those of `lowbit_kernels.matmul.scaled_mm`; the result equals that of
scaled_mm to the bit, except that either op may fuse the addition of the bias with the product before it.

For up to `MOST_ROWS` rows, where loading the weight bounds the time, a Triton kernel reads the 2-bit codes. Bits 2 j
and 2 j + 1 of all bytes form one matrix, which is multiplied by every fourth column of a, so nothing is interleaved.
Any other product unpacks the codes, in a kernel of its own, and calls `scaled_mm`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.matmul.mm_tiles_triton import store
from lowbit_kernels.matmul.scaled_mm import scaled_mm
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton
from lowbit_kernels.weight_only.dequantize_cpu import rows_in_tiles

MOST_ROWS = 64
BYTES_ON_CPU = 2**20
"""Codes that a CPU unpacks at a time, a byte each: they stay in the L2 cache."""


@op(
    "empty(out_dtype, M, N)",
    flops="2 * M * N * K",
    a="int8 [M, K]; flatten leading dimensions first",
    packed="uint8 [N, W]",
    a_scale="float32 [M]",
    b_scale="float32 [1]",
    bias="float [N]",
    rules={
        "K > 4 * (W - 1)": "packed has {4 * W} codes a row, of which a has {K} columns; pad a with zeros"
    },
    out_dtype="float",
)
def ternary_mm(
    a: Tensor,
    packed: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product; see the module's docstring."""
    sums = (a.double() @ _unpacked(packed, a.shape[1]).double().t()).float()
    y = sums * a_scale[:, None] * b_scale
    return (y if bias is None else y + bias.float()).to(out_dtype)


reference = ternary_mm.reference


def _unpacked(packed: Tensor, columns: int) -> Tensor:
    """int8 [N, columns]; zeros beyond the packed columns."""
    lanes = torch.stack([(packed >> 2 * j) & 3 for j in range(4)], dim=-1)
    codes = lanes.flatten(1).view(torch.int8) - 2
    return F.pad(codes[:, :columns], (0, max(columns - codes.shape[1], 0)))


@jit
def _unpacking(
    packed,  # uint8 [n, width], row stride packed_stride
    out,  # int8 [n, columns], contiguous
    width,
    columns,
    packed_stride,
    BLOCK: tl.constexpr,  # bytes of a row per program
):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(packed + row * packed_stride + byte, mask=byte < width, other=170)  # zeros
    lane = tl.arange(0, 4)
    values = ((codes.to(tl.int32)[:, None] >> (2 * lane)[None, :]) & 3) - 2
    element = byte[:, None] * 4 + lane[None, :]
    tl.store(out + row * columns + element, values.to(tl.int8), mask=element < columns)


def _unpack_on_gpu(packed: Tensor, columns: int) -> Tensor:
    """The same as `_unpacked`, by a Triton kernel."""
    packed = packed if packed.stride(1) == 1 else packed.contiguous()
    out = packed.new_empty((packed.shape[0], columns), dtype=torch.int8)
    block = min(1024, triton.next_power_of_2(triton.cdiv(columns, 4)))
    with torch.cuda.device_of(packed):
        _unpacking[(packed.shape[0], triton.cdiv(columns, 4 * block))](
            packed, out, packed.shape[1], columns, packed.stride(0), BLOCK=block
        )
    return out


@jit
def _kernel(
    a,  # int8 [4, m, width]: column 4 i + j is a[j, :, i]
    packed,  # uint8 [n, width], row stride packed_stride
    out,  # [m, n], contiguous
    a_scale,
    b_scale,
    bias,  # unused unless HAS_BIAS
    m,
    n,
    width,
    packed_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < m, columns < n
    a_rows = a + rows[:, None] * width
    packed_rows = packed + columns.to(tl.int64)[:, None] * packed_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in tl.range(0, width, BLOCK_BYTES):
        byte = start + tl.arange(0, BLOCK_BYTES)
        inside = column_inside[:, None] & (byte < width)[None, :]
        codes = tl.load(packed_rows + byte[None, :], mask=inside, other=0)
        for lane in tl.static_range(4):
            # Beyond the last element, bits that are not a code are multiplied by a zero of a.
            x_inside = row_inside[:, None] & (byte < width)[None, :]
            x = tl.load(a_rows + lane * m * width + byte[None, :], mask=x_inside, other=0)
            weight = ((codes >> (2 * lane)) & 3).to(tl.int8) - 2
            sums = tl.dot(x, tl.trans(weight.to(tl.int8)), sums, out_dtype=tl.int32)
    row_scale = tl.load(a_scale + rows, mask=row_inside, other=0)
    result = sums.to(tl.float32) * row_scale[:, None] * tl.load(b_scale)
    store(out, result, bias, rows, columns, m, n, HAS_BIAS)


@ternary_mm.kernel
def _launch(a, packed, a_scale, b_scale, bias, out_dtype) -> Tensor:
    m, n = a.shape[0], packed.shape[0]
    if m > MOST_ROWS or not runs_on(a.device) or 0 in (m, n, packed.shape[1]):
        ran("ternary_mm", "unpacked")
        columns = -(-a.shape[1] // 16) * 16
        a = F.pad(a, (0, columns - a.shape[1]))
        if a.device.type == "cpu" and n * columns > BYTES_ON_CPU:
            return _in_tiles(a, packed, a_scale, b_scale, bias, out_dtype)
        unpack = _unpack_on_gpu if runs_on(a.device) and packed.numel() else _unpacked
        codes = unpack(packed, columns)
        return scaled_mm(a, codes, a_scale, b_scale, bias=bias, out_dtype=out_dtype)
    ran("ternary_mm", "triton")
    packed = packed if packed.stride(1) == 1 else packed.contiguous()
    width = packed.shape[1]
    a = F.pad(a, (0, 4 * width - a.shape[1]))  # cuts a where it is longer
    a = a.reshape(m, width, 4).permute(2, 0, 1).contiguous()
    out = a.new_empty((m, n), dtype=stored_dtype(out_dtype, a.device))
    block_m, block_n = max(16, triton.next_power_of_2(m)), 32
    with torch.cuda.device_of(a):
        _kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
            a,
            packed,
            out,
            a_scale.contiguous(),
            b_scale,
            a_scale if bias is None else bias.contiguous(),
            m,
            n,
            width,
            packed.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_BYTES=128,
            num_warps=4,
            num_stages=3,
        )
    return out.to(out_dtype)


def _in_tiles(a, packed, a_scale, b_scale, bias, out_dtype) -> Tensor:
    """The same without memory for all codes, which the system would have to clear in each call. a: int8 [M, K16]."""
    out = a.new_empty((a.shape[0], packed.shape[0]), dtype=out_dtype)
    for rows in rows_in_tiles(packed.shape[0], BYTES_ON_CPU // a.shape[1]):
        codes = _unpacked(packed[rows], a.shape[1])
        own = None if bias is None else bias[rows]
        out[:, rows] = scaled_mm(a, codes, a_scale, b_scale, bias=own, out_dtype=out_dtype)
    return out
