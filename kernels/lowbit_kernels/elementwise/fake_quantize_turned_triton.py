"""``fake_quantize`` of matrices that lie transposed in memory, as experts [E, K, N] rounded along K, and the gradient
that passes the rounding, in Triton.

Neighbours in memory belong to different blocks, so a program computes blocks of neighbouring rows. `inside` lies in the
same order: of [M, R, blocks of a row, bytes], rows follow each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit_kernels.elementwise.fake_quantize_triton import (
    _as_read,
    _chosen,
    _constants,
    _ends,
    _given,
    _kept_bits,
    _round,
    _store_bits,
    _stored,
)
from lowbit_kernels.runtime.library import FLOATS
from lowbit_kernels.runtime.triton_runtime import jit, launch, stored_dtype, tl, triton

if TYPE_CHECKING:
    from lowbit_kernels.elementwise.grid import Grid

TILE = 4096
"""Elements that a program computes."""
LONGEST = 256
"""Elements of the longest blocks."""


def takes(x: Tensor, group_size: int) -> bool:
    """True if x [R, C] or [M, R, C] lies transposed in memory, and its blocks are short."""
    if x.ndim not in (2, 3) or min(x.shape) == 0 or group_size > LONGEST:
        return False
    return x.stride(-2) == 1 and x.stride(-1) >= x.shape[-2] > 1


@jit
def _turned_tile(
    rows,
    columns,
    groups,
    chunks,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The place of a program's blocks, which belong to one matrix and one group: the matrix, the group, rows, columns,
    which rows exist, and which elements do."""
    matrix = (tl.program_id(0) // (chunks * groups)).to(tl.int64)
    group = tl.program_id(0) // chunks % groups
    row = tl.program_id(0) % chunks * BLOCKS + tl.arange(0, BLOCKS)
    element = tl.arange(0, SIZE)
    column = group * GROUP + element
    exists = row < rows
    mask = exists[:, None] & (element < GROUP)[None, :] & (column < columns)[None, :]
    return matrix, group, row, column.to(tl.int64), exists, mask


@jit
def _forward_turned(
    x,
    scale,  # [M, R, groups], read if GIVEN
    zero,  # the same, unused unless ZERO
    global_scale,  # unused unless SCALES is "e4m3"
    out,
    bits,  # unused unless INSIDE
    rows,
    columns,
    groups,
    chunks,  # programs of the rows of a group
    stride,  # of a column of x
    matrix_stride,
    rows_each,  # for which `global_scale` has a number
    GIVEN: tl.constexpr,
    INSIDE: tl.constexpr,
    MAPPING: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT_BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    MARGIN: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    SCALES: tl.constexpr,
    MAGNITUDE: tl.constexpr,  # scales depend on the largest magnitude alone
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    matrix, group, row, column, exists, mask = _turned_tile(
        rows, columns, groups, chunks, GROUP, BLOCKS, SIZE
    )
    at = matrix * matrix_stride + column[None, :] * stride + row[:, None]
    values = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    if GIVEN:
        s, z = _given(scale, zero, (matrix * rows + row) * groups + group, exists, ZERO)
    else:
        low, high = _ends(values, MAGNITUDE)
        low, high = tl.max(low, 1), tl.max(high, 1)
        if SCALES == "float":
            s, z = _chosen(low, high, MAPPING, LOW, HIGH, MID, SCALE_DTYPE)
        else:
            own = (matrix * rows + row) // rows_each
            s, z = _stored(high, global_scale, own, exists, MAPPING, SCALES, HIGH)
    _, inside, _, value = _round(values, s, z, ZERO, FLOAT_BITS, LOW, HIGH, MID, MARGIN)
    to = (matrix * columns + column[None, :]) * rows + row[:, None]
    tl.store(out + to, value.to(out.dtype.element_ty), mask=mask)
    if INSIDE:
        block = (matrix * groups + group) * rows + row
        _store_bits(bits, inside & mask, block, exists, 0, GROUP, BLOCKS, SIZE)


@jit
def _zero_outside_turned(
    grad,
    bits,
    out,
    rows,
    columns,
    groups,
    chunks,
    stride,
    matrix_stride,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    matrix, group, row, column, exists, mask = _turned_tile(
        rows, columns, groups, chunks, GROUP, BLOCKS, SIZE
    )
    block = (matrix * groups + group) * rows + row
    kept = _kept_bits(bits, block, exists, 0, GROUP, BLOCKS, SIZE)
    at = matrix * matrix_stride + column[None, :] * stride + row[:, None]
    to = (matrix * columns + column[None, :]) * rows + row[:, None]
    g = tl.load(grad + at, mask=mask, other=0)
    tl.store(out + to, tl.where(kept, g, 0.0).to(out.dtype.element_ty), mask=mask)


def _tiling(rows: int, group_size: int) -> dict[str, int]:
    size = max(8, triton.next_power_of_2(group_size))
    blocks = min(TILE // size, triton.next_power_of_2(rows))
    return {"BLOCKS": blocks, "SIZE": size, "num_warps": 4}


def _dense_columns(x: Tensor) -> Tensor:
    return x if x.stride(-2) == 1 else x.mT.contiguous().mT


def results(x: Tensor, group_size: int, dtype: torch.dtype, inside: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised values and `inside` of x, which `takes` accepts."""
    *lead, rows, columns = x.shape
    values = x.new_empty((*lead, columns, rows), dtype=dtype).mT
    if not inside:
        return values, x.new_empty(0, dtype=torch.uint8)
    shape = (*lead, -(-columns // group_size), rows, -(-group_size // 8))
    return values, x.new_empty(shape, dtype=torch.uint8).transpose(-3, -2)


def quantize(
    x: Tensor,
    scale: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    grid: Grid,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    inside: bool,
    global_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``lowbit::fake_quantize`` of x that `takes` accepts; the arguments have been checked.

    Args: those of the op; `grid` in place of its name.
    """
    operands, x = (x, scale, zero_point, None, global_scale), _dense_columns(_as_read(x))
    out, bits = results(x, group_size, stored_dtype(dtype, x.device), inside)
    rows, columns = x.shape[-2:]
    groups, matrices = -(-columns // group_size), x.shape[0] if x.ndim == 3 else 1
    scales = x if scale is None else _as_read(scale.contiguous())
    zeros = x if zero_point is None else _as_read(zero_point.contiguous())
    shared = x if global_scale is None else global_scale.contiguous()
    each = 1 if global_scale is None else rows * matrices // len(global_scale)
    tiling = _tiling(rows, group_size)
    chunks = triton.cdiv(rows, tiling["BLOCKS"])
    sizes = rows, columns, groups, chunks, x.stride(-1), x.stride(0) if x.ndim == 3 else 0, each
    launch(
        None,  # plans have contiguous results
        operands,
        (out, bits),
        _forward_turned,
        chunks * groups * matrices,
        (x, scales, zeros, shared, out, bits, *sizes),
        {
            **{"GIVEN": scale is not None, "INSIDE": inside, "MAPPING": grid.mapping},
            **{"SCALE_DTYPE": FLOATS.index(scale_dtype), "SCALES": grid.scales},
            "MAGNITUDE": grid.finds_magnitudes,
            "GROUP": group_size,
            **_constants(grid),
            **tiling,
        },
    )
    return out.to(dtype), bits


def zero_outside(grad: Tensor, inside: Tensor, group_size: int) -> Tensor:
    """`grad` [..., R, C] where `inside`, elsewhere 0, transposed in memory as the values of `quantize` are."""
    rows, columns = grad.shape[-2:]
    grad = _dense_columns(grad)
    out = torch.empty_like(grad.mT, memory_format=torch.contiguous_format).mT
    matrices, matrix_stride = (grad.shape[0], grad.stride(0)) if grad.ndim == 3 else (1, 0)
    tiling = _tiling(rows, group_size)
    chunks, groups = triton.cdiv(rows, tiling["BLOCKS"]), inside.shape[-2]
    with torch.cuda.device_of(grad):
        _zero_outside_turned[(chunks * groups * matrices,)](
            *(grad, inside, out, rows, columns, groups, chunks, grad.stride(-1), matrix_stride),
            GROUP=group_size,
            **tiling,
        )
    return out
