"""The seed of a stochastic rounding, made of what is rounded."""

from __future__ import annotations

import torch
from torch import Tensor


def seed_of(x: Tensor, seed: int) -> Tensor:
    """A seed for x [M, K], int64, one element: `seed_start` plus the bits of each `seed_step`-th row, as signed
    integers of the width of x's elements.

    So no counter of steps is needed, and replicas with equal gradients round them alike.
    """
    some = x[:: seed_step(x.shape[0])]
    found = some.view(torch.int32 if x.dtype == torch.float32 else torch.int16).sum()
    return found + seed_start(seed) if seed else found  # each operation takes time of the host


def seed_step(rows: int) -> int:
    """The distance of the rows that `seed_of` reads: 64 of them or more, or every second one of fewer than 128."""
    return max(2, rows // 64)  # torch.compile would compile anew for a step of 1


def seed_start(seed: int) -> int:
    """The number that `seed_of` adds to the bits, as a signed 64-bit integer."""
    return (seed * 0x9E3779B1 + 2**63) % 2**64 - 2**63
