"""``fake_quantize_descent`` in Triton. `lowbit_kernels.elementwise.fake_quantize` has the formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowbit_kernels.elementwise.fake_quantize_triton import (
    _as_read,
    _constants,
    _dense_rows,
    _nearest,
    _place,
    _round,
    _tile,
    _tiling,
    _to_dtype,
)
from lowbit_kernels.runtime.library import FLOATS
from lowbit_kernels.runtime.triton_runtime import jit, stored_dtype, tl, triton

if TYPE_CHECKING:
    from lowbit_kernels.elementwise.grid import Grid


@jit
def _stored(
    scale,
    zero,
    MAPPING: tl.constexpr,
    ZERO: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE_RATE: tl.constexpr,
    ZERO_RATE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
):
    """Scale and zero point, both float32, of their parameters."""
    s = _to_dtype(_to_dtype(scale, SCALE_DTYPE) * SCALE_RATE, SCALE_DTYPE)
    is_negative = s.to(tl.int32, bitcast=True) < 0
    s = tl.where(tl.abs(s) < LEAST, LEAST, tl.abs(s))
    s = tl.where(is_negative, -s, s)
    value = _to_dtype(_to_dtype(zero, SCALE_DTYPE) * ZERO_RATE, SCALE_DTYPE)
    if MAPPING == "asymmetric":
        z = _nearest((-value.to(tl.float64) / s.to(tl.float64)).to(tl.float32), 0.0)
        z = tl.minimum(tl.maximum(z, LOW), HIGH)
    elif MAPPING == "float_zero_point":
        z = value
    elif MAPPING == "half_integer":
        z = _to_dtype(s * 0.5, SCALE_DTYPE)
        z = tl.where(z == 0, tl.where(is_negative, -LEAST, LEAST), z)
        s = _to_dtype(z * 2, SCALE_DTYPE)
    elif ZERO == 1:
        z = s * 0 + MID
        z = tl.where(z == z, z, MID)
    else:
        z = s * 0
    return s, z


@jit
def _product(a, b):
    """a b, rounded before a sum takes it, which the clamp is for."""
    return tl.minimum(tl.maximum(a * b, -3.4028234663852886e38), 3.4028234663852886e38)


@jit
def _along(grad, step):
    """The step in the direction of the gradient's sign, to be subtracted: without one, -0.0 stays."""
    return tl.where(grad > 0, step, tl.where(grad < 0, -step, 0.0))


@jit
def _descend(
    grad, x, scale, zero, unit, out, rate, zero_rate, columns, groups, total, grad_stride, LEARNS_ZERO: tl.constexpr,
    MAPPING: tl.constexpr, CODE_OF_Z: tl.constexpr, ZERO: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    MID: tl.constexpr, LEAST: tl.constexpr, SCALE_RATE: tl.constexpr, ZERO_RATE: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block, row, group, exists = _place(groups, total, BLOCKS)
    own_scale = tl.load(scale + block, mask=exists, other=1.0)
    own_zero = own_scale * 0
    if LEARNS_ZERO:
        own_zero = tl.load(zero + block, mask=exists, other=0.0)
    s, z = _stored(
        own_scale, own_zero, MAPPING, ZERO, LOW, HIGH, MID, LEAST, SCALE_RATE, ZERO_RATE, SCALE_DTYPE
    )  # fmt: skip
    scale_sums = tl.zeros((BLOCKS, SIZE), tl.float32)
    zero_sums = tl.zeros((BLOCKS, SIZE), tl.float32)
    for start in tl.range(0, GROUP, SIZE):
        at, mask = _tile(row, group, exists, start, columns, columns, GROUP, SIZE)
        values = tl.load(x + at, mask=mask, other=0)
        at, mask = _tile(row, group, exists, start, columns, grad_stride, GROUP, SIZE)
        g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        _, inside, own, value = _round(values, s, z, ZERO, 0, LOW, HIGH, MID, 0.0)
        factor = tl.where(inside, (value - values) / s[:, None], own - CODE_OF_Z)
        scale_sums += g * factor
        zero_sums += tl.where(inside, 0.0, g)
    tl.debug_barrier()  # every thread has read the parameters
    own_unit = tl.load(unit + block, mask=exists, other=0.0)
    own_scale -= _along(tl.sum(scale_sums, 1), _product(own_unit, rate))
    tl.store(scale + block, own_scale, mask=exists)
    if LEARNS_ZERO:
        own_zero -= _along(tl.sum(zero_sums, 1), _product(own_unit, zero_rate))
        tl.store(zero + block, own_zero, mask=exists)
    new_s, new_z = _stored(
        own_scale, own_zero, MAPPING, ZERO, LOW, HIGH, MID, LEAST, SCALE_RATE, ZERO_RATE, SCALE_DTYPE
    )  # fmt: skip
    step = _product(tl.abs(s), rate)[:, None]
    for start in tl.range(0, GROUP, SIZE):
        to, mask = _tile(row, group, exists, start, columns, columns, GROUP, SIZE)
        values = tl.load(x + to, mask=mask, other=0)  # again, from a cache
        at, mask = _tile(row, group, exists, start, columns, grad_stride, GROUP, SIZE)
        g = tl.load(grad + at, mask=mask, other=0).to(tl.float32)
        _, inside, _, _ = _round(values, s, z, ZERO, 0, LOW, HIGH, MID, 0.0)
        moved = values - _along(tl.where(inside, g, 0.0), step)
        _, _, _, value = _round(moved, new_s, new_z, ZERO, 0, LOW, HIGH, MID, 0.0)
        tl.store(x + to, moved, mask=mask)
        tl.store(out + to, value.to(out.dtype.element_ty), mask=mask)


def descend(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    unit: Tensor,
    rate: float,
    zero_rate: float,
    group_size: int,
    grid: Grid,
    rates: tuple[float, float],
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    least: float,
) -> Tensor:
    """``lowbit::fake_quantize_descent``; the arguments have been checked, R and C are > 0. `rates`: those of
    parameters of scales and of zero points; `least`: the smallest scale."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    tiling = _tiling(columns, group_size, rows * groups)
    if tiling["SIZE"] > 2048:  # no more registers than threads have
        tiling |= {"SIZE": 2048, "num_warps": 4}
    out = x.new_empty((rows, columns), dtype=stored_dtype(dtype, x.device))
    constants = {
        name: value
        for name, value in _constants(grid).items()
        if name not in ("FLOAT_BITS", "MARGIN")
    }
    grad = _dense_rows(grad)
    with torch.cuda.device_of(x):
        _descend[(triton.cdiv(rows * groups, tiling["BLOCKS"]),)](
            *(
                grad,
                x,
                scale,
                scale if zero is None else zero,
                _as_read(unit),
                out,
                rate,
                zero_rate,
            ),
            *(columns, groups, rows * groups, grad.stride(0)),
            LEARNS_ZERO=zero is not None,
            MAPPING=grid.mapping,
            CODE_OF_Z=float(grid.code_of_z),
            LEAST=least,
            SCALE_RATE=rates[0],
            ZERO_RATE=rates[1],
            SCALE_DTYPE=FLOATS.index(scale_dtype),
            GROUP=group_size,
            **constants,
            **tiling,
        )
    return out.to(dtype)
