"""Process a weight in chunks of rows, so that the float32 temporaries of quantization stay small.

Quantization allocates several float32 and bool tensors of its input's size. In chunks of 2 million elements they take
about 50 MB instead of ten times the largest layer, on a GPU in four times as many 200 MB. The result has the same bits
where rows share no scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**21
GPU_FACTOR = 4
"""A GPU takes so many times larger chunks. On smaller ones its operations end before the host has launched the next."""

Encode = Callable[..., Mapping[str, Tensor | None]]


def chunk_elements(device: torch.device) -> int:
    """The most elements of a chunk."""
    return CHUNK_ELEMENTS * (GPU_FACTOR if device.type == "cuda" else 1)


def row_chunks(t: Tensor) -> Iterator[Tensor]:
    """Views of `t` of whole rows, in order, each of at most `chunk_elements` or one row."""
    most = chunk_elements(t.device)
    if t.ndim < 2 or t.numel() <= most:
        yield t
    elif t[0].numel() > most and t.ndim > 2:
        for entry in t:
            yield from row_chunks(entry)
    else:
        yield from t.split(max(most // t[0].numel(), 1))


def encode_in_chunks(
    weight: Tensor, encode: Encode, *beside: Tensor | None
) -> dict[str, Tensor | None]:
    """`encode(weight, *beside)`, computed chunk by chunk. `encode` maps rows [..., K] to tensors [..., n] row by row;
    `beside` are further tensors [..., n] with these rows, such as their scales."""
    if (
        weight.is_meta
        or torch.compiler.is_compiling()
        or weight.numel() <= chunk_elements(weight.device)
    ):
        return dict(encode(weight, *beside))
    whole: dict[str, Tensor | None] = {}
    start = 0
    for chunk in row_chunks(weight):
        rows = chunk.shape[:-1].numel()
        own = [
            None
            if t is None
            else t.flatten(0, -2)[start : start + rows].unflatten(0, chunk.shape[:-1])
            for t in beside
        ]
        for name, t in encode(chunk, *own).items():
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
    """The number of NaN and infinite elements.

    The ends of the range say whether there are any: on a CPU `isfinite` takes some 30 times as long as `aminmax`, which
    passes NaN on.
    """
    if not t.numel():
        return 0
    # Booleans, because autocast refuses to stack numbers of another 16-bit dtype than its own.
    ends = [end.isfinite() for chunk in row_chunks(t) for end in chunk.aminmax()]
    if bool(torch.stack(ends).all()):
        return 0
    return int(torch.stack([(~chunk.isfinite()).sum() for chunk in row_chunks(t)]).sum())
