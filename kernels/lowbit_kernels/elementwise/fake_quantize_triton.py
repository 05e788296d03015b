"""``fake_quantize``, its codes, gradients and mask in Triton, for GPUs and for Triton's interpreter.

`lowbit_kernels.elementwise.fake_quantize` has the formulas, and says which elements a program reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbit_kernels.quantize.quantize_rowcol_triton import rounded_to_float8
from lowbit_kernels.quantize.quantize_rows import extremes
from lowbit_kernels.runtime.library import FLOATS
from lowbit_kernels.runtime.triton_runtime import jit, launch, stored_dtype, tl, triton

if TYPE_CHECKING:
    from lowbit_kernels.elementwise.grid import Grid

MOST_KEPT = 16384
"""Elements of a block that a Triton program keeps in registers."""
SMALL_TILE = 2048
"""Elements of the short blocks that one program computes."""


@jit
def _divide(a, b: tl.constexpr):
    return tl.div_rn(a, tl.full(a.shape, b, tl.float32))


@jit
def _to_dtype(x, DTYPE: tl.constexpr):
    """x rounded to float32 (0), bfloat16 (1) or float16 (2), as float32."""
    if DTYPE == 1:  # on its bits, because Triton's interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, (bits & -65536).to(tl.float32, bitcast=True), x)
    elif DTYPE == 2:
        x = x.to(tl.float16).to(tl.float32)
    return x


@jit
def _nearest(q, OTHERWISE: tl.constexpr):
    """q, a product, rounded to an integer within -1024 .. 1024; OTHERWISE for NaN. The clamp between the product and
    the sum keeps compilers from fusing them."""
    q = tl.where(q == q, tl.minimum(tl.maximum(q, -1024.0), 1024.0), OTHERWISE)
    return (q + 12582912.0) - 12582912.0  # 1.5 * 2**23, whose unit in the last place is 1


@jit
def _rounded_to_e2m1(q):
    """q, clamped to -6 .. 6, rounded to E2M1. NaN stays.

    Adding and subtracting 1.5 · 2**22 · p in float32 rounds to multiples of p / 2; p is the power of two at or below
    |q|, and at least 1.
    """
    magnitude = tl.minimum(tl.abs(q), 6.0, propagate_nan=tl.PropagateNan.ALL)
    power = magnitude.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(power + 0xB400000, 0x4AC00000).to(tl.float32, bitcast=True)
    rounded = ((magnitude + power) - power).to(tl.int32, bitcast=True)
    sign = q.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded | sign).to(tl.float32, bitcast=True)


@jit
def _ends(x, MAGNITUDE: tl.constexpr):
    """The ends of x as `extremes` gives them. With MAGNITUDE, both are the bits of the magnitudes."""
    if MAGNITUDE:
        low = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        high = low
    else:
        low, high = extremes(x)
    return low, high


@jit
def _stored(
    largest,  # bits of the largest magnitudes; those of NaN are the largest
    global_scale,
    matrix,  # of each block
    exists,
    MAPPING: tl.constexpr,
    SCALES: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Scales of microscaled formats, and what stands for their zero points."""
    if SCALES == "e8m0":
        EXPONENT: tl.constexpr = 2 if HIGH == 6.0 else 8 if HIGH == 448.0 else 15
        exponent = (largest >> 23) - EXPONENT
        if MAPPING == "symmetric_no_clipping_err":
            # the mantissa of 7, and the one after that of 448 and of 57,344
            END: tl.constexpr = 0x600000 if HIGH == 6.0 else 0x600001
            exponent += ((largest & 0x7FFFFF) >= END).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, 1), 254)
        s = (exponent << 23).to(tl.float32, bitcast=True)
        s = tl.where(largest >= 0x7F800000, float("nan"), s)
    else:
        whole = tl.load(global_scale + matrix, mask=exists, other=1)
        wanted = _divide(largest.to(tl.float32, bitcast=True), HIGH) * whole
        stored = tl.minimum(tl.maximum(wanted, 0.001953125), 448.0)
        stored = rounded_to_float8(stored, stored, False, 448.0)
        s = tl.div_rn(tl.where(wanted == wanted, stored, wanted), whole)
    return s, s


@jit
def _chosen(
    low_bits,
    high_bits,
    MAPPING: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
):
    """Scale and zero point, both float32, from the bits of the extremes."""
    negative = low_bits.to(tl.float32, bitcast=True)
    positive = high_bits.to(tl.float32, bitcast=True)
    if MAPPING == "symmetric" or MAPPING == "half_integer":
        s = _divide(tl.maximum(negative, positive), (HIGH - LOW) / 2)
    elif MAPPING == "symmetric_no_clipping_err":
        s = tl.maximum(_divide(negative, MID - LOW), _divide(positive, HIGH - MID))
    else:
        span = positive + negative
        apart = _divide(positive, HIGH - LOW) + _divide(negative, HIGH - LOW)
        s = tl.where(span == float("inf"), apart, _divide(span, HIGH - LOW))
    LEAST: tl.constexpr = 2.0**-24 if SCALE_DTYPE == 2 else 2.0**-126
    s = _to_dtype(tl.maximum(s, LEAST), SCALE_DTYPE)
    s = tl.where(tl.maximum(low_bits, high_bits) > 0x7F800000, float("nan"), s)
    if MAPPING == "asymmetric":
        z = LOW - _nearest(tl.div_rn(-negative, s), 0.0)
        z = tl.minimum(tl.maximum(z, LOW), HIGH)
    elif MAPPING == "float_zero_point":
        wide = s.to(tl.float64) * (MID - LOW) - negative.to(tl.float64)
        z = _to_dtype(wide.to(tl.float32), SCALE_DTYPE)
    elif MAPPING == "half_integer":
        z = _to_dtype(s * 0.5, SCALE_DTYPE)
    else:
        z = s * 0 + MID
        z = tl.where(z == z, z, MID)
    return s, z


@jit
def _round(
    x,  # [blocks, elements]
    scale,  # [blocks]
    zero,
    ZERO: tl.constexpr,
    FLOAT_BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    MARGIN: tl.constexpr,  # by which a code inside may exceed the range
):
    """Codes before the clamp (those far outside: nearer), where they are inside, codes after it, and values."""
    s, z = scale[:, None], zero[:, None]
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    if FLOAT_BITS != 0:
        code = x * inverse
        if FLOAT_BITS == 4:
            own = _rounded_to_e2m1(code)
        else:
            own = tl.minimum(tl.maximum(code, LOW), HIGH)
            own = rounded_to_float8(own, code, False, HIGH)
            own = tl.where(code == code, own, code)
        value = own * s
    elif ZERO == 2:
        wide_s, wide_z = s.to(tl.float64), z.to(tl.float64)
        start = (wide_s * (LOW - MID) + wide_z).to(tl.float32)
        code = _nearest((x - start) * inverse, MID - LOW) + LOW
        own = tl.minimum(tl.maximum(code, LOW), HIGH)
        value = (wide_s * (own - MID).to(tl.float64) + wide_z).to(tl.float32)
    else:
        code = _nearest(x * inverse, 0.0)
        if ZERO == 1:
            code += z
        own = tl.minimum(tl.maximum(code, LOW), HIGH)
        value = (own - z) * s if ZERO == 1 else own * s
    inside = (code >= LOW - MARGIN) & (code <= HIGH + MARGIN)
    return code, inside, own, value


@jit
def _place(groups, total, BLOCKS: tl.constexpr):
    """Numbers of the program's blocks, their rows, their groups within the row, and whether they exist."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (block // groups).to(tl.int64)
    return block, row, block % groups, block < total


@jit
def _tile(row, group, exists, start, columns, stride, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Offsets of SIZE elements of each block from `start` on, and a mask."""
    element = start + tl.arange(0, SIZE)
    column = group[:, None] * GROUP + element[None, :]
    mask = exists[:, None] & (element < GROUP)[None, :] & (column < columns)
    return row[:, None] * stride + column, mask


@jit
def _loaded(x, row, group, exists, start, columns, stride, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """These elements, float32, and 0 where there are none."""
    at, mask = _tile(row, group, exists, start, columns, stride, GROUP, SIZE)
    return tl.load(x + at, mask=mask, other=0).to(tl.float32)


@jit
def _given(scale, zero, block, exists, ZERO: tl.constexpr):
    s = tl.load(scale + block, mask=exists, other=1).to(tl.float32)
    z = s * 0
    if ZERO != 0:
        z = tl.load(zero + block, mask=exists, other=0).to(tl.float32)
    return s, z


@jit
def _store_bits(
    bits,
    inside,  # [BLOCKS, SIZE], elements of the blocks from `start` on
    block,
    exists,
    start,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    BYTES: tl.constexpr = (GROUP + 7) // 8
    bit = 1 << (tl.arange(0, SIZE) % 8)
    set_bits = tl.where(inside, bit[None, :], 0)
    packed = tl.sum(tl.reshape(set_bits, (BLOCKS, SIZE // 8, 8)), 2)
    byte = start // 8 + tl.arange(0, SIZE // 8)
    place = block.to(tl.int64)[:, None] * BYTES + byte[None, :]
    tl.store(bits + place, packed.to(tl.uint8), mask=exists[:, None] & (byte < BYTES)[None, :])


@jit
def _ends_of(
    x,
    row,
    group,
    exists,
    columns,
    stride,
    MAGNITUDE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """`_ends` of blocks that are read in parts."""
    low = tl.zeros((BLOCKS, SIZE), tl.int32)
    high = tl.zeros((BLOCKS, SIZE), tl.int32)
    for start in tl.range(0, GROUP, SIZE):
        found = _loaded(x, row, group, exists, start, columns, stride, GROUP, SIZE)
        negative, positive = _ends(found, MAGNITUDE)
        low = tl.maximum(low, negative)
        high = tl.maximum(high, positive)
    return low, high


@jit
def _store_parameters(scale, zero, s, z, block, exists, ZERO: tl.constexpr):
    tl.store(scale + block, s.to(scale.dtype.element_ty), mask=exists)
    if ZERO == 1:
        tl.store(zero + block, z.to(tl.int32).to(zero.dtype.element_ty), mask=exists)
    elif ZERO == 2:
        tl.store(zero + block, z.to(zero.dtype.element_ty), mask=exists)


@jit
def _forward(
    x,
    scale,  # read if GIVEN, written if CODES
    zero,  # the same, unused unless ZERO
    global_scale,  # unused unless SCALES is "e4m3"
    out,  # values; codes before the clamp if CODES
    bits,  # unused unless INSIDE
    columns,
    groups,  # of a row
    total,  # blocks
    stride,  # of a row of x
    matrix,  # blocks for which `global_scale` has a number
    GIVEN: tl.constexpr,
    CODES: tl.constexpr,
    INSIDE: tl.constexpr,
    MAPPING: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT_BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    MARGIN: tl.constexpr,
    BEYOND: tl.constexpr,  # steps that codes may lie beyond the range
    SCALE_DTYPE: tl.constexpr,
    SCALES: tl.constexpr,
    MAGNITUDE: tl.constexpr,  # scales depend on the largest magnitude alone
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,  # SIZE holds a whole block
):
    block, row, group, exists = _place(groups, total, BLOCKS)
    if KEPT:
        values = _loaded(x, row, group, exists, 0, columns, stride, GROUP, SIZE)
    if GIVEN:
        s, z = _given(scale, zero, block, exists, ZERO)
    else:
        if KEPT:
            low, high = _ends(values, MAGNITUDE)
        else:
            low, high = _ends_of(
                x, row, group, exists, columns, stride, MAGNITUDE, GROUP, BLOCKS, SIZE
            )
        low, high = tl.max(low, 1), tl.max(high, 1)
        if SCALES == "float":
            s, z = _chosen(low, high, MAPPING, LOW, HIGH, MID, SCALE_DTYPE)
        else:
            s, z = _stored(high, global_scale, block // matrix, exists, MAPPING, SCALES, HIGH)
    if CODES:
        _store_parameters(scale, zero, s, z, block, exists, ZERO)
    for start in tl.range(0, GROUP, SIZE):
        to, mask = _tile(row, group, exists, start, columns, columns, GROUP, SIZE)
        if not KEPT:
            values = _loaded(x, row, group, exists, start, columns, stride, GROUP, SIZE)
        code, inside, _, value = _round(values, s, z, ZERO, FLOAT_BITS, LOW, HIGH, MID, MARGIN)
        if CODES:
            value = tl.minimum(tl.maximum(code, LOW - BEYOND), HIGH + BEYOND).to(tl.int32)
        tl.store(out + to, value.to(out.dtype.element_ty), mask=mask)
        if INSIDE:
            _store_bits(bits, inside & mask, block, exists, start, GROUP, BLOCKS, SIZE)


@jit
def _gradients(
    grad,
    x,
    scale,
    zero,  # unused unless ZERO
    grad_x,
    grad_scale,
    grad_zero,
    columns,
    groups,
    total,
    stride,
    grad_stride,
    CODE_OF_Z: tl.constexpr,
    ZERO: tl.constexpr,
    FLOAT_BITS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MID: tl.constexpr,
    MARGIN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    block, row, group, exists = _place(groups, total, BLOCKS)
    s, z = _given(scale, zero, block, exists, ZERO)
    of_scale = tl.zeros((BLOCKS, SIZE), tl.float32)
    of_zero = tl.zeros((BLOCKS, SIZE), tl.float32)
    for start in tl.range(0, GROUP, SIZE):
        values = _loaded(x, row, group, exists, start, columns, stride, GROUP, SIZE)
        g = _loaded(grad, row, group, exists, start, columns, grad_stride, GROUP, SIZE)
        _, inside, own, value = _round(values, s, z, ZERO, FLOAT_BITS, LOW, HIGH, MID, MARGIN)
        distance = (value - values) / s[:, None]
        of_scale += g * tl.where(inside, distance, own - CODE_OF_Z)
        of_zero += tl.where(inside, 0.0, g)
        to, mask = _tile(row, group, exists, start, columns, columns, GROUP, SIZE)
        kept = tl.where(inside, g, 0.0)
        tl.store(grad_x + to, kept.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(grad_scale + block, tl.sum(of_scale, 1), mask=exists)
    tl.store(grad_zero + block, tl.sum(of_zero, 1), mask=exists)


@jit
def _kept_bits(
    bits, block, exists, start, GROUP: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr
):
    """True for each element of these blocks, from `start` on, that is inside [BLOCKS, SIZE]."""
    BYTES: tl.constexpr = (GROUP + 7) // 8
    byte = start // 8 + tl.arange(0, SIZE // 8)
    place = block.to(tl.int64)[:, None] * BYTES + byte[None, :]
    found = tl.load(bits + place, mask=exists[:, None] & (byte < BYTES)[None, :], other=0)
    each = (found.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(each, (BLOCKS, SIZE)) != 0


@jit
def _zero_outside(
    grad,
    bits,
    out,
    columns,
    groups,
    total,
    stride,  # of a row of grad
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    block, row, group, exists = _place(groups, total, BLOCKS)
    for start in tl.range(0, GROUP, SIZE):
        kept = _kept_bits(bits, block, exists, start, GROUP, BLOCKS, SIZE)
        at, mask = _tile(row, group, exists, start, columns, stride, GROUP, SIZE)
        g = tl.load(grad + at, mask=mask, other=0)
        to, mask = _tile(row, group, exists, start, columns, columns, GROUP, SIZE)
        tl.store(out + to, tl.where(kept, g, 0.0).to(out.dtype.element_ty), mask=mask)


def _tiling(columns: int, group_size: int, total: int) -> dict[str, int]:
    """Blocks of a program and elements of each that it holds at once."""
    size = max(8, min(triton.next_power_of_2(min(group_size, columns)), MOST_KEPT))
    blocks = max(1, min(SMALL_TILE // size, triton.next_power_of_2(total)))
    return {
        "BLOCKS": blocks,
        "SIZE": size,
        "num_warps": 4 if size * blocks <= 2048 else 8 if size <= 8192 else 16,
    }


def _constants(grid: Grid) -> dict[str, Any]:
    return {
        "ZERO": grid.zero,
        "FLOAT_BITS": grid.float_bits,
        "LOW": float(grid.low),
        "HIGH": float(grid.high),
        "MID": float(grid.mid),
        "MARGIN": grid.limits[1] - grid.high,
    }


def _rows_of_blocks(group_size: int, *tensors: Tensor) -> tuple[int, ...]:
    """Columns, blocks of a row, and the strides of rows. Dense rows of whole blocks count as rows of one block each, so
    that the kernel need not divide a block's number by the blocks of a row."""
    columns = tensors[0].shape[1]
    if columns % group_size == 0 and all(t.is_contiguous() for t in tensors):
        return group_size, 1, *(group_size for _ in tensors)
    return columns, -(-columns // group_size), *(t.stride(0) for t in tensors)


def _dense_rows(x: Tensor) -> Tensor:
    return _as_read(x if x.stride(1) == 1 else x.contiguous())


def _as_read(x: Tensor) -> Tensor:
    """The interpreter (triton 3.7) also misreads subnormal numbers of bfloat16."""
    return x.to(stored_dtype(x.dtype, x.device))


def _launch_forward(
    op: str,
    operands: Sequence[Tensor | None],
    results: Sequence[Tensor],
    tensors: tuple[Tensor, ...],
    group_size: int,
    grid: Grid,
    scale_dtype: torch.dtype,
    flags: dict[str, Any],
) -> None:
    """Launch `_forward` for `op`; `tensors`: x, scale, zero, global_scale, out and bits as the kernel takes them."""
    x, groups = tensors[0], -(-tensors[0].shape[1] // group_size)
    rows, columns = x.shape
    total = rows * groups
    matrix = rows // max(tensors[3].shape[0], 1) * groups if grid.scales == "e4m3" else 1
    columns, groups, stride = _rows_of_blocks(group_size, x)
    tiling = _tiling(columns, group_size, total)
    launch(
        op,
        operands,
        results,
        _forward,
        triton.cdiv(total, tiling["BLOCKS"]),
        (*tensors, columns, groups, total, stride, matrix),
        {
            **flags,
            "MAPPING": grid.mapping,
            "SCALE_DTYPE": FLOATS.index(scale_dtype),
            "SCALES": grid.scales,
            "MAGNITUDE": grid.finds_magnitudes,
            "GROUP": group_size,
            "KEPT": tiling["SIZE"] >= min(group_size, columns),
            **_constants(grid),
            **tiling,
        },
    )


def quantize(
    x, scale, zero_point, group_size, grid, scale_dtype, dtype, inside, global_scale
) -> tuple[Tensor, Tensor]:
    """``lowbit::fake_quantize``; the arguments have been checked, R and C are > 0."""
    operands, shape = (x, scale, zero_point, None, global_scale), x.shape
    x = _dense_rows(x if x.ndim == 2 else x.reshape(-1, shape[-1]))
    out = x.new_empty(shape, dtype=stored_dtype(dtype, x.device))
    blocks = (*shape[:-1], -(-shape[-1] // group_size), -(-group_size // 8))
    bits = x.new_empty(blocks if inside else (0,), dtype=torch.uint8)
    scales = x if scale is None else _as_read(scale.contiguous())
    zeros = x if zero_point is None else _as_read(zero_point.contiguous())
    flags: dict[str, Any] = {"GIVEN": scale is not None, "CODES": False, "INSIDE": inside}
    flags["BEYOND"] = 0
    own = x if global_scale is None else global_scale.contiguous()
    tensors, how = (x, scales, zeros, own, out, bits), (group_size, grid, scale_dtype, flags)
    _launch_forward("fake_quantize", operands, (out, bits), tensors, *how)
    return out.to(dtype), bits


def codes(
    x, group_size, grid, scale_dtype, code_dtype, zero_dtype, beyond
) -> tuple[Tensor, Tensor, Tensor]:
    """``lowbit::fake_quantize_codes``; the arguments have been checked, R and C are > 0.
    `zero_dtype`: None where the grid has no zero points."""
    operand, x = x, _dense_rows(x)
    rows, columns = x.shape
    blocks = rows, -(-columns // group_size)
    out = x.new_empty((rows, columns), dtype=code_dtype)
    scale = x.new_empty(blocks, dtype=stored_dtype(scale_dtype, x.device))
    kind = torch.int8 if zero_dtype is None else stored_dtype(zero_dtype, x.device)
    zero = x.new_empty((0,) if zero_dtype is None else blocks, dtype=kind)
    flags: dict[str, Any] = {"GIVEN": False, "CODES": True, "INSIDE": False}
    flags["BEYOND"] = beyond
    tensors, how = (x, scale, zero, x, out, out), (group_size, grid, scale_dtype, flags)
    _launch_forward("fake_quantize_codes", (operand,), (out, scale, zero), tensors, *how)
    return out, scale.to(scale_dtype), zero if zero_dtype is None else zero.to(zero_dtype)


def gradients(
    grad, x, scale, zero_point, group_size, grid, in_place=False
) -> tuple[Tensor, Tensor, Tensor]:
    """``lowbit::fake_quantize_gradients``; the arguments have been checked, R and C are > 0. `in_place`: grad_x takes
    the memory of `grad`, where it is contiguous."""
    rows, columns = x.shape
    groups = -(-columns // group_size)
    dtype, stored = grad.dtype, stored_dtype(grad.dtype, grad.device)
    operands = grad, x, scale, zero_point
    grad, x = _dense_rows(grad), _dense_rows(x)
    fits = in_place and grad.is_contiguous() and stored is dtype
    grad_x = grad if fits else grad.new_empty((rows, columns), dtype=stored)
    sums = [x.new_empty((rows, groups), dtype=torch.float32) for _ in range(2)]
    total = rows * groups
    columns, groups, *strides = _rows_of_blocks(group_size, x, grad)
    tiling = _tiling(columns, group_size, total)
    if tiling["SIZE"] > 2048:  # it reads each element once, however long the block is
        tiling |= {"SIZE": 2048, "num_warps": 4}
    scale = _as_read(scale.contiguous())
    zeros = scale if zero_point is None else _as_read(zero_point.contiguous())
    launch(
        "fake_quantize_gradients",
        operands,
        (grad_x, *sums),
        _gradients,
        triton.cdiv(total, tiling["BLOCKS"]),
        (*(grad, x, scale, zeros, grad_x, *sums), *(columns, groups, total, *strides)),
        {
            "CODE_OF_Z": float(grid.code_of_z),
            "GROUP": group_size,
            **_constants(grid),
            **tiling,
        },
    )
    return grad_x.to(dtype), sums[0], sums[1]


def zero_outside(grad: Tensor, inside: Tensor, group_size: int) -> Tensor:
    """`grad` [R, C] where `inside`, elsewhere 0; R and C are > 0."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows, columns = grad.shape
    out = grad.new_empty((rows, columns))
    total = rows * inside.shape[-2]
    columns, groups, stride = _rows_of_blocks(group_size, grad)
    tiling = _tiling(columns, group_size, total)
    if tiling["SIZE"] > 2048:
        tiling |= {"SIZE": 2048, "num_warps": 4}
    with torch.cuda.device_of(grad):
        _zero_outside[(triton.cdiv(total, tiling["BLOCKS"]),)](
            *(grad, inside, out, columns, groups, total, stride), GROUP=group_size, **tiling
        )
    return out
