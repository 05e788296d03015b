"""What `lowbit.train.explain` looks at: the products of prepared weights, noted as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Note:
    """Of one product of a layer with an input of `m` rows and a weight [n, k], and of its two in backward.

    `ran`: what each ran in, a format of `lowbit_kernels.quantize_rowcol` or a dtype, by name; `why`: the reason why
    none ran in low bits.
    """

    layer: str
    m: int
    n: int
    k: int
    why: str | None = None
    ran: dict[str, str] = field(default_factory=dict)


@dataclass
class Watch:
    """What has been noted, and the names of the modules that are running, the innermost last."""

    notes: list[Note] = field(default_factory=list)
    running: list[str] = field(default_factory=list)


_watch: Watch | None = None


def note(m: int, n: int, k: int, why: str | None) -> Note | None:
    """A Note to fill in, while somebody watches."""
    if _watch is None:
        return None
    made = Note(_watch.running[-1] if _watch.running else "", m, n, k, why)
    _watch.notes.append(made)
    return made


def record(note: Note | None, product: str, ran: str | torch.dtype) -> None:
    """Say what one of `PRODUCTS` ran in."""
    if note is not None:
        note.ran[product] = str(ran).removeprefix("torch.")


@contextmanager
def watched() -> Iterator[Watch]:
    """Gather the notes of all products that run inside, in their order."""
    global _watch
    before, _watch = _watch, Watch()
    try:
        yield _watch
    finally:
        _watch = before
