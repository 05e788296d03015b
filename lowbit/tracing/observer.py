"""Observer: statistics of the inputs of a layer, over all batches that pass, and the range that they give.

    method            range [low, high]
    "minmax"          from the smallest to the largest value of all batches
    "squared_error"   the one of `CANDIDATES` ranges r · [low, high], r ≤ 1, whose rounding has the least squared error
                      (Nagel et al., arXiv 2106.08295, section 3.1)

The second reads a histogram. Its bins are the sign, the exponent and the first five bits of the mantissa of a float32.
So no value falls outside of it, no bin ever moves, a bin is at most 3% wide, and histograms of several ranks are added.

A range always includes zero. NaN and infinite values are counted and left out; `lowbit.calibrate` then raises an error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.numerics.granularity import PerRow
from lowbit.numerics.spec import Spec
from lowbit.numerics.uncast import Uncast

Method = Literal["minmax", "squared_error"]
CANDIDATES = 128
"""Ranges that "squared_error" compares. Each is 2^(1/16) times narrower than the one before; the last 245 times."""
_HIDDEN_BITS = 18
"""Low bits of a float32 that its bin does not show."""
BINS = 2 ** (32 - _HIDDEN_BITS)
_POINTS = 8
"""Values that stand for a bin in the search: codes of 8 bits may divide a bin of 3%."""
_AT_ONCE = 16
"""Candidates that the search rounds at once, to bound its memory."""


def check_method(method: str) -> None:
    """Raise ValueError for an unknown method."""
    if method not in get_args(Method):
        raise ValueError(
            f"unknown method {method!r}; accepted: {', '.join(map(repr, get_args(Method)))}"
        )


class Observer(Uncast):
    """Statistics of all inputs that `observe` sees. They are buffers, so state dicts and copies hold them.

    Args:
        spec: how the input will be quantized; its granularity is `PerTensor()`.
        method: see the module.
        device: of the buffers.

    Raises ValueError for an unknown method.
    """

    uncast = ("low", "high")

    low: Tensor
    high: Tensor
    batches: Tensor
    nonfinite: Tensor
    counts: Tensor | None

    def __init__(
        self,
        spec: Spec,
        method: Method = "squared_error",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_method(method)
        self.spec, self.method = spec, method
        self.begin(training=True)
        for name, dtype in (("low", torch.float32), ("high", torch.float32)):
            self.register_buffer(name, torch.zeros((), dtype=dtype, device=device))
        for name in ("batches", "nonfinite"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
        has_counts = method == "squared_error"
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
        whole = torch.stack([self.low, self.high])
        return self._least_squared_error(whole) if self.method == "squared_error" else whole

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
    extremes = torch.stack(own)
    integers = [o.batches.view(1) for o in observers] + [o.nonfinite.view(1) for o in observers]
    integers += [o.counts for o in observers if o.counts is not None]
    sums = torch.cat([t.to(first.device) for t in integers])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(sums, group=group)
    batches, nonfinite, counts = sums.split([len(own), len(own), len(sums) - 2 * len(own)])
    for i, observer in enumerate(observers):
        observer.low.copy_(-extremes[i, 0])
        observer.high.copy_(extremes[i, 1])
        observer.batches.copy_(batches[i])
        observer.nonfinite.copy_(nonfinite[i])
        if observer.counts is not None:
            observer.counts.copy_(counts.view(len(own), BINS)[i])
