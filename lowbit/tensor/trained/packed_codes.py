"""Codes before the clamp in fewer bits than a byte each: digits of numbers that fill a 64-bit word.

Besides the L codes of a format, a code before the clamp may lie below or above them: L + 2 symbols in all, 18 for 4
bits. 15 digits of base 18 fit in 63 bits, which are 4.27 bits a code for 5 of whole bits.

    word = Σ_i symbol_i · base^i        base^digits <= 2^63

An `Int` that cannot clip has L symbols. The symbols of a `LookupTable` are its codes, then one for each side; those of
an `Int` lie in the order of its codes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Float8
from lowbit.numerics.packing import pack
from lowbit.numerics.spec import Spec


def digits_in(base: int) -> int:
    """How many digits of this base fit in 63 bits."""
    digits = 1
    while base ** (digits + 1) <= 2**63:
        digits += 1
    return digits


def saves(spec: Spec) -> bool:
    """True if packed codes of this spec take less than a byte."""
    return not isinstance(spec.format, Float8) and digits_in(_base(spec, True)) > 8


def words_in(size: int, spec: Spec, clips: bool) -> int:
    """Words of a row of `size` codes."""
    return -(-size // digits_in(_base(spec, clips)))


def packed(codes: Tensor, spec: Spec, clips: bool) -> Tensor:
    """int64 [..., words] of codes before the clamp [..., K], as `Spec.unclamped_codes` gives them.

    Args:
        clips: whether some of them may lie beyond the format (`Spec.may_clip`).
    """
    fmt = spec.format
    if isinstance(fmt, LookupTable):
        above = ~(codes < 0)  # NaN too, of which `nearest` takes the last value
        beyond = len(fmt.values) + above.to(torch.uint8)
        symbols = torch.where(fmt.reaches(codes), fmt.codes(fmt.nearest(codes)), beyond)
    else:
        symbols = codes.to(torch.int16) - (int(fmt.quant_min) - clips)
    base = _base(spec, clips)
    digits = digits_in(base)
    padded = F.pad(symbols, (0, -symbols.shape[-1] % digits)).unflatten(-1, (-1, digits))
    word = padded[..., -1].to(torch.int64)
    for i in reversed(range(digits - 1)):
        word = word * base + padded[..., i]
    return word


def unpacked(words: Tensor, spec: Spec, clips: bool, size: int) -> Tensor:
    """The inverse of `packed`: [..., size], of the dtype of the codes. Codes beyond a `LookupTable` are infinite."""
    base, found = _base(spec, clips), []
    for _ in range(digits_in(base)):
        rest = words // base
        found.append((words - rest * base).to(torch.uint8))
        words = rest
    symbols = torch.stack(found, -1).flatten(-2)[..., :size]
    fmt = spec.format
    if not isinstance(fmt, LookupTable):
        low = int(fmt.quant_min) - clips
        return (symbols.to(torch.int16) + low).to(spec.unclamped_dtype(clips))
    count = len(fmt.values)
    values = fmt.look_up(pack(symbols.clamp(max=count - 1), fmt.bits), size)
    values = values.masked_fill(symbols == count, -torch.inf)
    return values.masked_fill(symbols == count + 1, torch.inf)


def _base(spec: Spec, clips: bool) -> int:
    fmt = spec.format
    assert not isinstance(fmt, Float8)
    return 2**fmt.bits + 2 * (clips or isinstance(fmt, LookupTable))
