"""The memory of common GPUs, in GiB as torch reports it, rounded down: the driver keeps a part, so that an RTX 4090 of
24 GB has 23.5 GiB."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A size of memory, and GPUs that have it."""

    gib: float
    names: str


GPUS = (
    Gpu(7, "RTX 4060, RTX 3070"),
    Gpu(11, "RTX 4070, RTX 3060"),
    Gpu(14, "T4"),
    Gpu(15, "RTX 4080, RTX 5080"),
    Gpu(22, "L4, A10"),
    Gpu(23, "RTX 4090, RTX 3090"),
    Gpu(31, "RTX 5090"),
    Gpu(39, "A100 40 GB"),
    Gpu(44, "L40S, RTX 6000 Ada"),
    Gpu(79, "H100, A100 80 GB"),
    Gpu(94, "RTX PRO 6000"),
    Gpu(139, "H200"),
    Gpu(178, "B200"),
)
"""In order of their memory."""

CONTEXT = 1 * GIB
"""Bytes that CUDA, its libraries and the fragments of torch's allocator take besides tensors. An assumption."""


def smallest(nbytes: float) -> Gpu | None:
    """The first GPU that holds tensors of so many bytes; None if no single GPU does."""
    return next((gpu for gpu in GPUS if nbytes + CONTEXT <= gpu.gib * GIB), None)
