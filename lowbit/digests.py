"""SHA-256 digests of tensors: the entry that a checkpoint stores for each, and the comparison after reading.

    {"dtype": "uint8", "shape": [N, K], "sha256": "…"}      of the elements' bytes, row after row, little-endian

Digests find damage, not forgery: whoever can change a tensor can change its digest. Several threads hash at once,
since OpenSSL releases Python's lock; one core takes about 0.6 s a GB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.progress import progress

_MOST_THREADS = 16
_D = TypeVar("_D")


def threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(usable or 1, _MOST_THREADS)


def of_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def of_tensor(t: Tensor) -> str:
    """The digest of a plain tensor's elements in row-major order, whatever its strides and device."""
    elements = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(elements.numpy().data).hexdigest()


def _digest(t: Tensor) -> str | None:
    try:
        return of_tensor(t)
    except (RuntimeError, TypeError):  # a damaged file may describe elements that cannot be read
        return None


def _layout(t: Tensor) -> dict[str, Any]:
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """The entry of each tensor by name: dtype, shape and digest."""
    found = _each(of_tensor, tensors)
    return {name: {**_layout(t), "sha256": found[name]} for name, t in tensors.items()}


def misplaced(entries: Any, tensors: Mapping[str, Tensor]) -> str | None:
    """Which tensors are missing, unexpected, or differ in dtype or shape; None if all agree. Reads no values."""
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        return "its digests are damaged"
    for names, problem in (
        (entries.keys() - tensors.keys(), "missing"),
        (tensors.keys() - entries.keys(), "not among those that were saved"),
    ):
        if names:
            return f"{listed(sorted(names))} {problem}"
    for name, t in tensors.items():
        saved = {key: entries[name].get(key) for key in ("dtype", "shape")}
        if saved != _layout(t):
            return f"{name} is damaged: it has {_layout(t)}, and was saved with {saved}"
    return None


def damaged(
    entries: Mapping[str, Any], tensors: Mapping[str, Tensor], names: Iterable[str]
) -> set[str]:
    """The subset of `names` whose tensors hold other bytes than were saved."""
    found = _each(_digest, {name: tensors[name] for name in names})
    return {name for name, digest in found.items() if digest != entries[name].get("sha256")}


def _each(digest: Callable[[Tensor], _D], tensors: Mapping[str, Tensor]) -> dict[str, _D]:
    """`digest` of each tensor by name, in several threads."""
    found: dict[str, _D] = {}
    total = sum(t.nbytes for t in tensors.values())
    with progress("hashing", total) as advance, ThreadPoolExecutor(threads()) as pool:
        for (name, t), one in zip(tensors.items(), pool.map(digest, tensors.values()), strict=True):
            found[name] = one
            advance(t.nbytes)
    return found


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'is' if len(names) == 1 else 'are'}"
