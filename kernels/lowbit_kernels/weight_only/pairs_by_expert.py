"""Pairs of a token and an expert, sorted by expert on the device, and the rows of x in this order; in Triton."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lowbit_kernels.runtime.launch_plan import Address, Buffer, Launch
from lowbit_kernels.runtime.triton_runtime import KeptKernel, jit, tl, triton
from lowbit_kernels.weight_only.one_launch import even
from lowbit_kernels.weight_only.weight_operands import TensorLayout

SCANNED = 4096
"""The most pairs that a program of `_route` reads at a time."""


@jit
def _expert_of(ids, at, pairs, experts):
    """The experts of pairs `at`; `experts` for ids that no expert has."""
    id = tl.load(ids + at, mask=at < pairs, other=experts)
    return tl.where((id < 0) | (id > experts), experts, id)


@jit
def _route(ids, order, ends, pairs, experts, SCANNED: tl.constexpr):
    """The pairs of expert `program` in their order, behind those of the experts before it, and where they end."""
    expert = tl.program_id(0)
    before = tl.zeros((SCANNED,), tl.int32)
    for start in tl.range(0, pairs, SCANNED):
        at = start + tl.arange(0, SCANNED)
        before += ((_expert_of(ids, at, pairs, experts) < expert) & (at < pairs)).to(tl.int32)
    place = tl.sum(before, 0)
    for start in tl.range(0, pairs, SCANNED):
        at = start + tl.arange(0, SCANNED)
        own = ((_expert_of(ids, at, pairs, experts) == expert) & (at < pairs)).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, at, mask=own > 0)
        place += tl.sum(own, 0)
    tl.store(ends + expert, place, mask=expert < experts)


@jit
def _gather(x, order, out, k, top, x_stride, out_stride, BLOCK: tl.constexpr):
    """Row `program` of out: that of x for pair order[program]."""
    row = tl.program_id(0).to(tl.int64)
    own = (tl.load(order + row) // top).to(tl.int64)
    for start in tl.range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + own * x_stride + at, mask=at < k, other=0)
        tl.store(out + row * out_stride + at, numbers, mask=at < k)


class PairsByExpert:
    """For so many pairs of experts.

    Args:
        x: the rows to gather: one for each token, or for each pair.
    """

    def __init__(self, pairs: int, experts: int, x: TensorLayout) -> None:
        self.pairs, self.experts, self.k = pairs, experts, x.shape[1]
        self.top, self.pitch = pairs // x.shape[0], even(x.shape[1])
        self.stride, self.dtype = x.strides[0], x.dtype
        scanned = max(128, min(SCANNED, triton.next_power_of_2(pairs)))
        self.route = KeptKernel(_route, {"SCANNED": scanned}, num_warps=4 if pairs < 4096 else 16)
        block = max(128, min(2048, triton.next_power_of_2(self.k)))
        self.gather = KeptKernel(_gather, {"BLOCK": block}, num_warps=block // 512 or 1)

    def sorted(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs sorted by expert, those without one last, int32 [pairs], and where each expert's end."""
        order = ids.new_empty(self.pairs, dtype=torch.int32)
        ends = ids.new_empty(self.experts, dtype=torch.int32)
        with torch.cuda.device_of(ids):
            grid = (self.experts + 1, 1)
            self.route(grid, ids.contiguous(), order, ends, self.pairs, self.experts)
        return order, ends

    def __call__(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those two, and the pairs' rows of x in this order [pairs, k], rows that begin at multiples of 16 bytes."""
        order, ends = self.sorted(ids)
        x = x if x.stride(1) == 1 else x.contiguous()
        rows = x.new_empty(self.pairs, self.pitch)
        with torch.cuda.device_of(x):
            strides = x.stride(0), self.pitch
            self.gather((self.pairs, 1), x, order, rows, self.k, self.top, *strides)
        return order, ends, rows[:, : self.k]

    @property
    def buffers(self) -> tuple[Buffer, Buffer, Buffer]:
        """Those three in a plan."""
        order, ends = (Buffer((size,), torch.int32) for size in (self.pairs, self.experts))
        return order, ends, Buffer((self.pairs, self.pitch), self.dtype)

    def launches(self, x: int, ids: int, made: Iterable[int]) -> list[Launch]:
        """The launches of a plan with the numbers of its tensors, `made` the buffers'. They read x and ids as they are.
        [] before the first call, and where they cannot be planned."""
        order, ends, rows = map(Address, made)
        sizes = self.k, self.top, self.stride, self.pitch
        route = self.route.planned(
            self.experts + 1, Address(ids), order, ends, self.pairs, self.experts
        )
        gather = self.gather.planned(self.pairs, Address(x), order, rows, *sizes)
        return [] if route is None or gather is None else [route, gather]
