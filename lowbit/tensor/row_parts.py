"""Work on a weight in parts of its rows, so that the float32 temporaries of quantizing it stay small.

Quantizing takes a handful of float32 and bool tensors of the size of what is quantized. In parts of 2 million
elements that is some 50 MB, not ten times the largest layer; rows that share no scale give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

PART_ELEMENTS = 2**21

Encode = Callable[[Tensor], Mapping[str, Tensor | None]]


def row_parts(t: Tensor) -> Iterator[Tensor]:
    """Views of `t`, whole rows in their order, of at most `PART_ELEMENTS` elements or one row."""
    if t.ndim < 2 or t.numel() <= PART_ELEMENTS:
        yield t
    elif t[0].numel() > PART_ELEMENTS and t.ndim > 2:
        for entry in t:
            yield from row_parts(entry)
    else:
        yield from t.split(max(PART_ELEMENTS // t[0].numel(), 1))


def encode_in_parts(weight: Tensor, encode: Encode) -> dict[str, Tensor | None]:
    """`encode(weight)`, part by part, where its tensors [..., n] have the rows of `weight` [..., K], and no row depends
    on another."""
    if weight.is_meta or torch.compiler.is_compiling() or weight.numel() <= PART_ELEMENTS:
        return dict(encode(weight))
    whole: dict[str, Tensor | None] = {}
    start = 0
    for part in row_parts(weight):
        rows = part.shape[:-1].numel()
        for name, t in encode(part).items():
            if t is None:
                whole[name] = None
                continue
            if name not in whole:
                whole[name] = t.new_empty((*weight.shape[:-1], t.shape[-1]))
            target = whole[name]
            assert target is not None
            target.flatten(0, -2)[start : start + rows] = t.flatten(0, -2)
        start += rows
    return whole


def count_nonfinite(t: Tensor) -> int:
    """NaN and infinite elements."""
    bad = [(~torch.isfinite(part)).sum() for part in row_parts(t)]
    return int(torch.stack(bad).sum()) if bad else 0
