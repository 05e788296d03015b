"""What `lowbit.train.explain` looks at: the products of prepared weights, noted as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

PRODUCTS = ("output", "grad_input", "grad_weight")


@dataclass
class Note:
    """Of one product of a layer with an input of `m` rows and a weight [n, k], and of its two in backward.

    `ran`: what each ran in, a format of `lowbit_kernels.quantize_rowcol` or a dtype, by name; `why`: the reason why
    none ran in low bits.
    """

    m: int
    n: int
    k: int
    why: str | None = None
    ran: dict[str, str] = field(default_factory=dict)


_notes: list[Note] | None = None


def note(m: int, n: int, k: int, why: str | None) -> Note | None:
    """A Note to fill in, while somebody watches."""
    if _notes is None:
        return None
    made = Note(m, n, k, why)
    _notes.append(made)
    return made


def record(note: Note | None, product: str, ran: str | torch.dtype) -> None:
    """Say what one of `PRODUCTS` ran in."""
    if note is not None:
        note.ran[product] = str(ran).removeprefix("torch.")


@contextmanager
def watched() -> Iterator[list[Note]]:
    """Gather the notes of all products that run inside, in their order."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before
