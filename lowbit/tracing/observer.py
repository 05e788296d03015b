"""Observer: statistics of the inputs of a layer, over all batches that pass, and the range that they give.

    method             range [low, high]
    "minmax"           from the smallest to the largest value of all batches
    "moving_average"   the same of each batch, averaged: the last batch counts `MOMENTUM`, all before it the rest.
                       Several ranks take the mean of their averages, weighted by their numbers of batches
    "percentile"       all but (100 − percentile)% of the values at either end
    "squared_error"    the one of `CANDIDATES` ranges r · [low, high], r ≤ 1, whose rounding has the least squared error

The last two read a histogram. Its bins are the sign, the exponent and the first five bits of the mantissa of a float32.
So no value falls outside of it, no bin ever moves, a bin is at most 3% wide, and histograms of several ranks are added.
Sources: Jacob et al., arXiv 1712.05877 (moving averages); Nagel et al., arXiv 2106.08295, section 3.1 (squared error).

A range always includes zero. NaN and infinite values are counted and left out; `lowbit.calibrate` then raises an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.numerics.granularity import PerRow
from lowbit.numerics.spec import Spec

Method = Literal["minmax", "moving_average", "percentile", "squared_error"]
MOMENTUM = 0.1
"""The weight of the last batch in a moving average."""
PERCENTILE = 99.99
"""The default for the share of values in %, below the upper end and above the lower, of the method "percentile"."""
CANDIDATES = 128
"""Ranges that "squared_error" compares. Each is 2^(1/16) times narrower than the one before; the last 245 times."""
_HIDDEN_BITS = 18
"""Low bits of a float32 that its bin does not show."""
BINS = 2 ** (32 - _HIDDEN_BITS)
_POINTS = 8
"""Values that stand for a bin in the search: codes of 8 bits may divide a bin of 3%."""
_AT_ONCE = 16
"""Candidates that the search rounds at once, to bound its memory."""


def check_range(method: str, percentile: float) -> None:
    """Raise ValueError for an unknown method, and a percentile that is impossible or not read."""
    if method not in get_args(Method):
        raise ValueError(
            f"unknown method {method!r}; accepted: {', '.join(map(repr, get_args(Method)))}"
        )
    if not isinstance(percentile, int | float) or not 50 < percentile <= 100:
        raise ValueError(f"percentile must be above 50 and up to 100, got {percentile!r}")
    if percentile != PERCENTILE and method != "percentile":
        raise ValueError(
            f"percentile is for method='percentile', got {percentile!r} beside {method!r}"
        )


class Observer(nn.Module):
    """Statistics of all inputs that `observe` sees. They are buffers, so state dicts and copies hold them.

    Args:
        spec: how the input will be quantized; its granularity is `PerTensor()`.
        method: see the module.
        percentile: for "percentile", above 50 and up to 100.
        device: of the buffers.

    Raises ValueError for an unknown method or an impossible percentile.
    """

    low: Tensor
    high: Tensor
    batches: Tensor
    nonfinite: Tensor
    counts: Tensor | None

    def __init__(
        self,
        spec: Spec,
        method: Method = "squared_error",
        percentile: float = 99.99,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_range(method, percentile)
        self.spec, self.method, self.percentile = spec, method, percentile
        self.begin(training=True)
        for name, dtype in (("low", torch.float32), ("high", torch.float32)):
            self.register_buffer(name, torch.zeros((), dtype=dtype, device=device))
        for name in ("batches", "nonfinite"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        has_counts = method in ("percentile", "squared_error")
        counts = torch.zeros(BINS, dtype=torch.int64, device=device) if has_counts else None
        self.register_buffer("counts", counts)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """A state dict of a model without observers leaves the statistics as they are, and lacks nothing."""
        if any(key.startswith(prefix) for key in state_dict):
            super()._load_from_state_dict(state_dict, prefix, *args)

    def begin(self, training: bool) -> None:
        """Count batches of this mode only, so that an evaluation during training changes nothing."""
        self.counts_training = training
        self.train(training)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Count x, of any shape, as one batch, in the mode of `begin`. Nothing waits for the device."""
        if x.numel() == 0 or self.training != self.counts_training:
            return
        values = x.detach().reshape(-1).float()
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        low, high = values.amin().clamp(max=0), values.amax().clamp(min=0)
        if self.method == "moving_average":
            share = torch.where(self.batches == 0, 1.0, MOMENTUM)
            self.low.add_((low - self.low) * share)
            self.high.add_((high - self.high) * share)
        else:
            self.low.copy_(torch.minimum(self.low, low))
            self.high.copy_(torch.maximum(self.high, high))
        self.batches.add_(1)
        self.nonfinite.add_((~finite).sum())
        if self.counts is not None:
            bins = (values.view(torch.int32) >> _HIDDEN_BITS).long() & (BINS - 1)
            self.counts.scatter_add_(0, bins, finite.long())

    @torch.no_grad()
    def range(self) -> Tensor:
        """[low, high], float32, with low ≤ 0 ≤ high."""
        if self.method == "percentile":
            return self._percentiles()
        whole = torch.stack([self.low, self.high])
        return self._least_squared_error(whole) if self.method == "squared_error" else whole

    def _percentiles(self) -> Tensor:
        assert self.counts is not None
        positive, negative = self.counts.view(2, -1)
        left_out = self.counts.sum().double() * (100 - self.percentile) / 100
        ends = []
        for own, other, end in ((positive, negative, self.high), (negative, positive, -self.low)):
            # from the largest magnitude of this sign down, and on to the smallest of the other sign
            beyond = torch.cat([own.flip(0), other]).cumsum(0)
            at = torch.searchsorted(beyond.double(), left_out, right=True)
            upper_edge = _values_of((own.numel() - at).clamp(min=0) << _HIDDEN_BITS)
            ends.append(torch.where(at < own.numel(), torch.minimum(upper_edge, end), 0.0))
        return torch.stack([-ends[1], ends[0]])

    def _least_squared_error(self, whole: Tensor) -> Tensor:
        assert self.counts is not None
        (bins,) = self.counts.nonzero(as_tuple=True)
        step = 2**_HIDDEN_BITS // _POINTS
        offsets = torch.arange(_POINTS, device=bins.device) * step + step // 2
        points = _values_of((bins[:, None] << _HIDDEN_BITS) + offsets).clamp(*whole).flatten()
        weights = self.counts[bins].double().repeat_interleave(_POINTS)
        shrink = 2 ** (-torch.arange(CANDIDATES, dtype=torch.float32, device=bins.device) / 16)
        ranges = shrink[:, None] * whole
        spec = replace(self.spec, granularity=PerRow(), static=False)
        errors = []
        for some in ranges.split(_AT_ONCE):
            scale, zero_point = spec.choose_qparams(some, torch.float32)
            x = points.expand(len(some), -1)
            error = (spec.fake_quantize_by(x, scale, zero_point) - x).double()
            errors.append(error.square() @ weights)
        return ranges[torch.cat(errors).argmin()]


def _values_of(bits: Tensor) -> Tensor:
    """float32 values of these bits, int64 from 0 to 2^32 − 1."""
    signed = torch.where(bits >= 2**31, bits - 2**32, bits)
    return signed.to(torch.int32).view(torch.float32)


def all_ranks() -> dist.ProcessGroup | None:
    """The default process group, if there is one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


@torch.no_grad()
def sum_over_ranks(observers: list[Observer], group: dist.ProcessGroup) -> None:
    """Give the observers of all ranks the statistics of all their batches together.

    Every rank of the process group calls this, with observers of the same layers in the same order.
    """
    if not observers:
        return
    first = observers[0].low
    own = [torch.stack([-o.low, o.high]).to(first) for o in observers]
    extremes = torch.stack(own).double()
    integers = [o.batches.view(1) for o in observers] + [o.nonfinite.view(1) for o in observers]
    integers += [o.counts for o in observers if o.counts is not None]
    sums = torch.cat([t.to(first.device) for t in integers])
    if observers[0].method == "moving_average":  # each rank counts by its batches
        extremes *= sums[: len(own), None]
        dist.all_reduce(extremes, group=group)
    else:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(sums, group=group)
    if observers[0].method == "moving_average":
        extremes /= sums[: len(own), None].clamp(min=1)
    batches, nonfinite, counts = sums.split([len(own), len(own), len(sums) - 2 * len(own)])
    for i, observer in enumerate(observers):
        observer.low.copy_(-extremes[i, 0])
        observer.high.copy_(extremes[i, 1])
        observer.batches.copy_(batches[i])
        observer.nonfinite.copy_(nonfinite[i])
        if observer.counts is not None:
            observer.counts.copy_(counts.view(len(own), BINS)[i])
