"""Blocks: the elements of a tensor that share a scale, as dimensions of their own.

With blocks of (a, b), x [N, K] is [N/a, a, K/b, b], and one number a block is [N/a, 1, K/b, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def block_counts(shape: Sequence[int], block_size: Sequence[int]) -> list[int]:
    """The number of blocks along each dimension. Raises ValueError unless blocks tile `shape`, and TypeError for
    anything but a sequence."""
    if isinstance(block_size, str) or not isinstance(block_size, Sequence):
        raise TypeError(f"block_size must be a tuple or a list of ints, got {block_size!r}")
    if len(block_size) != len(shape):
        raise ValueError(
            f"block_size {tuple(block_size)} must have one entry for each dimension of shape {tuple(shape)}"
        )
    counts = []
    for size, block in zip(shape, block_size, strict=True):
        if block < 1 or size % block:
            raise ValueError(
                f"block_size {tuple(block_size)} does not tile shape {tuple(shape)}: {size} is not a multiple "
                f"of {block}; pad the tensor or choose a block that divides it"
            )
        counts.append(size // block)
    return counts


def in_blocks(x: Tensor, block_size: Sequence[int]) -> Tensor:
    """`x` as [n0, b0, n1, b1, …] with n blocks of size b along each dimension. Raises as `block_counts` does."""
    counts = block_counts(x.shape, block_size)
    return x.reshape([size for pair in zip(counts, block_size, strict=True) for size in pair])


def one_a_block(numbers: Tensor, counts: Sequence[int], name: str = "scale") -> Tensor:
    """A tensor of any shape with one element a block as [n0, 1, n1, 1, …], to broadcast over `in_blocks`. Raises
    ValueError, which calls it `name`, for another number of elements."""
    expected = math.prod(counts)
    if numbers.numel() != expected:
        raise ValueError(
            f"{name} has {numbers.numel()} elements (shape {tuple(numbers.shape)}) for {expected} blocks "
            f"({tuple(counts)} along the dimensions)"
        )
    return numbers.reshape([size for n in counts for size in (n, 1)])


def within(blocks: Tensor) -> list[int]:
    """The dimensions of `in_blocks` that run within a block."""
    return list(range(1, blocks.ndim, 2))


def block_sums(x: Tensor, block_size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """The sum of each block, [n0, n1, …], in `dtype` or that of `x`."""
    blocks = in_blocks(x, block_size)
    return blocks.sum(within(blocks), dtype=dtype)


def for_elements(numbers: Tensor, block_size: Sequence[int], shape: Sequence[int]) -> Tensor:
    """`numbers` [n0, n1, …], one a block, as one for each element of `shape`, beyond which the last blocks may reach. A
    block of 1 leaves its dimension as it is."""
    for dim, size in enumerate(block_size):
        if size > 1:
            numbers = numbers.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return numbers


def crop(t: Tensor, shape: Sequence[int]) -> Tensor:
    """The leading `shape` of a padded tensor that was just computed: a contiguous copy, as modules may choose a product
    by the strides of a weight. `t` itself where nothing was padded."""
    if t.shape == torch.Size(shape):
        return t
    if t.is_cpu and torch.compiler.is_compiling():
        # Inductor (torch 2.13) merges a slice into what computed `t`, and on CPUs the merged loop over groups of more
        # than 8 elements leaves out the last, cut one: its elements stay uninitialized. It computes all of a strided
        # tensor.
        return t.as_strided(shape, t.stride()).contiguous()
    for dim, size in enumerate(shape):
        t = t.narrow(dim, 0, size)
    return t.contiguous()
