"""The Euclidean norm of many elements.

On a CPU torch.linalg.vector_norm keeps a few running float32 sums. Once a sum is large, small squares vanish in it: 30M
elements of 0.001 give a norm that is 1.6% too small, 4e8 normal values 7.3%. With float64 sums vector_norm takes 70
times as long. `long_norm` keeps float32 sums short: norms of blocks in float32, their squares in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Elements whose squares are added in float32."""
_LEAST = 1e-12
"""Squares of values that count for a norm of this size do not underflow in float32."""


def long_norm(x: Tensor) -> Tensor:
    """The root of the sum of the squares of all elements, float64 without dimensions, on the device of `x`.

    The norm is finite exactly if every element is, since squares that float32 cannot hold are added in float64.
    """
    if x.device.type == "cpu" and x.numel() > BLOCK and x.dtype != torch.float64:
        found = _of_blocks(x.detach().reshape(-1))
        if _LEAST < found < torch.inf:
            return found
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def _of_blocks(flat: Tensor) -> Tensor:
    whole = flat.numel() // BLOCK * BLOCK
    blocks = flat[:whole].view(-1, BLOCK)
    norms = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64)
    return (norms.double().square().sum() + rest.square()).sqrt()
