"""SHA-256 digests of tensors: the entry that a checkpoint stores for each, and the comparison after reading.

    {"dtype": "uint8", "shape": [N, K], "sha256": "…"}      of the elements' bytes, row after row, little-endian

Digests find damage, not forgery: an attacker who changes a tensor can change its digest. Several threads hash at once,
since OpenSSL releases Python's lock; one core takes about 0.6 s a GB. A tensor that stays on a GPU gets a fingerprint
there instead (`fingerprint`), since copying and hashing 14 GiB took 22 s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbit.files.memory import is_short_memory
from lowbit.progress import progress

Entries = dict[str, dict[str, Any]]
"""The entry of each tensor by its name."""
TEXT, SEAL = "lowbit_stored", "lowbit_stored_sha256"
"""In the metadata of a shard: the entries of its tensors as JSON, and the digest of this text."""
PIECE = 2**22
"""Bytes that are copied, hashed and written at once."""
_MIXED = 2**25
"""Bytes that a GPU mixes at once."""
_MOST_THREADS = 16
_UNKNOWN = "0" * 64
_D = TypeVar("_D")


def threads() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(usable or 1, _MOST_THREADS)


def of_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """The digest of bytes that come in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def of_text(text: str) -> str:
    """The digest of a text in UTF-8."""
    return of_pieces([text.encode("utf-8", "surrogatepass")])


def of_tensor(t: Tensor) -> str:
    """The digest of a plain tensor's elements in row-major order, for any strides and device."""
    elements = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return of_pieces([elements.numpy().data])


def fingerprint(t: Tensor) -> dict[str, str]:
    """The digest of a plain tensor of any strides, computed on its device: {"sha256": …} on a CPU, and {"mixed": …},
    two sums of 64 bits, elsewhere."""
    return {"sha256": of_tensor(t)} if t.device.type == "cpu" else {"mixed": mixed_sums(t)}


def mixed_sums(t: Tensor) -> str:
    """128 bits of a plain tensor's elements in row-major order, computed where it lies.

    w_i    the i-th eight bytes as a little-endian integer, i = 1, 2, …; the last ones filled up with zeros
    x_i    splitmix64's finalizer of w_i XOR i·0x9E3779B97F4A7C15
    y_i    one more round of it on x_i
    result Σ x_i, Σ y_i modulo 2**64, in hexadecimal

    Both maps of w_i are one to one, so a change within eight bytes always shows. An attacker can find collisions.
    """
    data = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    total = torch.zeros(2, dtype=torch.int64, device=t.device)
    for begin in range(0, len(data), _MIXED):
        part = data[begin : begin + _MIXED]
        if len(part) % 8:
            part = torch.nn.functional.pad(part, (0, -len(part) % 8))
        words = part.view(torch.int64)
        place = torch.arange(len(words), device=t.device).add_(begin // 8 + 1)
        x = place.mul_(_signed(0x9E3779B97F4A7C15)).bitwise_xor_(words)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = _shifted(x, shift).mul_(_signed(factor))
        x = _shifted(x, 31)
        total[0] += x.sum()
        total[1] += _shifted(x.mul_(_signed(0xD6E8FEB86659FD93)), 32).sum()
    return "".join(f"{value % 2**64:016x}" for value in total.tolist())


def _signed(factor: int) -> int:
    return factor - 2**64 if factor >= 2**63 else factor


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x XOR (x >> bits) of unsigned integers."""
    return x ^ (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def while_written(t: Tensor, write: Callable[[memoryview], Any]) -> str:
    """The digest of the bytes that `write` gets: the elements of `t`, contiguous and on any device, in pieces.

    Each piece is a copy, so that no other thread changes it between hashing and writing.
    """

    def pieces() -> Iterator[memoryview]:
        elements = t.detach().reshape(-1).view(torch.uint8)
        for begin in range(0, len(elements), PIECE):
            piece = elements[begin : begin + PIECE].to("cpu", copy=True).numpy().data
            write(piece)
            yield piece

    return of_pieces(pieces())


def _digest(t: Tensor) -> str | None:
    try:
        return of_tensor(t)
    except (RuntimeError, TypeError) as error:
        if is_short_memory(error):
            raise
        return None  # a damaged file may describe elements that cannot be read


def layout(t: Tensor) -> dict[str, Any]:
    """The dtype and shape of a tensor, as an entry has them."""
    return {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}


def entries(tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> Entries:
    """The entry of each tensor by name: dtype, shape and digest. A digest that `found` lacks is zero."""
    return {name: {**layout(t), "sha256": found.get(name, _UNKNOWN)} for name, t in tensors.items()}


def texts(entries: Entries) -> dict[str, str]:
    """The metadata of a shard whose tensors have these entries."""
    text = json.dumps(entries)
    return {TEXT: text, SEAL: of_text(text)}


def taken(metadata: dict[str, str]) -> Entries | None:
    """The entries in the metadata of a shard, which are removed there; None for a shard without digests.

    Raises ValueError if the entries are damaged.
    """
    text, seal = metadata.pop(TEXT, None), metadata.pop(SEAL, None)
    if text is None and seal is None:
        return None
    if text is None or seal != of_text(text):
        raise ValueError("the digests of its tensors are damaged")
    found: Entries = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(e, dict) for e in found.values()):
        raise ValueError("the digests of its tensors are not entries by name")
    return found


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
        if saved != layout(t):
            return f"{name} is damaged: it has {layout(t)}, and was saved with {saved}"
    return None


def damaged(
    entries: Mapping[str, Any], tensors: Mapping[str, Tensor], names: Iterable[str]
) -> set[str]:
    """The subset of `names` whose tensors hold other bytes than were saved."""
    found = each(lambda _, t: _digest(t), {name: tensors[name] for name in names}, "hashing")
    return {
        name
        for name, digest in found.items()
        if digest is None or digest != entries[name].get("sha256")
    }


def each(
    digest: Callable[[str, Tensor], _D], tensors: Mapping[str, Tensor], what: str
) -> dict[str, _D]:
    """`digest` of each of the `tensors`, by name, in several threads, under the bar `what`.

    After an error no further digest begins.
    """
    found: dict[str, _D] = {}
    total = sum(t.nbytes for t in tensors.values())
    pool = ThreadPoolExecutor(threads())
    with progress(what, total) as advance:
        try:
            made = pool.map(digest, tensors.keys(), tensors.values())
            for (name, t), one in zip(tensors.items(), made, strict=True):
                found[name] = one
                advance(t.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more} {'is' if len(names) == 1 else 'are'}"
