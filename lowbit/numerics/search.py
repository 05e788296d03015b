"""Search the scale, and the zero point, with which each block loses least by rounding.

For each block of x the search minimises

    error = Σ h · (x − x̂)²    with x̂ = dequantize(quantize(x))

where x̂ is `lowbit.numerics.affine`'s, in float32, with scale and zero point rounded to the dtypes in which they are
stored. h is 1 or an importance, such as the mean square of each input channel (the diagonal of the Hessian of the
layer's output error). Each step keeps a result only in the blocks whose error it lowers:

1. The choice of `choose_qparams_affine` (min-max). So the error is never above that of min-max.
2. Ranges r · [min, max], with r from `SMALLEST_RATIO` to 1. "asymmetric" and "float_zero_point" move each end by a
   ratio of its own. The symmetric mappings of integers also try −scale. A range −2^(b−1) … 2^(b−1) − 1 has one code
   more below zero than above, and a negative scale puts it above, where the largest value may lie (llama.cpp's Q4_0
   does the same by d = max / −8). Then the ratios between the best one and its neighbours.
3. Least squares. With fixed codes c the best scale is Σ h x c / Σ h c². Where the zero point is free too, both come
   from the weighted linear regression of x on c. The new scale gives new codes, and so on (Lloyd, IEEE Trans. Inf.
   Theory 28, 1982).

Blocks of zeros, and blocks with NaN or infinities, keep the min-max choice. The search takes `CHUNK_ELEMENTS` at a
time. Beside the input it needs a few MB on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lowbit.numerics.affine import (
    VALUE_ZERO_POINT,
    MappingName,
    check_input,
    chosen_qparams,
    dequantize_affine,
    grid_of,
    half_step,
    quantize_affine,
    round_to_grid,
    smallest_scale,
)
from lowbit.numerics.blocks import block_counts, block_sums
from lowbit.numerics.code_range import CodeType, is_value, quant_range
from lowbit.numerics.float32 import round_to_dtype

Scales = Literal["minmax", "searched"]
"""How a conversion chooses scales."""
CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""Elements that are searched at once: few enough for a CPU's caches, and enough to occupy a GPU."""

SMALLEST_RATIO = {1: 0.05, 2: 0.1, 3: 0.2, 4: 0.3, 5: 0.5, 6: 0.7, 7: 0.8, 8: 0.88}
"""For each number of bits, the smallest range that is tried, as a share of min-max's. Optimal ranges of normal and
Student-t values (4 degrees of freedom) in groups of 32 to rows of 4,096 lie above."""
RATIOS = 16
END_RATIOS = 5
"""How many ratios are tried: of both ends together, and of each end by itself."""
FINE_STEPS = (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)
"""The ratios around the best one that are tried next, in steps between ratios."""
ROUNDS = 3
"""Rounds of least squares."""

MARGIN = 1 - 2.0**-13
"""An error has to fall by more than float32 sums are wrong by."""


def check_scales(scales: str | None, error: type[Exception] = ValueError) -> None:
    """Raise `error` unless `scales` is None or one of `Scales`."""
    if scales is not None and scales not in get_args(Scales):
        raise error(f"unknown scales {scales!r}; accepted: {', '.join(get_args(Scales))} or None")


class QParams(NamedTuple):
    """Scale and zero point [B, 1] as stored, of B blocks."""

    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class _SearchedFormat:
    """The grid that is searched: a mapping, a code range, and the dtypes of scale and zero point."""

    mapping: MappingName
    dtype: CodeType
    low: float
    high: float
    scale_dtype: torch.dtype
    zero_point_dtype: torch.dtype | None

    @property
    def has_values(self) -> bool:
        """True if codes are values: those of float8 or of a table."""
        return is_value(self.dtype)

    @property
    def bits(self) -> int:
        return 8 if self.has_values else max(round(math.log2(self.high - self.low + 1)), 1)

    @property
    def mid(self) -> float:
        return (self.low + self.high + 1) // 2

    @property
    def has_zero_at_zero(self) -> bool:
        """True if every zero point is the code 0."""
        return self.mapping.startswith("symmetric") and self.mid == 0

    @property
    def may_be_negative(self) -> bool:
        """True if a scale of the other sign gives other values."""
        return self.mapping.startswith("symmetric") and not self.has_values

    def min_max(self, x: Tensor, block_size: Sequence[int], *ends: Tensor) -> QParams:
        """The choice of `choose_qparams_affine`, for x or for the smallest and largest value of each block."""
        low, high = ends or (None, None)
        found = chosen_qparams(
            x,
            grid_of(self.mapping, self.dtype, self.low, self.high, self.zero_point_dtype),
            block_size,
            scale_dtype=self.scale_dtype,
            min_val=low,
            max_val=high,
        )
        return QParams(*found)

    def stored(self, scale: Tensor) -> Tensor:
        """A float32 scale as it is stored: not too small to divide by."""
        least = torch.copysign(scale.abs().clamp(min=smallest_scale(self.scale_dtype)), scale)
        return round_to_dtype(least, self.scale_dtype)

    def of_scale(self, scale: Tensor, like: QParams) -> QParams:
        """The parameters with this float32 scale; a zero point that the scale does not decide is that of `like`."""
        scale = self.stored(scale)
        if self.mapping == "half_integer":
            return QParams(scale, half_step(scale, self.zero_point_dtype or self.scale_dtype))
        return QParams(scale, like.zero_point)

    def of_ends(self, low: Tensor, high: Tensor, like: QParams) -> QParams:
        """The parameters that put `low` and `high`, float32 [B, 1], on the first and last code."""
        scale = self.stored((high - low) / (self.high - self.low))
        return self.of_offset(scale, low + scale.float() * (self.mid - self.low), like)

    def of_offset(self, scale: Tensor, offset: Tensor, like: QParams) -> QParams:
        """The parameters with a stored scale and, as nearly as possible, the value `offset` at the middle code."""
        assert like.zero_point is not None
        dtype = like.zero_point.dtype
        if self.mapping == "float_zero_point":
            return QParams(scale, round_to_dtype(offset, dtype))
        code = (self.mid - offset / scale.float()).round().clamp(self.low, self.high)
        return QParams(scale, code.nan_to_num(self.low).to(dtype))


# ---- blocks -----------------------------------------------------------------------------------------------------


def _block_rows(t: Tensor, block_size: Sequence[int]) -> tuple[Tensor, list[int], int]:
    """`t` as [R, …], whose rows hold whole blocks, the order of dimensions that puts the sizes of a block last, and how
    many dimensions come before those.

    The result is a view where the strides allow one.
    """
    counts = [size // block for size, block in zip(t.shape, block_size, strict=True)]
    lead = 0  # dimensions without blocks, except the last
    while lead < t.ndim - 1 and block_size[lead] == 1:
        lead += 1
    rows = math.prod(counts[:lead])
    if lead == t.ndim - 1:
        return t.reshape(rows, counts[lead], block_size[lead]), [0, 1, 2], 2
    sizes = [rows * counts[lead], block_size[lead]]
    for count, block in zip(counts[lead + 1 :], block_size[lead + 1 :], strict=True):
        sizes += [count, block]
    outer = [0, *range(2, len(sizes), 2)]
    return t.reshape(sizes), [*outer, *range(1, len(sizes), 2)], len(outer)


def _chunks(t: Tensor, block_size: Sequence[int], most: int) -> Iterator[Tensor]:
    """Blocks [B, sizes of a block …] in order, of about `most` elements at once, or of one row of `_block_rows`."""
    if t.ndim == 0:
        t, block_size = t.reshape(1), (1,)
    rows, order, outer = _block_rows(t, block_size)
    for part in rows.split(max(most // rows[0].numel(), 1)):
        yield part.permute(order).flatten(0, outer - 1)


class _Blocks:
    """Some blocks [B, sizes of a block …] and their importance, and the error of parameters for them."""

    def __init__(
        self, x: Tensor, importance: Tensor | None, fmt: _SearchedFormat, most: int
    ) -> None:
        self.fmt = fmt
        step = max(most // max(x[:, 0].numel(), 1), 1)  # even one block may be too long
        self.pieces = x.split(step, 1)
        self.weights = None if importance is None else importance.split(step, 1)
        least, most_of_all = self._ends(counted=False)
        self.best = fmt.min_max(least, (1, 1), least.clamp(max=0), most_of_all.clamp(min=0))
        self.least, self.most = self._ends(counted=True)
        # Errors are relative to these, so that no square overflows or underflows.
        self.unit = self.best.scale.float().reciprocal()
        self.heaviest: Tensor | None = None
        if importance is not None:
            heaviest = [h.amax(1, keepdim=True) for _, h in self._parts() if h is not None]
            self.heaviest = torch.cat(heaviest, 1).amax(1, keepdim=True).float()
        self.whole = list(self._loaded()) if len(self.pieces) == 1 else None
        self.error = self._error(self.best)
        self.error[(self.least == 0) & (self.most == 0)] = -1  # no scale is better for zeros

    def _parts(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """x and importance [B, n] of each part; flattening may copy, so no two parts are held at once."""
        for i, piece in enumerate(self.pieces):
            h = None if self.weights is None else self.weights[i].flatten(1)
            yield piece.flatten(1), h

    def _ends(self, counted: bool) -> tuple[Tensor, Tensor]:
        """The smallest and largest value of each block; `counted`: among those with an importance above 0."""
        found = []
        for x, h in self._parts():
            left_out = None if h is None or not counted else h == 0
            low = x if left_out is None else x.masked_fill(left_out, torch.inf)
            high = x if left_out is None else x.masked_fill(left_out, -torch.inf)
            found.append((low.amin(1, keepdim=True), high.amax(1, keepdim=True)))
        lows, highs = zip(*found, strict=True)
        low, high = torch.cat(lows, 1), torch.cat(highs, 1)
        return low.amin(1, keepdim=True).float(), high.amax(1, keepdim=True).float()

    def _loaded(self) -> Iterator[tuple[Tensor, Tensor]]:
        """x, and √h times the unit, of each part in float32."""
        for x, h in self._parts():
            if h is None or self.heaviest is None:
                yield x.float(), self.unit
            else:
                yield x.float(), (h.float() / self.heaviest).sqrt_().mul_(self.unit)

    def _each(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self._loaded() if self.whole is None else self.whole

    def _rounded(self, x: Tensor, of: QParams) -> tuple[Tensor, Tensor]:
        zero = None if self.fmt.has_zero_at_zero else of.zero_point
        return round_to_grid(x, of.scale, zero, self.fmt.dtype, self.fmt.low, self.fmt.high)

    def _error(self, of: QParams) -> Tensor:
        """float64 [B, 1], in squares of the unit."""
        total = torch.zeros_like(self.unit, dtype=torch.float64)
        for x, weight in self._each():
            _, values = self._rounded(x, of)
            difference = values.sub_(x).mul_(weight)
            total += torch.linalg.vector_norm(difference, dim=1, keepdim=True).double().square_()
        return total

    def offer(self, candidate: QParams) -> None:
        """Take the candidate in the blocks whose error is smaller with it."""
        error = self._error(candidate)
        better = error < self.error * MARGIN
        self.error = torch.where(better, error, self.error)
        pairs = zip(candidate, self.best, strict=True)
        self.best = QParams(*(b if c is None else torch.where(better, c, b) for c, b in pairs))  # type: ignore[arg-type]

    def moments(self) -> tuple[Tensor, ...]:
        """Σh, Σhc, Σhc², Σhx, Σhcx in float64, where c are the best codes minus the zero point, or minus the middle
        code where the zero point is a value."""
        fmt = self.fmt
        sums = [torch.zeros_like(self.unit, dtype=torch.float64) for _ in range(5)]
        for x, weight in self._each():
            codes, _ = self._rounded(x, self.best)
            zero = self.best.zero_point
            if fmt.mapping in VALUE_ZERO_POINT:
                codes -= fmt.mid - (0.5 if fmt.mapping == "half_integer" else 0)
            elif zero is not None:
                codes -= zero
            x = x * self.unit  # in steps, so that no product overflows
            h = (weight / self.unit).square_().expand_as(x)
            own, both = h * codes, h * x
            for total, part in zip(sums, (h, own, own * codes, both, both * codes), strict=True):
                total += part.sum(1, keepdim=True)
        return tuple(sums)


# ---- candidates -------------------------------------------------------------------------------------------------


def _ratios(fmt: _SearchedFormat, count: int) -> list[float]:
    """Shares of min-max's range, evenly spaced."""
    largest = 1.0
    if fmt.may_be_negative:  # to where neither end clips
        largest = (fmt.high - fmt.low) / (fmt.high - fmt.low - 1)
    least = SMALLEST_RATIO[min(fmt.bits, 8)]
    if fmt.has_values:  # float8 repeats itself
        least = 0.5
    return [least + (largest - least) * i / (count - 1) for i in range(count)]


def _try_ranges(blocks: _Blocks) -> None:
    """Both ends together, for scales without a free zero point."""
    fmt, start = blocks.fmt, blocks.best
    largest = torch.maximum(-blocks.least, blocks.most)
    whole = largest * (2.0 / (fmt.high - fmt.low))
    ratios = _ratios(fmt, RATIOS)
    for ratio in ratios:
        found = fmt.of_scale(whole * ratio, start)
        blocks.offer(found)
        if fmt.may_be_negative:
            blocks.offer(QParams(-found.scale, found.zero_point))
    best, step = blocks.best, whole * (ratios[1] - ratios[0])
    for part in FINE_STEPS:
        moved = best.scale.float() + step * best.scale.float().sign() * part
        blocks.offer(fmt.of_scale(moved, best))


def _try_zeros(blocks: _Blocks) -> None:
    """Every zero point for each scale: the range slides from one end of the values to the other, a code at a time."""
    fmt, start = blocks.fmt, blocks.best
    assert start.zero_point is not None
    dtype, steps = start.zero_point.dtype, fmt.high - fmt.low
    low, high = blocks.least.clamp(max=0), blocks.most.clamp(min=0)  # zero has a code
    for ratio in _ratios(fmt, RATIOS):
        scale = fmt.stored((high - low) * (ratio / steps))
        first = (fmt.low - low / scale.float()).round()
        for shift in range(math.ceil((1 - ratio) * steps) + 1):
            zero = (first - shift).clamp(fmt.low, fmt.high).nan_to_num(fmt.low)
            blocks.offer(QParams(scale, zero.to(dtype)))


def _try_ends(blocks: _Blocks) -> None:
    """Each end by itself, for zero points that are values, which also allow ranges without zero."""
    fmt, start = blocks.fmt, blocks.best
    low, high = blocks.least, blocks.most
    centre = torch.where((low > 0) | (high < 0), (low + high) * 0.5, torch.zeros_like(low))
    ratios = _ratios(fmt, END_RATIOS)
    for first in ratios:
        for last in ratios:
            ends = (centre + (low - centre) * first, centre + (high - centre) * last)
            blocks.offer(fmt.of_ends(*ends, start))


def _fit(blocks: _Blocks) -> None:
    """One round of least squares for the best codes."""
    fmt, best = blocks.fmt, blocks.best
    h, c, cc, x, cx = blocks.moments()
    offset = torch.zeros_like(x)
    scale = cx / cc
    if fmt.mapping in ("asymmetric", "float_zero_point"):
        spread = cc - c * c / h
        slope = (cx - c * x / h) / spread
        has_slope = (spread > 0) & (slope > 0)
        free = torch.where(has_slope, slope, scale)
        offset = (x - free * c) / h
        moved = fmt.stored((free / blocks.unit).float())
        offset = (offset / blocks.unit).float()
        if fmt.mapping == "asymmetric":
            zero = best.zero_point  # c counts from it; it becomes the code of −offset
            assert zero is not None
            offset = offset + moved.float() * (fmt.mid - zero.float())
        blocks.offer(fmt.of_offset(moved, offset, best))
        if fmt.mapping == "float_zero_point":
            return
    if not fmt.may_be_negative:
        scale = torch.where(scale > 0, scale, 1.0)
    blocks.offer(fmt.of_scale((scale / blocks.unit).float(), best))


def _searched(blocks: _Blocks) -> QParams:
    starts = {"asymmetric": _try_zeros, "float_zero_point": _try_ends}
    attempts: list[Callable[[_Blocks], None]] = [starts.get(blocks.fmt.mapping, _try_ranges)]
    for attempt in attempts + [_fit] * ROUNDS:
        attempt(blocks)
    return blocks.best


# ---- the search -------------------------------------------------------------------------------------------------


def _check_importance(importance: Tensor, shape: Sequence[int]) -> Tensor:
    """`importance` expanded to `shape`."""
    try:
        expanded = importance.expand(tuple(shape))
    except RuntimeError as error:
        raise ValueError(
            f"importance of shape {tuple(importance.shape)} does not broadcast to {tuple(shape)}; give one number an "
            "input channel [K], or one an element"
        ) from error
    if not importance.dtype.is_floating_point:
        raise ValueError(f"importance must be floating, got {importance.dtype}; call .float()")
    if not bool(((importance >= 0) & importance.isfinite()).all()):
        raise ValueError(
            "importance must be finite and not negative, as a mean square is, got "
            f"{importance.min().item()} to {importance.max().item()}"
        )
    return expanded


@torch.no_grad()
def search_qparams_affine(
    input: Tensor,
    mapping: MappingName,
    block_size: Sequence[int],
    target_dtype: CodeType,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    scale_dtype: torch.dtype = torch.float32,
    zero_point_dtype: torch.dtype | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block with the smallest Σ importance · (x − x̂)² that the search finds.

    Arguments and errors are those of `choose_qparams_affine`, and the shapes of the result those of keepdim=True.
    Scales may be negative (symmetric integer mappings). The error is never above that of `choose_qparams_affine`.

    Args:
        input: real floating tensor; a meta tensor gets min-max's shapes.
        target_dtype: int8 or uint8, with ranges of 1 to 8 bits, or float8 or a `LookupTable`.
        importance: floating, finite, not negative, broadcastable to `input`; None for 1. A block whose importance is 0
            keeps min-max's choice.

    Raises:
        ValueError: as `choose_qparams_affine`; a range of more than 8 bits; an importance that does not fit.
    """
    low, high = quant_range(target_dtype, quant_min, quant_max)
    fmt = _SearchedFormat(mapping, target_dtype, low, high, scale_dtype, zero_point_dtype)
    if not fmt.has_values and high - low > 255:
        raise ValueError(
            f"the search takes ranges of up to 8 bits, got {low}..{high}; use choose_qparams_affine"
        )
    check_input(input)
    grid_of(mapping, target_dtype, low, high, zero_point_dtype)
    counts = block_counts(input.shape, block_size)
    if input.is_meta or input.numel() == 0:
        return fmt.min_max(input, block_size)
    most = CHUNK_ELEMENTS.get(input.device.type, CHUNK_ELEMENTS["cuda"])
    weights: Iterable[Tensor | None] = repeat(None)
    if importance is not None:
        expanded = _check_importance(importance.to(input.device), input.shape)
        weights = _chunks(expanded, block_size, most)
    chunks = zip(_chunks(input, block_size, most), weights, strict=False)
    found = [_searched(_Blocks(x, h, fmt, most)) for x, h in chunks]
    scale = torch.cat([f.scale for f in found]).reshape(counts)
    zero_points = [f.zero_point for f in found if f.zero_point is not None]
    return scale, torch.cat(zero_points).reshape(scale.shape) if zero_points else None


@torch.no_grad()
def best_of_scales(
    input: Tensor,
    block_size: Sequence[int],
    dtype: CodeType,
    start: Tensor,
    offered: Iterable[Tensor],
    importance: Tensor | None = None,
) -> Tensor:
    """For each block the scale, of `start` and all `offered`, with the smallest Σ importance · (x − x̂)².

    A block keeps `start` unless another is better by more than sums in float32 are wrong.

    Args:
        input, block_size, importance: those of `search_qparams_affine`.
        dtype: of the codes.
        start: float32, one scale a block.
        offered: further scales of that shape.
    """
    weights = None if importance is None else _check_importance(importance, input.shape)

    def error(scale: Tensor) -> Tensor:
        codes = quantize_affine(input, block_size, scale, None, dtype)
        values = dequantize_affine(codes, block_size, scale, None)
        wrong = values.sub_(input.float()).square_()
        if weights is not None:
            wrong = wrong * weights.float()
        return block_sums(wrong, block_size, torch.float64)

    if input.is_meta or input.numel() == 0:
        return start
    best, least = start, error(start)
    for scale in offered:
        found = error(scale)
        better = found < least * MARGIN
        best, least = torch.where(better, scale, best), torch.where(better, found, least)
    return best
