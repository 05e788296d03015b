"""Stacked experts, a few at a time: what the steps make of a stack in float32 takes several times its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lowbit.convert import Target, is_turned, shape_of_blocks
from lowbit.inference.calibration.inputs import Moments
from lowbit.inference.calibration.step import Layer

MOST_AT_ONCE = 2**24
"""Bytes of experts that are in float32 at a time; one expert in any case."""


def is_divisible(target: Target) -> bool:
    """True for a stack whose experts have nothing in common, neither scales nor parts of them."""
    spec = target.scheme.weight
    has_shared = spec.joins or (spec.scales is not None and bool(spec.scales.shared))
    return len(shape_of_blocks(target)) == 3 and not spec.shares_rows and not has_shared


def some_experts(target: Target, moments: Moments) -> Iterator[Layer]:
    """The layers of a few experts each, in their order, that stand for a stack."""
    plain, spec = target.weight.detach(), target.scheme.weight
    stack = plain.mT if is_turned(target) else plain
    each = 4 * stack[0].numel() if len(stack) else 1
    count = max(MOST_AT_ONCE // max(each, 1), 1)
    for first in range(0, len(stack), count):
        some = slice(first, first + count)
        yield Layer(
            *(target.fqn, stack[some].float().contiguous(), spec),
            *(spec.scale_dtype_for(plain.dtype), moments.some(first, first + count)),
        )


def joined(parts: Sequence[Any], target: Target) -> Any:
    """The low-bit stack of these low-bit experts, [n, N, K] each."""
    names = parts[0].inner_tensors()
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return parts[0]._with(tensors, shape_of_blocks(target))
