"""Scales in super-blocks, as the K-quants of llama.cpp store them: 256 inputs share two float16 numbers.

A super-block has 16 groups of 16 inputs, or 8 of 32. The scale of group g is d · s_g, and where a group has a smallest
value it is −dmin · m_g. d and dmin are float16, s_g and m_g small integers:

| bits | inputs of a group | s_g         | m_g     | mapping            | in GGUF |
|-----:|------------------:|-------------|---------|--------------------|---------|
| 2    | 16                | 1 … 15      | 0 … 15  | "float_zero_point" | Q2_K    |
| 3    | 16                | −32 … 31    | none    | "symmetric"        | Q3_K    |
| 4    | 32                | 1 … 63      | 0 … 63  | "float_zero_point" | Q4_K    |
| 5    | 32                | 1 … 63      | 0 … 63  | "float_zero_point" | Q5_K    |
| 6    | 16                | −128 … 127  | none    | "symmetric"        | Q6_K    |

A weight keeps the scales and zero points as float32, which represents them exactly. `SuperBlocks.fields` finds d and
s_g again. s_g is never 0, so that every scale has a reciprocal. d and dmin may be negative: then all smallest values
are at or above zero.

`SuperBlocks.search` minimises Σ h √(x² + r²) (x − x̂)², x̂ = d s_g c − dmin m_g, over all that is stored. h is 1 or an
importance, and r² half the mean square of the row, so that a large weight counts by its size. Plain squares clip large
weights, and cost a trained Llama a fifth to a third more loss in Q2_K (benchmarks/results/gguf_files.md).

First the search finds the best scale and smallest value of each group by itself: several ranges give codes, and with
these codes least squares give the scale, the smallest value and the error that is left. Then, in each round, it

1. rounds the weights by what is stored, which gives the codes c, and keeps the fields in the super-blocks where the
   error is the smallest so far;
2. with these codes, takes d and dmin by least squares, and rounds them to float16;
3. with these codes, d and dmin, takes the best s_g and m_g of each group, among the integers next to the optimum.

Several d start the rounds, because a slightly larger one may put the scales of a super-block closer to integers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.affine import MappingName
from lowbit.numerics.float32 import round_to_dtype
from lowbit.numerics.search import CHUNK_ELEMENTS

INPUTS = 256
"""Inputs of a super-block."""
_SMALLEST, LARGEST = 2.0**-24, 65504.0
"""Magnitudes of d."""
_TINY, _SPREAD = 1e-30, 1e-6
"""The least scale that the search starts from, and the least determinant of least squares, relative to its terms."""
_ROUNDS = 3
_MARGIN = 1 - 2.0**-13
_STARTS = 3
_SMALLEST_RATIO = {2: 0.4, 3: 0.6, 4: 0.76, 5: 0.86, 6: 0.9}
"""For each number of bits, the smallest end of a range that is tried, as a share of the group's own."""
_END_RATIOS, _RATIOS = 5, 10
"""How many ratios are tried: of each end by itself, and of the largest value of a group without smallest values."""
_NEAR_ZERO = 0.5
"""What a weight of 0 counts, as the square of its share of a weight with the root mean square of the row."""
_FLOOR = 1e-6
"""The least importance of an input, as a share of the mean in its row: an input that is always zero still gets a value
near its own."""


Pair = tuple[Tensor, Tensor | None]


class Fields(NamedTuple):
    """What super-blocks store: d and dmin [..., S] in float32, s and m [..., S, groups] in float32. dmin and m are None
    without smallest values."""

    d: Tensor
    s: Tensor
    dmin: Tensor | None = None
    m: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """The scale of each group, exactly."""
        return self.d.unsqueeze(-1) * self.s

    @property
    def minimum(self) -> Tensor | None:
        """What is subtracted in each group, exactly; None: nothing."""
        if self.dmin is None or self.m is None:
            return None
        return self.dmin.unsqueeze(-1) * self.m

    def where(self, better: Tensor, other: Fields) -> Fields:
        """These fields in the super-blocks [...] where `better`, and the other ones elsewhere."""
        wide = better.unsqueeze(-1)
        pairs = zip(self, other, (better, wide, better, wide), strict=True)
        return Fields(*(None if a is None else torch.where(w, a, b) for a, b, w in pairs))  # type: ignore[arg-type]


@dataclass(frozen=True)
class SuperBlocks:
    """A row of the module's table.

    Attributes:
        bits: of a code.
        group: inputs of a group.
        low, high: of s_g.
        most: of m_g; 0: no smallest values.
    """

    bits: int
    group: int
    low: int
    high: int
    most: int

    @property
    def mapping(self) -> MappingName:
        return "float_zero_point" if self.most else "symmetric"

    @property
    def groups(self) -> int:
        """Groups of a super-block."""
        return INPUTS // self.group

    @property
    def nbytes(self) -> int:
        """Bytes of a super-block in a file: codes, s_g, m_g, d and dmin."""
        of_group = (self.high - min(self.low, 0)).bit_length() + self.most.bit_length()
        return (INPUTS * self.bits + self.groups * of_group) // 8 + (4 if self.most else 2)

    @property
    def first(self) -> int:
        """The smallest code: codes count from the smallest value, where there is one."""
        return 0 if self.most else -(2 ** (self.bits - 1))

    @property
    def last(self) -> int:
        return self.first + 2**self.bits - 1

    # ---- between fields, and scales and zero points ---------------------------------------------------------------

    def qparams(self, fields: Fields, groups: int) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point float32 [..., groups] of fields; the last super-block may have more groups."""
        scale = fields.scale.flatten(-2)[..., :groups].contiguous()
        if fields.minimum is None:
            return scale, None
        minimum = fields.minimum.flatten(-2)[..., :groups]
        middle = scale.double() * 2 ** (self.bits - 1)
        return scale, (middle - minimum.double()).float()

    def fields(self, scale: Tensor, zero: Tensor | None) -> Fields | None:
        """The fields of scales and zero points [..., G], which they give exactly; None if there are none."""
        if scale.shape[-1] % self.groups:
            return None
        own = scale.double().unflatten(-1, (-1, self.groups))
        found = _factored(own, self.low, self.high)
        if found is None or zero is None:
            return None if found is None else Fields(*found)
        minimum = own * 2 ** (self.bits - 1) - zero.double().unflatten(-1, (-1, self.groups))
        least = _factored(minimum, 0, self.most)
        return None if least is None else Fields(*found, *least)

    # ---- choosing -------------------------------------------------------------------------------------------------

    def of_range(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of x [..., K], whole groups, from the smallest and largest value of each group."""
        rows = _whole(x.float(), self.groups * self.group).unflatten(
            -1, (-1, self.groups, self.group)
        )
        if self.most:
            low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
            fields = self._stored((high - low) / self.last, -low, self.high)
        else:
            most = torch.take_along_dim(rows, rows.abs().argmax(-1, keepdim=True), -1).squeeze(-1)
            fields = self._stored(most / self.first, None, self.low)
        return self.qparams(fields, x.shape[-1] // self.group)

    def search(self, x: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point of x [..., K], whole groups, as the module describes it. `importance`: h, broadcastable
        to x, finite and not negative; None: 1. Super-blocks with NaN or infinities get scales that are not finite."""
        flat = x.reshape(-1, x.shape[-1])
        h = None if importance is None else importance.expand(x.shape).reshape(flat.shape)
        most = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS["cuda"])
        step = max(most // max(x.shape[-1], 1), 1)
        found = [
            self._searched(part, None if h is None else h[i * step : (i + 1) * step])
            for i, part in enumerate(flat.split(step))
        ]
        scales, zeros = zip(*found, strict=True)
        shape = (*x.shape[:-1], x.shape[-1] // self.group)
        zero = torch.cat(zeros).view(shape) if self.most else None
        return torch.cat(scales).view(shape), zero

    def _searched(self, x: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        groups = x.shape[-1] // self.group
        whole = _whole(x.float(), INPUTS)
        size = (x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=_TINY)).square()
        h = (size / size.mean(-1, keepdim=True).clamp(min=_TINY) + _NEAR_ZERO).sqrt()
        if importance is not None:
            own = importance.float()
            mean = own.mean(-1, keepdim=True)
            h = h * torch.where(mean > 0, own / mean, 1.0).clamp(min=_FLOOR)
        h = _whole(h, INPUTS).unflatten(-1, (-1, self.groups, self.group))
        search = _Search(self, whole.unflatten(-1, (-1, self.groups, self.group)), h)
        return self.qparams(search.run(), groups)

    def _stored(self, s: Tensor, m: Tensor | None, most: float) -> Fields:
        """The fields nearest to scales and minimums [..., S, groups], where `most` is the s_g of the largest scale.
        Minimums of the other sign than that of most of them become 0."""
        largest = torch.take_along_dim(s, s.abs().argmax(-1, keepdim=True), -1).squeeze(-1)
        d = self.in_half(largest / most)
        own = self.nearest(s / d.unsqueeze(-1))
        if m is None:
            return Fields(d, own)
        sign = 1 - 2 * ((m <= 0).all(-1) & (m < 0).any(-1)).to(d.dtype)
        dmin = self.minimum_in_half(
            (m * sign.unsqueeze(-1)).amax(-1).clamp(min=0) / self.most * sign, d
        )
        return Fields(d, own, dmin, self.nearest_minimum(_ratio(m, dmin.unsqueeze(-1))))

    @staticmethod
    def in_half(d: Tensor) -> Tensor:
        """d as float16 stores it, never zero."""
        size = d.abs().clamp(_SMALLEST, LARGEST)
        return round_to_dtype(
            torch.copysign(torch.where(d.isnan(), d, size), d), torch.float16
        ).float()

    def minimum_in_half(self, dmin: Tensor, d: Tensor) -> Tensor:
        """dmin as float16 stores it, with so few digits that float32 represents the zero points."""
        unit = torch.exp2(d.abs().log2().floor() + (self.bits - 18))
        return round_to_dtype(
            ((dmin / unit).round() * unit).clamp(-LARGEST, LARGEST), torch.float16
        ).float()

    def nearest(self, s: Tensor) -> Tensor:
        """The integers that s_g may be, nearest to s; in place of 0 the one with the sign of s."""
        own = s.round().clamp(self.low, self.high)
        one = torch.ones_like(own) if self.low > 0 else torch.copysign(torch.ones_like(own), s)
        return torch.where(own == 0, one, own)

    def nearest_minimum(self, m: Tensor) -> Tensor:
        return m.round().clamp(0, self.most)


TABLE = (
    SuperBlocks(2, 16, 1, 15, 15),
    SuperBlocks(3, 16, -32, 31, 0),
    SuperBlocks(4, 32, 1, 63, 63),
    SuperBlocks(5, 32, 1, 63, 63),
    SuperBlocks(6, 16, -128, 127, 0),
)
"""The rows of the module's table."""


class _Moments(NamedTuple):
    """Sums over each group, for codes c and the errors r = x − x̂ that they leave: Σh, Σhc, Σhc², Σhr, Σhrc, Σhr²."""

    h: Tensor
    c: Tensor
    cc: Tensor
    r: Tensor
    rc: Tensor
    rr: Tensor

    @property
    def slope(self) -> Tensor:
        """What the scale has to grow by for the least error, where the minimum is free too."""
        spread = self.cc * self.h - self.c * self.c
        found = _ratio(self.rc * self.h - self.r * self.c, spread)
        return torch.where(spread > _SPREAD * self.cc * self.h, found, 0.0)

    def change(self, ds: Tensor, dm: Tensor) -> Tensor:
        """What the error grows by with the same codes, if the scale grows by ds and the minimum by dm."""
        return ds * (ds * self.cc - 2 * self.rc - 2 * dm * self.c) + dm * (dm * self.h + 2 * self.r)


class _Search:
    """The rounds over some super-blocks x [R, S, groups, inputs], with importance h of that shape."""

    def __init__(self, kind: SuperBlocks, x: Tensor, h: Tensor) -> None:
        self.kind, self.x, self.h = kind, x, h
        self.heaviness = h.sum(-1)
        self.best: Fields | None = None
        self.error: Tensor | None = None

    def run(self) -> Fields:
        """The best fields."""
        for start in self._starts(*self._alone()):
            fields = start
            for _ in range(_ROUNDS):
                moments = self._moments(fields.scale, fields.minimum)
                self._offer(fields, moments)
                fields = self._improved(fields, moments)
            self._offer(fields, self._moments(fields.scale, fields.minimum))
        assert self.best is not None
        return self.best

    def _starts(self, s: Tensor, m: Tensor | None) -> Iterator[Fields]:
        """Fields nearest to these scales and minimums, where the largest scale has one s_g or another."""
        kind = self.kind
        ends = [kind.high, kind.low] if kind.low < 0 else [kind.high]
        step = max(kind.high // 32, 1)
        for end in ends:
            for i in range(_STARTS):
                yield kind._stored(s, m, end - math.copysign(i * step, end))

    def _alone(self) -> Pair:
        """The best scale and minimum of each group by itself, in float32."""
        ranges = self._ranges()
        best, least = self._fitted(*next(ranges))
        for s, m in itertools.chain(ranges, [(None, None)] * _ROUNDS):
            found, error = self._fitted(*(best if s is None else (s, m)))
            better = error < least
            pairs = zip(found, best, strict=True)
            best = tuple(b if a is None else torch.where(better, a, b) for a, b in pairs)  # type: ignore[assignment, arg-type]
            least = torch.where(better, error, least)
        return best

    def _ranges(self) -> Iterator[Pair]:
        """Scales and minimums of parts of the range of each group."""
        kind, least = self.kind, _SMALLEST_RATIO[self.kind.bits]
        if kind.most:
            low, high = self.x.aminmax(dim=-1)
            middle = torch.where((low > 0) | (high < 0), (low + high) / 2, 0.0)
            ratios = [1 - (1 - least) * i / (_END_RATIOS - 1) for i in range(_END_RATIOS)]
            for a, b in itertools.product(ratios, ratios):
                first, end = middle + (low - middle) * a, middle + (high - middle) * b
                yield ((end - first) / kind.last).clamp(min=_TINY), -first
            return
        largest = torch.take_along_dim(self.x, self.x.abs().argmax(-1, keepdim=True), -1).squeeze(
            -1
        )
        whole = torch.where(largest == 0, _TINY, largest) / kind.first
        for i in range(_RATIOS):
            ratio = 1.05 - (1.05 - least) * i / (_RATIOS - 1)
            yield whole * ratio, None
            yield whole * -ratio, None

    def _fitted(self, s: Tensor, m: Tensor | None) -> tuple[Pair, Tensor]:
        """Scales and minimums by least squares for the codes that s and m give, and the error that they leave."""
        t = self._moments(s, m)
        if m is None:
            ds = _ratio(t.rc, t.cc)
            return (s + ds, None), t.rr - ds * t.rc
        ds = t.slope
        ds = torch.where(s + ds > 0, ds, 0.0)
        dm = _ratio(ds * t.c - t.r, t.h)
        return (s + ds, m + dm), t.rr + t.change(ds, dm)

    def _moments(self, s: Tensor, m: Tensor | None) -> _Moments:
        kind, scale = self.kind, s.unsqueeze(-1)
        shifted = self.x if m is None else self.x + m.unsqueeze(-1)
        c = (shifted / scale).round_().clamp_(kind.first, kind.last)
        r = torch.addcmul(shifted, c, scale, value=-1)
        h, own, both = self.heaviness, self.h * c, self.h * r
        rc, rr = (both * c).sum(-1), (both * r).sum(-1)
        return _Moments(h, own.sum(-1), (own * c).sum(-1), both.sum(-1), rc, rr)

    def _offer(self, fields: Fields, moments: _Moments) -> None:
        """Take the fields in the super-blocks whose error is smaller with them."""
        error = moments.rr.sum(-1)
        if self.best is None or self.error is None:
            self.best, self.error = fields, error
            return
        better = error < self.error * _MARGIN
        self.best, self.error = (
            fields.where(better, self.best),
            torch.where(better, error, self.error),
        )

    def _improved(self, f: Fields, t: _Moments) -> Fields:
        """The fields with less error for the same codes: first d and dmin, then s and m."""
        kind = self.kind
        a11, b1 = (f.s * f.s * t.cc).sum(-1), (f.s * t.rc).sum(-1)
        if f.dmin is None or f.m is None:
            d = kind.in_half(f.d + _ratio(b1, a11))
            best = f.scale + _ratio(t.rc, t.cc)
            return Fields(d, kind.nearest(best / d.unsqueeze(-1)))
        a12, a22 = -(f.s * f.m * t.c).sum(-1), (f.m * f.m * t.h).sum(-1)
        b2 = -(f.m * t.r).sum(-1)
        spread = a11 * a22 - a12 * a12
        solved = spread > _SPREAD * a11 * a22
        d = torch.where(solved, _ratio(b1 * a22 - b2 * a12, spread), _ratio(b1, a11))
        dmin = torch.where(solved, _ratio(b2 * a11 - b1 * a12, spread), 0.0)
        new_d = kind.in_half(f.d + d)
        new_d = torch.where(new_d * f.d > 0, new_d, f.d)
        new_dmin = kind.minimum_in_half(f.dmin + dmin, new_d)
        new_dmin = torch.where(new_dmin * f.dmin > 0, new_dmin, f.dmin)
        return self._nearest(f, t, new_d, kind.minimum_in_half(new_dmin, new_d))

    def _nearest(self, f: Fields, t: _Moments, d: Tensor, dmin: Tensor) -> Fields:
        """The s_g and m_g with the least error for the same codes: s_g next to its optimum, m_g the best beside it."""
        kind, scale, minimum = self.kind, f.scale, f.minimum
        assert minimum is not None
        middle = (scale + t.slope) / d.unsqueeze(-1)
        best = least = None
        for step in (-1, 0, 1):
            s = kind.nearest(middle.round() + step)
            ds = d.unsqueeze(-1) * s - scale
            free = minimum + _ratio(ds * t.c - t.r, t.h)
            m = kind.nearest_minimum(_ratio(free, dmin.unsqueeze(-1)))
            dm = dmin.unsqueeze(-1) * m - minimum
            error = t.change(ds, dm)
            if best is None or least is None:
                best, least = (s, m), error
                continue
            better = error < least
            best = (torch.where(better, s, best[0]), torch.where(better, m, best[1]))
            least = torch.where(better, error, least)
        assert best is not None
        return Fields(d, best[0], dmin, best[1])


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / b)


def _whole(x: Tensor, size: int) -> Tensor:
    """x [..., K] padded with zeros to a multiple of `size`."""
    return F.pad(x, (0, -x.shape[-1] % size)) if x.shape[-1] % size else x


def _factored(values: Tensor, low: int, high: int) -> tuple[Tensor, Tensor] | None:
    """d and integers low … high whose products are `values`, float64 [..., S, groups]; None if some have none."""
    largest = torch.take_along_dim(values, values.abs().argmax(-1, keepdim=True), -1)
    d = torch.zeros_like(largest)
    found = (largest == 0).clone()
    integers = torch.zeros_like(values)
    for i in sorted(range(low, high + 1), key=abs, reverse=True):
        if i == 0:
            continue
        own = largest / i
        each = values / own
        fits = (own.half().double() == own) & (each == each.round())
        fits = fits & ((each >= low) & (each <= high) & (each * own == values)).all(
            -1, keepdim=True
        )
        fits = fits.all(-1, keepdim=True) & ~found
        d, integers = torch.where(fits, own, d), torch.where(fits, each, integers)
        found |= fits
        if bool(found.all()):
            break
    if not bool(found.all()):
        return None
    return d.squeeze(-1).float(), integers.float()
