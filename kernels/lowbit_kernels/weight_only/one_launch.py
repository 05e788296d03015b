"""A product of tokens and a weight that is one launch, as a plan of the op that it belongs to."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.runtime.launch_plan import Buffer, Launch, LaunchPlan, run
from lowbit_kernels.runtime.library import aligned
from lowbit_kernels.weight_only.weight_operands import Tensors

X, CODES, SCALE, OUT = 0, 1, 2, 8
"""Numbers of tensors in the plan: those of `Tensors` in their order, then the result."""


class OneLaunch:
    """A planned product.

    Attributes:
        shape, dtype: of the result.
        is_ready: scale and zero point need no copy.
        copies_x: x is copied by `readable`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    is_ready: bool
    copies_x: bool = False

    def launch(self) -> Launch:
        """The launch on the current device."""
        raise NotImplementedError

    @functools.cached_property
    def launches(self) -> LaunchPlan:
        """The plan, on the current device. It copies no operand."""
        return LaunchPlan((Buffer(self.shape, self.dtype),), (), (self.launch(),))

    @property
    def copies(self) -> bool:
        """True if a call copies an operand."""
        return self.copies_x or not self.is_ready

    def __call__(self, tensors: Tensors) -> Tensor:
        x, codes, scale, zero_point, *others = tensors
        if not self.is_ready:  # kernels read two scales at a time
            scale = aligned(scale)
            zero_point = None if zero_point is None else aligned(zero_point)
        if self.copies_x:
            x = readable(x)
        with torch.cuda.device_of(x):
            return run(self.launches, (x, codes, scale, zero_point, *others))[0]


def readable(x: Tensor) -> Tensor:
    """A copy of x [M, K] whose rows begin at multiples of 16 bytes, as the TMA reads them."""
    copy = x.new_empty((x.shape[0], even(x.shape[1])))[:, : x.shape[1]]
    return copy.copy_(x)


def even(k: int) -> int:
    """Elements of 16 bits between rows of k elements that begin at multiples of 16 bytes."""
    return -(-k // 8) * 8
