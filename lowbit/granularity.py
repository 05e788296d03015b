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

Leading dimensions (experts, batch) are never shared: they get blocks of 1, except under `PerTensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def _check_positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _rows(shape: Sequence[int], kind: str) -> tuple[int, ...]:
    if len(shape) == 0:
        raise ValueError(
            f"{kind} needs a tensor of at least one dimension, got a scalar; use PerTensor()"
        )
    return (*([1] * (len(shape) - 1)), max(shape[-1], 1))


@dataclass(frozen=True)
class PerTensor:
    """One scale for the whole tensor."""

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(size, 1) for size in shape)


@dataclass(frozen=True)
class PerRow:
    """One scale for each row along the last dimension: for a weight, one an output channel."""

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _rows(shape, "PerRow()")


@dataclass(frozen=True)
class PerToken:
    """One scale for each token of an activation [..., K], computed from the token itself."""

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _rows(shape, "PerToken()")


@dataclass(frozen=True)
class PerGroup:
    """One scale for each `group_size` consecutive elements of the last dimension."""

    group_size: int

    def __post_init__(self) -> None:
        _check_positive_int("group_size", self.group_size)

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*_rows(shape, "PerGroup()")[:-1], self.group_size)


@dataclass(frozen=True, init=False)
class PerBlock:
    """One scale for each tile of the trailing dimensions, e.g. `PerBlock(128, 128)`."""

    shape: tuple[int, ...]

    def __init__(self, *shape: int) -> None:
        if not shape:
            raise ValueError(
                "PerBlock needs the size of at least one dimension, e.g. PerBlock(128, 128)"
            )
        for size in shape:
            _check_positive_int("a size of PerBlock", size)
        object.__setattr__(self, "shape", shape)

    def block_size(self, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) < len(self.shape):
            raise ValueError(
                f"PerBlock{self.shape} needs a tensor of at least {len(self.shape)} dimensions, "
                f"got shape {tuple(shape)}"
            )
        return (*([1] * (len(shape) - len(self.shape))), *self.shape)


Granularity = PerTensor | PerRow | PerToken | PerGroup | PerBlock
