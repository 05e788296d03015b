"""Affine quantization: the one implementation that every flow of lowbit calls.

    code = clamp(round(x · (1/scale)) + zero_point, quant_min, quant_max)        x̂ = (code − zero_point) · scale

One (scale, zero_point) serves each block of `block_size`, which has the rank of the input and tiles it. The arithmetic
is float32 and rounds half to even. The order of operations is always the one above, because `x · (1/scale)` and
`x / scale` differ in the last bit and so, at ties, in the code.

`target_dtype` and the range define the number type: any integer range (int4 is `torch.int8` with −8..7), or float8,
where the cast rounds. NaN gets the code of the zero point; float8 and fake quantization keep NaN.
`choose_qparams_affine` gives a block with a NaN a scale of NaN, so the whole dequantized block is NaN.

A `LookupTable` is a number type like float8: codes are its values, in float32, and the cast takes the nearest one.

A zero point of integer dtype is a code. A zero point of floating dtype is a value in the input's own domain, the
tinygemm convention, with mid = (quant_min + quant_max + 1)/2:

    code = clamp(round((x − min) · (1/scale)) + quant_min, …),  min = zero_point − (mid − quant_min) · scale
    x̂ = (code − mid) · scale + zero_point

The half-integer grid is the case zero_point = scale/2: x̂ = (code − mid + ½) · scale. Two bits give
{−1.5, −.5, .5, 1.5} · scale, one bit {−.5, .5} · scale. The grid is symmetric around zero and does not hold zero
(ParetoQ, arXiv 2502.02631).

A scale may be negative. The formulas are the same, and the codes run the other way. Signed codes have one code more
below zero than above, and a negative scale puts it at the side of the positive values. `choose_qparams_affine` gives
positive scales; `lowbit.numerics.search` gives both.

Source: Jacob et al., arXiv 1712.05877, and the conventions of `torch.ops.quantized_decomposed` and torch.ao's
observers, to which this module is bit-exact except for exact ties, NaN, and the ends of int32, where those wrap
(tests/numerics/test_affine_against_torch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowbit.numerics.blocks import block_counts, in_blocks, one_a_block, within
from lowbit.numerics.code_range import (
    CodeType,
    check_zero_point_dtype,
    clamped,
    is_value,
    quant_range,
    within_range,
)
from lowbit.numerics.float32 import divide, multiply_add, nan_to, round_to_dtype
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.settings import check_flag, check_nonnegative
from lowbit.numerics.straight_through import StraightThrough

MappingName = Literal[
    "symmetric", "symmetric_no_clipping_err", "asymmetric", "float_zero_point", "half_integer"
]
MAPPINGS = get_args(MappingName)
VALUE_ZERO_POINT: tuple[MappingName, ...] = ("float_zero_point", "half_integer")
"""The mappings whose zero points are values in the input's domain, in a floating dtype."""


def check_input(input: Tensor) -> None:
    """Raise ValueError for integers and complex numbers."""
    if not input.dtype.is_floating_point:
        raise ValueError(
            f"only real floating-point tensors can be quantized, got {input.dtype}; convert it, e.g. with .float()"
        )


def absmax_of_blocks(input: Tensor, block_size: Sequence[int]) -> Tensor:
    """The largest magnitude of each block: float32, blocks along each dimension."""
    min_neg, max_pos = _min_max(input, block_size, None, None)
    return torch.maximum(-min_neg, max_pos)


def smallest_scale(scale_dtype: torch.dtype) -> float:
    """The smallest scale that `scale_dtype` represents and whose reciprocal is finite in float32."""
    if scale_dtype is torch.float16:
        return 2.0**-24
    return max(torch.finfo(scale_dtype).tiny, torch.finfo(torch.float32).tiny)


def _min_max(
    input: Tensor, block_size: Sequence[int], min_val: Tensor | None, max_val: Tensor | None
) -> tuple[Tensor, Tensor]:
    """float32 minimum and maximum of each block, stretched to include zero, of shape [n0, n1, …]."""
    if (min_val is None) != (max_val is None):
        raise ValueError("give both min_val and max_val, or neither")
    if min_val is None or max_val is None:
        blocks = in_blocks(input.float(), block_size)
        inner = within(blocks)
        min_val = blocks.amin(inner) if inner else blocks
        max_val = blocks.amax(inner) if inner else blocks
    else:
        counts = block_counts(input.shape, block_size)
        min_val = one_a_block(min_val.float(), counts, "min_val").reshape(counts)
        max_val = one_a_block(max_val.float(), counts, "max_val").reshape(counts)
    return min_val.clamp(max=0.0), max_val.clamp(min=0.0)


def _symmetric_scale(
    mapping: MappingName, min_neg: Tensor, max_pos: Tensor, low: float, high: float, mid: float
) -> Tensor:
    if mapping != "symmetric_no_clipping_err":
        return divide(torch.maximum(-min_neg, max_pos), float(high - low) / 2)
    if high == mid:
        raise ValueError(
            f"symmetric_no_clipping_err has no positive code in {low}..{high}; use asymmetric"
        )
    return torch.maximum(divide(min_neg, float(low - mid)), divide(max_pos, float(high - mid)))


def _span_scale(min_neg: Tensor, max_pos: Tensor, levels: float) -> Tensor:
    """(max − min)/levels. Where max − min overflows float32, it divides before it subtracts."""
    span = max_pos - min_neg
    return torch.where(
        span.isinf(), divide(max_pos, levels) - divide(min_neg, levels), divide(span, levels)
    )


class Grid(NamedTuple):
    """The codes `low` to `high` that blocks choose their scales for. A `Spec` computes its grid once."""

    mapping: MappingName
    dtype: CodeType
    low: float
    high: float
    mid: float
    """The zero point of a symmetric mapping."""
    has_values: bool
    """True if codes are values, as in float8 and tables."""
    zero_point_dtype: torch.dtype | None
    """None: the default of `choose_qparams_affine`."""


def unchecked_grid(
    mapping: MappingName,
    dtype: CodeType,
    low: float,
    high: float,
    zero_point_dtype: torch.dtype | None,
) -> Grid:
    """The grid of these codes. Args: those of `Grid`; the range of a table is its own."""
    if isinstance(dtype, LookupTable):
        low, high = quant_range(dtype, low, high)
    has_values = is_value(dtype)
    mid = 0 if has_values else (low + high + 1) // 2
    return Grid(mapping, dtype, low, high, mid, has_values, zero_point_dtype)


def grid_of(
    mapping: MappingName,
    target_dtype: CodeType,
    quant_min: float | None,
    quant_max: float | None,
    zero_point_dtype: torch.dtype | None,
) -> Grid:
    """The grid, after the checks of `choose_qparams_affine` that need neither input nor block size.

    Args: those of `choose_qparams_affine`.
    """
    if mapping not in MAPPINGS:
        raise ValueError(f"unknown mapping {mapping!r}; accepted: {', '.join(MAPPINGS)}")
    if is_value(target_dtype) and mapping != "symmetric":
        raise ValueError(
            f"{target_dtype} has no zero point: mapping must be 'symmetric', got {mapping!r}"
        )
    low, high = quant_range(target_dtype, quant_min, quant_max)
    grid = unchecked_grid(mapping, target_dtype, low, high, zero_point_dtype)
    if zero_point_dtype is not None and not grid.has_values:
        codes = None if mapping in VALUE_ZERO_POINT else (grid.mid, grid.mid)
        check_zero_point_dtype(
            zero_point_dtype, (low, high) if mapping == "asymmetric" else codes, mapping
        )
    return grid


def choose_qparams_affine(
    input: Tensor,
    mapping: MappingName,
    block_size: Sequence[int],
    target_dtype: CodeType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    eps: float | None = None,
    scale_dtype: torch.dtype = torch.float32,
    zero_point_dtype: torch.dtype | None = None,
    keepdim: bool = False,
    min_val: Tensor | None = None,
    max_val: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block of `input`. The range always includes zero.

    With min ≤ 0 ≤ max of the block and mid = (quant_min + quant_max + 1)//2:

    - "symmetric": scale = max|x| / ((quant_max − quant_min)/2), zero_point = mid. The positive end may clip.
    - "symmetric_no_clipping_err": scale = max(−min/(mid − quant_min), max/(quant_max − mid)), zero_point = mid.
    - "asymmetric": scale = (max − min)/(quant_max − quant_min), zero_point = clamp(quant_min − round(min/scale)).
    - "float_zero_point": the same scale, zero_point = min + scale · (mid − quant_min), floating.
    - "half_integer": the scale of "symmetric", zero_point = scale/2, floating. Neither end clips. The half is exact,
      except that float16 rounds the half of a scale below 2^−13 to a subnormal number.

    Args:
        input: real floating tensor of any shape. With `min_val` and `max_val` only its shape is used.
        mapping: one of those above.
        block_size: the tile that shares parameters, one entry a dimension; each divides that dimension.
        target_dtype: int8, uint8, int16, int32, or float8 or a `LookupTable` (symmetric only).
        quant_min, quant_max: the range of codes; None: all that `target_dtype` holds.
        eps: the smallest scale allowed, finite and not negative. Scales are never below the smallest number of
            `scale_dtype` whose reciprocal is finite, so all-zero blocks are safe.
        scale_dtype: dtype of the scale. The zero point is computed from the scale after rounding to it.
        zero_point_dtype: default int32, or `scale_dtype` for "float_zero_point" and "half_integer". It must hold every
            zero point that the mapping may choose: an integer dtype for codes, a floating one for these two.
        keepdim: keep a dimension that one block covers, as size 1 (shape: blocks along each dimension).
            Otherwise it is dropped: () per tensor, (N,) per row, (N, K/g) per group.
        min_val, max_val: observed range, one element a block, instead of `input`'s own.

    Returns:
        (scale, zero_point); zero_point is None for float8 and tables. A block with NaN or Inf has a NaN or Inf scale.

    Raises:
        ValueError: unknown mapping, integer or complex input, a block that does not tile, a bad range, a
            `zero_point_dtype` that cannot hold the zero point; a bad `eps`, a `min_val` above its `max_val`, a scale of
            finite values that is beyond the largest number of `scale_dtype` (not checked in compiled code).
    """
    if eps is not None:
        check_nonnegative("eps", eps)
    check_flag("keepdim", keepdim)
    checks = not (input.is_meta or torch.compiler.is_compiling())
    if checks and min_val is not None and max_val is not None:
        _check_order(min_val, max_val)
    scale, zero_point = chosen_qparams(
        input,
        grid_of(mapping, target_dtype, quant_min, quant_max, zero_point_dtype),
        block_size,
        eps=eps or 0.0,
        scale_dtype=scale_dtype,
        min_val=min_val,
        max_val=max_val,
    )
    if checks and bool(scale.isinf().any()):
        _check_reach(scale, *_min_max(input, block_size, min_val, max_val))
    if not keepdim:
        kept = [n for n, b in zip(scale.shape, block_size, strict=True) if b == 1 or n > 1]
        scale = scale.reshape(kept)
        zero_point = None if zero_point is None else zero_point.reshape(kept)
    return scale, zero_point


def _check_order(min_val: Tensor, max_val: Tensor) -> None:
    if bool((crossed := (min_val > max_val).flatten()).any()):
        first = int(crossed.nonzero()[0])
        ends = min_val.flatten()[first].item(), max_val.flatten()[first].item()
        raise ValueError(
            f"min_val {ends[0]} of block {first} is above its max_val {ends[1]}; give the smaller one as min_val"
        )


def _check_reach(scale: Tensor, min_neg: Tensor, max_pos: Tensor) -> None:
    """Raise ValueError for an infinite scale of a block whose ends are finite."""
    finite = min_neg.isfinite() & max_pos.isfinite()
    if bool((beyond := scale.isinf() & finite).any()):
        raise ValueError(
            f"{int(beyond.sum())} of {scale.numel()} scales are beyond {torch.finfo(scale.dtype).max:g}, the largest "
            f"number of scale_dtype={scale.dtype}: a block reaches from {min_neg[beyond][0].item():g} to "
            f"{max_pos[beyond][0].item():g}; take torch.bfloat16 or torch.float32"
        )


def chosen_qparams(
    input: Tensor,
    grid: Grid,
    block_size: Sequence[int],
    *,
    eps: float = 0.0,
    scale_dtype: torch.dtype = torch.float32,
    min_val: Tensor | None = None,
    max_val: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`choose_qparams_affine` with `keepdim`, without the checks for which the host waits for a GPU.

    Args: those of `choose_qparams_affine`. `grid`: of `grid_of`, or of a Spec.
    """
    check_input(input)
    mapping, _, low, high, mid, has_values, zero_point_dtype = grid
    least = max(smallest_scale(scale_dtype), eps)
    min_neg, max_pos = _min_max(input, block_size, min_val, max_val)
    zero_point: Tensor | None
    if mapping in ("symmetric", "symmetric_no_clipping_err", "half_integer"):
        scale = _symmetric_scale(mapping, min_neg, max_pos, low, high, mid)
        scale = round_to_dtype(scale.clamp(min=least), scale_dtype)
        zero_point = None
        if mapping == "half_integer":
            zero_point = half_step(scale, zero_point_dtype or scale_dtype)
        elif not has_values:
            zero_point = torch.full_like(scale, mid, dtype=zero_point_dtype or torch.int32)
    else:
        scale = _span_scale(min_neg, max_pos, float(high - low))
        scale = round_to_dtype(scale.clamp(min=least), scale_dtype)
        if mapping == "asymmetric":
            steps = nan_to(0.0, divide(min_neg, scale).round_())
            zero_point = clamped(low - steps, torch.int32, low, high)
            zero_point = zero_point.to(zero_point_dtype or torch.int32)
        else:
            zero_point = multiply_add(scale, mid - low, min_neg)
            zero_point = round_to_dtype(zero_point, zero_point_dtype or scale_dtype)
    return scale, zero_point


def scale_of_largest(
    input: Tensor, grid: Grid, block_size: Sequence[int], scale_dtype: torch.dtype
) -> Tensor:
    """The scale [n0, n1, …], of either sign, that puts the value of largest magnitude on the lowest code, or a coarser
    one by which no value of the other sign is over half a step beyond the codes.

    s = m / (low − mid) for this value m of a block, as llama.cpp's Q4_0 has it: m / −8 in 4 bits, which does not clip
    m. Where a value of the other sign exceeds 7.5 of these steps, |s| is its magnitude / 7.5. So the step is never
    coarser than that of "symmetric", max|x| / 7.5.

    Args:
        input: real floating, whole blocks.
        grid: of a symmetric mapping of integers.
        block_size, scale_dtype: as for `choose_qparams_affine`.
    """
    min_neg, max_pos = _min_max(input, block_size, None, None)
    steps = float(grid.mid - grid.low)
    larger, smaller = torch.maximum(-min_neg, max_pos), torch.minimum(-min_neg, max_pos)
    scale = torch.maximum(divide(larger, steps), divide(smaller, steps - 0.5))
    scale = round_to_dtype(scale.clamp(min=smallest_scale(scale_dtype)), scale_dtype)
    return torch.where(max_pos > -min_neg, -scale, scale)


def half_step(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """scale/2 in `dtype`: the zero points of the half-integer grid."""
    return round_to_dtype(scale.float() * 0.5, dtype)


def _to_grid(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: CodeType, low: float, high: float
) -> Tensor:
    """Codes before the clamp, as float32; `x` is blocked, `scale` and `zero_point` broadcast to it.

    NaN takes the code of the zero point, so that the cast is defined.
    """
    inverse = divide(torch.ones_like(scale), scale)
    if is_value(dtype):
        return x * inverse  # the cast rounds
    if zero_point is not None and zero_point.dtype.is_floating_point:
        mid = (low + high + 1) // 2
        min_val = multiply_add(scale, low - mid, zero_point)
        return nan_to(float(mid - low), ((x - min_val) * inverse).round_()) + low
    steps = nan_to(0.0, (x * inverse).round_())
    return steps if zero_point is None else steps + zero_point


def _from_grid(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, low: float, high: float
) -> Tensor:
    """Float32 values of clamped float32 codes."""
    if zero_point is None:
        return codes * scale.float()
    if zero_point.dtype.is_floating_point:
        return multiply_add(scale, codes - (low + high + 1) // 2, zero_point)
    return (codes - zero_point) * scale.float()


def round_to_grid(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: CodeType, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Codes, as float32, and values of `x`, to the bits of `quantize_affine` and `dequantize_affine`.

    `x` is float32; `scale` and `zero_point` broadcast to it. low..high has at most 16 bits.
    """
    codes = _to_grid(x, scale, zero_point, dtype, low, high).clamp_(low, high)
    if is_value(dtype):
        codes = clamped(codes, dtype, low, high).float()
    return codes, _from_grid(codes, scale, zero_point, low, high)


def _all_blocked(
    x: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    blocks = in_blocks(x, block_size)
    counts = blocks.shape[::2]
    scale = one_a_block(scale, counts)
    if zero_point is not None:
        zero_point = one_a_block(zero_point, counts, "zero_point")
    return blocks, scale, zero_point


def unclamped_codes(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: CodeType,
    quant_min: float | None = None,
    quant_max: float | None = None,
) -> Tensor:
    """round(x · (1/scale)) + zero_point before the clamp to the range: float32, in `input`'s shape, no NaN.

    A code outside quant_min..quant_max clips. Arguments and errors are those of `quantize_affine`. For float8 and
    tables the result is x · (1/scale), which the cast has yet to round; NaN stays NaN.
    """
    check_input(input)
    low, high = quant_range(dtype, quant_min, quant_max)
    blocks, scale, zero_point = _all_blocked(input.float(), block_size, scale, zero_point)
    return _to_grid(blocks, scale, zero_point, dtype, low, high).reshape(input.shape)


def quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: CodeType,
    quant_min: float | None = None,
    quant_max: float | None = None,
) -> Tensor:
    """Codes of `input`: same shape, dtype `output_dtype` (float32 values of a table), within quant_min..quant_max.

    Values beyond the range, infinities too, take the code at the nearest end. No integer code stands for NaN: it takes
    the code of the zero point (the middle code, if the zero point is a value). `fake_quantize_affine` keeps it, and
    `choose_qparams_affine` gives its block a scale of NaN. In float8 it stays NaN.

    Args:
        input: real floating tensor of any shape.
        block_size: the tile that shares parameters, one entry a dimension; each divides that dimension.
        scale, zero_point: one element a block, in any shape. A `zero_point` of None means 0.
        output_dtype: int8, uint8, int16, int32, or float8 or a `LookupTable`.
        quant_min, quant_max: the range of codes; None: all that `output_dtype` holds.

    Raises ValueError for integer or complex input, a block that does not tile, or a bad range.
    """
    low, high = quant_range(output_dtype, quant_min, quant_max)
    codes = unclamped_codes(input, block_size, scale, zero_point, output_dtype, low, high)
    return clamped(codes, output_dtype, low, high)


def dequantize_affine(
    codes: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of `codes`: (code − zero_point) · scale in float32, rounded once to `output_dtype`.

    Float32 rounds codes of int32 beyond 2^24. Codes in float32 are values of a `LookupTable`.

    Args:
        codes: those of `quantize_affine`.
        block_size, scale, zero_point: those that `quantize_affine` was given.
        quant_min, quant_max: the range of codes, which matters only for a floating zero point, whose formula names the
            middle of the range.
        output_dtype: a floating dtype.
    """
    low = high = 0.0
    if codes.dtype is not torch.float32:
        low, high = quant_range(codes.dtype, quant_min, quant_max)
    blocks, scale, zero_point = _all_blocked(codes, block_size, scale, zero_point)
    values = _from_grid(blocks.float(), scale, zero_point, low, high)
    return values.reshape(codes.shape).to(output_dtype)


def codes_and_values(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: CodeType,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """`unclamped_codes`, and `dequantize_affine` of the codes after the clamp: both float32, in `input`'s shape.

    Args: those of `rounded_affine`.
    """
    blocks, scale, zero_point = _all_blocked(input.float(), block_size, scale, zero_point)
    codes = _to_grid(blocks, scale, zero_point, dtype, low, high)
    own = clamped(codes, dtype, low, high).float()
    values = _from_grid(own, scale, zero_point, low, high)
    return codes.reshape(input.shape), values.reshape(input.shape)


@torch.no_grad()
def rounded_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: CodeType,
    low: float,
    high: float,
    clips: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The values of `fake_quantize_affine`, without gradient, and the mask of the codes that do not clip.

    Args: those of `fake_quantize_affine`; `low` and `high` are a range that `dtype` holds. With `clips=False` the mask
    is None. NaN stays NaN, which no product hides.
    """
    codes, values = codes_and_values(input, block_size, scale, zero_point, dtype, low, high)
    inside = within_range(codes, dtype, low, high) if clips else None
    return torch.where(input.isnan(), input, values.to(input.dtype)), inside


def fake_quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    quant_dtype: CodeType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    clips: bool = True,
) -> Tensor:
    """`dequantize_affine(quantize_affine(input))`, equal to the last bit, in `input`'s shape and dtype. NaN stays NaN,
    which integer codes cannot express.

    Differentiable in `input` by the straight-through estimator (arXiv 1308.3432): the gradient passes where the
    code, before the clamp, lies within the range, and is zero elsewhere. `scale` and `zero_point` are constants.

    Args:
        input, block_size, scale, zero_point, quant_min, quant_max: as for `lowbit.quantize_affine`.
        quant_dtype: its `output_dtype`.
        clips: False where the caller knows that no code lies beyond the range. Then backward needs no mask.
    """
    check_flag("clips", clips)
    check_input(input)
    low, high = quant_range(quant_dtype, quant_min, quant_max)
    values, inside = rounded_affine(
        input, block_size, scale, zero_point, quant_dtype, low, high, clips
    )
    return StraightThrough.apply(input, values, inside)
