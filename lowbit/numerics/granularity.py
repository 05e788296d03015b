"""Granularity: which elements of a tensor share one scale and zero point.

Each granularity answers one question, `block_size(shape)`: the shape of the block whose elements share quantization
parameters. The block has the rank of the tensor and tiles it.

| granularity      | block of a [N, K] tensor | parameters |
|------------------|--------------------------|------------|
| `PerTensor()`    | (N, K)                   | 1          |
| `PerRow()`       | (1, K)                   | N          |
| `PerToken()`     | (1, K)                   | N, of an activation: computed anew for every input |
| `PerGroup(g)`    | (1, g)                   | N · K/g    |
| `PerBlock(a, b)` | (a, b)                   | N/a · K/b  |

Leading dimensions (experts, batch) are never shared: they get blocks of 1, except under `PerTensor`. The weight of a
convolution counts as the matrix of its rows (`lowbit.tensor.frozen.conv_tensor`).

A granularity of your own is a frozen dataclass in any file. Its fields are ints, and schemes, checkpoints and pickles
then know it by the name of the class:

    @dataclass(frozen=True)
    class PerColumn(Granularity):
        shares_rows: ClassVar[bool] = True

        def block_size(self, shape):
            return (*[1] * (len(shape) - 2), max(shape[-2], 1), 1)

        def spans(self, dim, rank):
            return dim == rank - 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from lowbit.numerics import class_names
from lowbit.numerics.settings import check_whole


def _rows(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    if len(shape) == 0:
        raise ValueError(
            f"{kind} needs a tensor of at least one dimension, got a scalar; use PerTensor()"
        )
    return (*([1] * (len(shape) - 1)), max(shape[-1], 1))


@dataclass(frozen=True)
class Granularity:
    """The base of every granularity; see the module for how to write one."""

    kinds: ClassVar[dict[str, type[Granularity]]] = {}
    """Every granularity by the name that checkpoints use. Each class enters itself. A name that another class has
    raises TypeError."""
    shares_rows: ClassVar[bool] = False
    """True if elements of several rows (indices of dimension 0 of a matrix) may share a scale."""

    def __init_subclass__(cls) -> None:
        class_names.enter(Granularity.kinds, cls)
        torch.serialization.add_safe_globals([cls])

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block of a tensor of this shape; every size is at least 1."""
        raise NotImplementedError(f"{type(self).__name__} defines no block_size(shape)")

    def spans(self, dim: int, rank: int) -> bool:
        """True if one block covers all of dimension `dim` of a tensor of `rank` dimensions, of any length."""
        return False

    def sizes(self) -> tuple[int, ...]:
        """The arguments of the constructor: `type(self)(*self.sizes())` is equal to `self`."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the whole tensor."""

    shares_rows: ClassVar[bool] = True

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(size, 1) for size in shape)

    def spans(self, dim: int, rank: int) -> bool:
        return True


@dataclass(frozen=True)
class PerRow(Granularity):
    """One scale for each row along the last dimension: for a weight, one an output channel."""

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _rows(shape, "PerRow()")

    def spans(self, dim: int, rank: int) -> bool:
        return dim == rank - 1


@dataclass(frozen=True)
class PerToken(Granularity):
    """One scale for each token of an activation [..., K], computed from the token itself."""

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _rows(shape, "PerToken()")

    def spans(self, dim: int, rank: int) -> bool:
        return dim == rank - 1


@dataclass(frozen=True)
class PerGroup(Granularity):
    """One scale for each `group_size` consecutive elements of the last dimension."""

    group_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", check_whole("group_size", self.group_size))

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) == 0:
            _rows(shape, "PerGroup()")
        return (*([1] * (len(shape) - 1)), self.group_size)


@dataclass(frozen=True, init=False)
class PerBlock(Granularity):
    """One scale for each tile of the trailing dimensions, e.g. `PerBlock(128, 128)`.

    The tile of a linear [N, K] has `a` outputs and `b` inputs, and so has that of stacked experts, also where a stock
    model has them as [E, K, N] (gpt-oss, Llama 4). The one exception is `PerBlock(g, 1)` for those: it means groups of
    g inputs, as files of the model's own format describe them, and is stored as `PerGroup(g)`. So one pattern with
    `PerBlock(g, 1)` for a whole model of this kind gives its linears tiles of g outputs, and its experts groups of g
    inputs; take `PerGroup(g)` for groups of inputs in both.

    Args:
        shape: sizes of the tile, one or more positive numbers.
    """

    shares_rows: ClassVar[bool] = True
    shape: tuple[int, ...]

    def __init__(self, *shape: int) -> None:
        if not shape:
            raise ValueError(
                "PerBlock needs the size of at least one dimension, e.g. PerBlock(128, 128)"
            )
        sizes = tuple(check_whole("a size of PerBlock", size) for size in shape)
        object.__setattr__(self, "shape", sizes)

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) < len(self.shape):
            raise ValueError(
                f"PerBlock{self.shape} needs a tensor of at least {len(self.shape)} dimensions, "
                f"got shape {tuple(shape)}"
            )
        return (*([1] * (len(shape) - len(self.shape))), *self.shape)

    def sizes(self) -> tuple[int, ...]:
        return self.shape
