"""Search the scale, and the zero point, with which each block loses least by rounding.

For each block of x the search minimises

    error = Σ h · (x − x̂)²    with x̂ = dequantize(quantize(x))

where x̂ is `lowbit.affine`'s, in float32, with scale and zero point rounded to the dtypes in which they are stored. h is
1 or an importance, such as the mean square of each input channel (the diagonal of the Hessian of the layer's output
error). Each step keeps a result only in the blocks whose error it lowers:

1. The choice of `choose_qparams_affine` (min-max). So the error is never above that of min-max.
2. Ranges r · [min, max], with r from `SMALLEST_RATIO` to 1. "asymmetric" and "float_zero_point" move each end by a ratio
   of its own. The symmetric mappings of integers also try −scale. A range −2^(b−1) … 2^(b−1) − 1 has one code more below
   zero than above, and a negative scale puts it above, where the largest value may lie (llama.cpp's Q4_0 does the same
   by d = max / −8).
3. Least squares. With fixed codes c the best scale is Σ h x c / Σ h c². Where the zero point is free too, both come from
   the weighted linear regression of x on c. The new scale gives new codes, and so on (Lloyd, IEEE Trans. Inf. Theory 28,
   1982).

Blocks of equal values, such as zeros, and blocks with NaN or infinities keep the min-max choice. The search takes
`CHUNK_ELEMENTS` at a time. Beside the input it needs about 20 MB on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.affine import (
    VALUE_ZERO_POINT,
    Mapping,
    choose_qparams_affine,
    half_step,
    round_to_dtype,
    round_to_grid,
    smallest_scale,
)
from lowbit.code_range import FLOAT8_DTYPES, quant_range

CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
"""Elements that are searched at once: few enough for a CPU's caches, and enough to occupy a GPU."""

SMALLEST_RATIO = {1: 0.05, 2: 0.1, 3: 0.2, 4: 0.3, 5: 0.5, 6: 0.7, 7: 0.8, 8: 0.88}
"""For each number of bits, the smallest range that is tried, as a share of min-max's. Optimal ranges of normal and
Student-t values (4 degrees of freedom) in groups of 32 to rows of 4,096 lie above."""
RATIOS = 16
END_RATIOS = 5
"""How many ratios are tried: of both ends together, and of each end by itself."""
ROUNDS = 3
"""Rounds of least squares."""

_MARGIN = 1 - 2.0**-15  # an error has to fall by more than float32 sums are wrong by


class QParams(NamedTuple):
    """Scale and zero point [B, 1] as stored, of B blocks."""

    scale: Tensor
    zero_point: Tensor | None


@dataclass(frozen=True)
class _Format:
    """What is searched for: a mapping, a code range, and the dtypes of scale and zero point."""

    mapping: Mapping
    dtype: torch.dtype
    low: float
    high: float
    scale_dtype: torch.dtype
    zero_point_dtype: torch.dtype | None

    @property
    def is_float8(self) -> bool:
        return self.dtype in FLOAT8_DTYPES

    @property
    def bits(self) -> int:
        return 8 if self.is_float8 else max(round(math.log2(self.high - self.low + 1)), 1)

    @property
    def mid(self) -> float:
        return (self.low + self.high + 1) // 2

    @property
    def may_be_negative(self) -> bool:
        """Whether a scale of the other sign gives other values."""
        return self.mapping.startswith("symmetric") and not self.is_float8

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


def _block_rows(t: Tensor, block_size: Sequence[int]) -> tuple[Tensor, list[int]]:
    """`t` as [R, …], whose rows hold whole blocks, and the permutation that puts the sizes of a block last.

    It is a view where the strides allow it.
    """
    counts = [size // block for size, block in zip(t.shape, block_size, strict=True)]
    lead = 0  # dimensions without blocks, except the last
    while lead < t.ndim - 1 and block_size[lead] == 1:
        lead += 1
    rows = math.prod(counts[:lead])
    if lead == t.ndim - 1:
        return t.reshape(rows, counts[lead], block_size[lead]), [0, 1, 2]
    sizes = [rows * counts[lead], block_size[lead]]
    for count, block in zip(counts[lead + 1 :], block_size[lead + 1 :], strict=True):
        sizes += [count, block]
    order = [0, *range(2, len(sizes), 2), *range(1, len(sizes), 2)]
    return t.reshape(sizes), order


def _chunks(t: Tensor, block_size: Sequence[int], most: int) -> Iterator[Tensor]:
    """Blocks [B, size of a block] in order, of about `most` elements at once, or of one row of `_block_rows`."""
    rows, order = _block_rows(t, block_size)
    per_row = rows[0].numel()
    size = math.prod(block_size)
    for part in rows.split(max(most // per_row, 1)):
        yield part.permute(order).reshape(-1, size)


class _Blocks:
    """Some blocks and their importance, and the error of parameters for them."""

    def __init__(self, x: Tensor, importance: Tensor | None, fmt: _Format, most: int) -> None:
        self.fmt = fmt
        step = max(most // len(x), 1)  # columns at once, where even one block is too long
        self.parts = [(p, None) for p in x.split(step, 1)]
        if importance is not None:
            self.parts = list(zip(x.split(step, 1), importance.split(step, 1), strict=True))
        if len(self.parts) == 1:
            self.parts = [(p.float(), None if h is None else h.float()) for p, h in self.parts]
        self.least = torch.cat([p.amin(1, keepdim=True) for p, _ in self.parts], 1)
        self.least = self.least.amin(1, keepdim=True).float()
        self.most = torch.cat([p.amax(1, keepdim=True) for p, _ in self.parts], 1)
        self.most = self.most.amax(1, keepdim=True).float()
        ends = (self.least.clamp(max=0), self.most.clamp(min=0))
        found = choose_qparams_affine(
            x,
            fmt.mapping,
            (1, x.shape[1]),
            fmt.dtype,
            None if fmt.is_float8 else fmt.low,
            None if fmt.is_float8 else fmt.high,
            scale_dtype=fmt.scale_dtype,
            zero_point_dtype=fmt.zero_point_dtype,
            keepdim=True,
            min_val=ends[0],
            max_val=ends[1],
        )
        self.best = QParams(*found)
        # Errors are relative to these, so that no square overflows or underflows.
        self.unit = self.best.scale.float().reciprocal()
        self.heaviest: Tensor | None = None
        if importance is not None:
            heaviest = [h.float().amax(1, keepdim=True) for _, h in self.parts if h is not None]
            self.heaviest = torch.cat(heaviest, 1).amax(1, keepdim=True)
        self.error = self._error(self.best)
        self.error[self.least == self.most] = -1  # blocks of equal values keep what they have

    def _each(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        for x, h in self.parts:
            if h is not None:
                h = h.float() / self.heaviest
            yield x.float(), h

    def _error(self, of: QParams) -> Tensor:
        fmt, total = self.fmt, 0.0
        for x, h in self._each():
            _, values = round_to_grid(x, *of, fmt.dtype, fmt.low, fmt.high)
            square = values.sub_(x).mul_(self.unit).square_()
            square = square if h is None else square.mul_(h)
            total = total + square.sum(1, keepdim=True).double()
        assert isinstance(total, Tensor)
        return total

    def offer(self, candidate: QParams) -> None:
        """Take the candidate in the blocks whose error is smaller with it."""
        error = self._error(candidate)
        better = error < self.error * _MARGIN
        self.error = torch.where(better, error, self.error)
        pairs = zip(candidate, self.best, strict=True)
        self.best = QParams(*(b if c is None else torch.where(better, c, b) for c, b in pairs))  # type: ignore[arg-type]

    def moments(self) -> tuple[Tensor, ...]:
        """Σh, Σhc, Σhc², Σhx, Σhcx in float64, where c are the best codes minus the zero point, or minus the middle
        code where the zero point is a value."""
        fmt, sums = self.fmt, [0.0] * 5
        for x, h in self._each():
            codes, _ = round_to_grid(x, *self.best, fmt.dtype, fmt.low, fmt.high)
            zero = self.best.zero_point
            if fmt.mapping in VALUE_ZERO_POINT:
                codes -= fmt.mid - (0.5 if fmt.mapping == "half_integer" else 0)
            elif zero is not None:
                codes -= zero
            weights = torch.ones_like(x) if h is None else h
            x = x * self.unit  # in steps, so that no product overflows
            own, both = weights * codes, weights * x
            found = (weights, own, own * codes, both, both * codes)
            sums = [s + f.sum(1, keepdim=True).double() for s, f in zip(sums, found, strict=True)]
        return tuple(sums)  # type: ignore[arg-type]


# ---- candidates -------------------------------------------------------------------------------------------------


def _ratios(fmt: _Format, count: int) -> list[float]:
    """Shares of min-max's range, evenly spaced."""
    largest = 1.0
    if fmt.may_be_negative:  # to where neither end clips
        largest = (fmt.high - fmt.low) / (fmt.high - fmt.low - 1)
    least = 0.5 if fmt.is_float8 else SMALLEST_RATIO[min(fmt.bits, 8)]  # float8 repeats itself
    return [least + (largest - least) * i / (count - 1) for i in range(count)]


def _try_ranges(blocks: _Blocks) -> None:
    """Both ends together, for scales without a free zero point."""
    fmt, start = blocks.fmt, blocks.best
    largest = torch.maximum(-blocks.least, blocks.most)
    whole = largest * (2.0 / (fmt.high - fmt.low))
    for ratio in _ratios(fmt, RATIOS):
        found = fmt.of_scale(whole * ratio, start)
        blocks.offer(found)
        if fmt.may_be_negative:
            blocks.offer(QParams(-found.scale, found.zero_point))


def _try_ends(blocks: _Blocks) -> None:
    """Each end by itself, for free zero points. A zero point that is a value also allows ranges without zero."""
    fmt, start = blocks.fmt, blocks.best
    low, high = blocks.least, blocks.most
    if fmt.mapping == "asymmetric":  # zero has a code
        low, high = low.clamp(max=0), high.clamp(min=0)
    centre = torch.zeros_like(low)
    if fmt.mapping == "float_zero_point":
        centre = torch.where((low > 0) | (high < 0), (low + high) * 0.5, centre)
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
        if fmt.mapping == "asymmetric":  # c counts from the zero point, which becomes the code of −offset
            zero = best.zero_point
            assert zero is not None
            offset = offset + moved.float() * (fmt.mid - zero.float())
        blocks.offer(fmt.of_offset(moved, offset, best))
        if fmt.mapping == "float_zero_point":
            return
    if not fmt.may_be_negative:
        scale = torch.where(scale > 0, scale, 1.0)
    blocks.offer(fmt.of_scale((scale / blocks.unit).float(), best))


def _searched(blocks: _Blocks) -> QParams:
    free = blocks.fmt.mapping in ("asymmetric", "float_zero_point")
    attempts: list[Callable[[_Blocks], None]] = [_try_ends if free else _try_ranges]
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
    mapping: Mapping,
    block_size: Sequence[int],
    target_dtype: torch.dtype,
    quant_min: float | None = None,
    quant_max: float | None = None,
    *,
    scale_dtype: torch.dtype = torch.float32,
    zero_point_dtype: torch.dtype | None = None,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of each block with the smallest Σ importance · (x − x̂)² that the search finds.

    Arguments and errors are those of `choose_qparams_affine`, and so is the result with keepdim=True, but for scales
    that may be negative (symmetric integer mappings). The error is never above that of `choose_qparams_affine`.

    Args:
        input: real floating tensor; a meta tensor gets min-max's shapes.
        target_dtype: int8 or uint8, with ranges of 1 to 8 bits, or float8.
        importance: floating, finite, not negative, broadcastable to `input`; None for 1. A block whose importance is 0
            keeps min-max's choice.

    Raises:
        ValueError: as `choose_qparams_affine`; a range of more than 8 bits; an importance that does not fit.
    """
    low, high = quant_range(target_dtype, quant_min, quant_max)
    fmt = _Format(mapping, target_dtype, low, high, scale_dtype, zero_point_dtype)
    if not fmt.is_float8 and high - low > 255:
        raise ValueError(
            f"the search takes ranges of up to 8 bits, got {low}..{high}; use choose_qparams_affine"
        )
    options = {"scale_dtype": scale_dtype, "zero_point_dtype": zero_point_dtype, "keepdim": True}
    if input.is_meta or input.numel() == 0:
        return choose_qparams_affine(
            input, mapping, block_size, target_dtype, quant_min, quant_max, **options
        )
    # checks the arguments, and gives the shape
    shapes = choose_qparams_affine(
        input.to("meta"), mapping, block_size, target_dtype, quant_min, quant_max, **options
    )
    most = CHUNK_ELEMENTS.get(input.device.type, CHUNK_ELEMENTS["cuda"])
    xs = _chunks(input, block_size, most)
    hs: Iterator[Tensor | None] = (None for _ in iter(int, 1))
    if importance is not None:
        expanded = _check_importance(importance.to(input.device), input.shape)
        hs = _chunks(expanded, block_size, most)
    found = [_searched(_Blocks(x, h, fmt, most)) for x, h in zip(xs, hs, strict=False)]
    joined = [
        None if like is None else torch.cat(parts).reshape(like.shape)  # type: ignore[arg-type]
        for parts, like in zip(zip(*found, strict=True), shapes, strict=True)
    ]
    scale, zero_point = joined
    assert scale is not None
    return scale, zero_point
