"""The layout of matrices whose columns belong to experts, as transposed copies of tokens have it.

Tokens are sorted by expert; `offsets` (int32 [E]) holds the end of each expert's rows, as ``torch._grouped_mm`` takes
it. Products that sum over the tokens of an expert read 128 columns at a time. So the columns of an expert begin at a
multiple of 128:

    start[e] = sum over f < e of 128 * ceil(tokens of f / 128)

and the columns up to the next multiple of 128 are zeros. The matrix has room for all experts, however the tokens fall.
Its columns from there on have any values. Everything follows from the offsets, so only the device needs to read them.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 128


def width(tokens: int, experts: int) -> int:
    """Columns of the matrix, a multiple of 16, of all `tokens`, sizes that may be symbolic."""
    return (tokens + (STEP - 1) * experts + 15) // 16 * 16


def tokens(width: int, experts: int) -> int:
    """The most tokens that a matrix of this width is made for: 0 to 15 too many."""
    return max(width - (STEP - 1) * experts, 0)


def counts(offsets: Tensor, tokens: int) -> Tensor:
    """Tokens of each expert, int64 [E]. Offsets that fall or exceed `tokens` count as the nearest ones that do not."""
    ends = offsets.to(torch.int64).clamp(0, tokens).cummax(0).values if offsets.numel() else offsets
    return ends.diff(prepend=ends.new_zeros(1))


def places(offsets: Tensor, tokens: int, width: int) -> Tensor:
    """The column of each token, int64 [M]; `width` for those that no expert has."""
    found = counts(offsets, tokens)
    ends, token = found.cumsum(0), torch.arange(tokens, device=offsets.device)
    owner = torch.searchsorted(ends, token, right=True)  # `experts` where no expert has it
    shift = torch.cat([starts(found) - ends + found, found.new_zeros(1)])[owner]
    return torch.where(owner < len(found), token + shift, width)


def starts(counts: Tensor) -> Tensor:
    """The first column of each expert, int64 [E]."""
    padded = (counts + STEP - 1) // STEP * STEP
    return padded.cumsum(0) - padded
