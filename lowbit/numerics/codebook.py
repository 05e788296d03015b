"""Lookup tables of 4 and 8 bits, and blockwise quantization of optimizer states with them.

A codebook holds ``2**bits`` values in [-1, 1] (signed) or [0, 1] (unsigned), ascending; a code is an index into it.
8-bit codebooks are *dynamic maps* (8-bit optimizers, arXiv 2110.02861), which spend their codes evenly over decades.
With q the rank of a positive value, starting at 1 (signed) or 2 (unsigned), ``k = floor(log2 q)`` its decade and n the
last decade (bits - 2 signed, bits - 1 unsigned)::

    value(q) = 10**(k - n) * (0.1 + 0.9 * (q - 2**k + 0.5) / 2**k)

plus 0 and 1, and mirrored (without -1) where signed.

4 bits
------
4-bit optimizers (arXiv 2309.01507) take the dynamic map for first moments and ``i / 16`` for second ones, both to
nearest. A Llama of 316M parameters ends 2.1% higher with them than with float32 states, for two reasons, measured in
benchmarks/LOG.md ("4 bits: squares and powers of two").

*Rounding to nearest leaves a momentum where it is.* A step moves a momentum by a tenth of the way to the gradient. That
is often less than half the way to the next of 16 values. An optimizer's step therefore rounds 4 bits stochastically, so
that the mean of what is stored is the moment itself.

*Second moments of a block differ by more than 16 times.* The linear table stores a smaller moment as a sixteenth of the
largest, and its weight moves too little. So the book without a sign holds powers of two, ``2**(code - 15)``. This book
has no zero, because an update divided by the root of zero blows up. Scales are powers of two as well: a moment that
stays the same keeps its value when the largest of its block changes.

The signed book holds squares, ``(i / 7)**2`` and their negatives, i = 0..7, at ``code = 7 + i`` and ``7 - i``. Code 15
is the next square, which no block has. With y the value divided by its block's scale, and 16 random bits ``r``, all in
float32::

    unsigned    b = bits(clamp(y, 0, 1)) + 128 r + 64           bits: those of the float32, as an integer
                code = max((b >> 23) - 112, 0)
    signed      z = 49 * min(abs(y), 1)
                i = trunc(sqrt(z))
                level = i + ((z - i**2) * 65536 > (r + 0.5) * (2 i + 1))
                code = 7 + level, or 7 - level for negative y

A NaN counts as 0; the scale keeps the NaN. The mantissa of y is its distance from the power of two below it, so adding
random bits to the mantissa carries into the exponent with the right probability. ``2 i + 1`` is the distance to the
next square. Only the root is inexact, and the comparison repairs it, so that GPUs may take an approximate root. The
root is off by some units in the last place, so i is wrong only if z lies next to a square ``k**2``: it is then k - 1 in
place of k, or k in place of k - 1. With ``i = k - 1`` the left side is almost ``65536 (2 i + 1)``, above the right side
for all r. With ``i = k`` it is almost 0 or negative, below the right side for all r. The level is k in both cases.

Nearest in constant time
------------------------
A search of the table costs log2(size) dependent reads an element. Instead, the upper 16 bits of a float32
(sign, exponent, 7 bits of mantissa) are the index of a *cell*. The values of every book are so far apart that at most
one boundary between two codes falls into a cell. So a cell stores the code g of its smallest element, and the lower 16
bits decide whether ``x`` takes g or g + 1. One read and one addition give both; the carry of the addition is the
comparison (arithmetic modulo 2**32; the shift keeps the sign)::

    code = abs((step[bits(x) >> 16] + bits(x)) >> 16)
    step[cell] = ((g - cell) << 16) + 2**16 - first        cell >= 0: first = lower bits of the first x of g + 1
    step[cell] = ((-g - 1 - cell) << 16) + 2**16 - first   cell < 0, where x falls as its bits rise: first x of g

The boundary is the largest float32 that is not above the midpoint of the values g and g + 1. So the result is the
nearest code for every float32, and an exact tie takes the lower code. No operation rounds, so the result is the same on
every device and under every compiler.

Codes of 4 bits are decoded two at a time: their byte is the index of a table of pairs of values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowbit.numerics.opaque import opaque
from lowbit.numerics.settings import check_whole

# Far below the second moments of the smallest useful gradients (a gradient of 1e-6 has a moment of 1e-12), and still a
# normal float32 when divided by 448.
ABSMAX_FLOOR = 2.0**-100
FLOAT8_MAX = 448.0
_CELLS = 2**16


@dataclass(frozen=True)
class Codebook:
    """The table of a width and a sign.

    Args:
        bits: 4 or 8.
        signed: values in [-1, 1] (first moments) or in [0, 1] (second moments).
    """

    bits: int
    signed: bool

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (4, 8):
            raise ValueError(f"a codebook has 4 or 8 bits, got bits={self.bits!r}")
        if not isinstance(self.signed, bool):
            raise ValueError(f"signed must be True or False, got {self.signed!r}")

    @property
    def rounds_stochastically(self) -> bool:
        """True if `encode_stochastically` takes this book: those of 4 bits."""
        return self.bits == 4

    @property
    def scales_are_powers(self) -> bool:
        """True if each block is divided by a power of two that is not below its largest magnitude."""
        return self.bits == 4 and not self.signed

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 ``[2**bits]``, ascending. One tensor per device, shared: do not write to it.

        Inside ``torch.compile`` use :meth:`decode`.
        """
        return _on_device(self, torch.device(device)).values

    def encode(self, x: Tensor) -> Tensor:
        """The codes of the nearest values.

        Args:
            x: float32, any shape. Values beyond the ends of the table are clamped.

        Returns:
            uint8 of the shape of ``x``. An exact tie takes the lower code. NaN takes a valid code, the same one
            on every device (:func:`quantize_blockwise` keeps NaN in the scale).

        Raises:
            TypeError: ``x`` is not float32.
        """
        if x.dtype != torch.float32:
            raise TypeError(f"encode takes float32, got {x.dtype}; convert with x.float()")
        return torch.ops.lowbit.codebook_encode(x, self.bits, self.signed)

    def encode_stochastically(self, x: Tensor, random: Tensor) -> Tensor:
        """The codes of the values above and below, in proportion to the distances: see the module.

        Args:
            x: float32, any shape. Values beyond the ends of the table are clamped.
            random: int32 of the shape of ``x``, values 0..65535 (:func:`lowbit.numerics.rounding.bits_at`).

        Returns:
            uint8 of the shape of ``x``. The mean over all random bits is ``x``, up to ``2**-17`` of the distance
            between the two values.

        Raises:
            TypeError: ``x`` is not float32.
            ValueError: the book rounds to nearest only, or ``random`` has another shape.
        """
        if not self.rounds_stochastically:
            raise ValueError(f"{self} is not rounded stochastically; accepted: books of 4 bits")
        if x.dtype != torch.float32:
            raise TypeError(
                f"encode_stochastically takes float32, got {x.dtype}; convert with x.float()"
            )
        if random.shape != x.shape:
            raise ValueError(
                f"random must have the shape of x, {tuple(x.shape)}, got {tuple(random.shape)}"
            )
        if not self.signed:
            bits = x.nan_to_num(nan=0.0).clamp_(0, 1).view(torch.int32)
            level = bits.add(random, alpha=128).add_(64).bitwise_right_shift_(23).sub_(112)
            return level.clamp_(min=0).to(torch.uint8)
        z = x.abs().nan_to_num_(nan=0.0).clamp_(max=1).mul_(49)
        level = _square_above_or_below(z, z.sqrt().floor_(), random)  # trunc_ is many times slower
        return torch.where(x < 0, 7 - level, 7 + level).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """float32 values of uint8 ``codes`` (each below ``2**bits``), any shape."""
        if codes.dtype != torch.uint8:
            raise TypeError(f"decode takes uint8 codes, got {codes.dtype}")
        return torch.ops.lowbit.codebook_decode(codes, self.bits, self.signed)

    def decode_packed(self, packed: Tensor, size: int) -> Tensor:
        """float32 values ``[..., size]`` of codes packed by ``lowbit.numerics.packing.pack(codes, 4)``; 4-bit books
        only."""
        values = torch.ops.lowbit.codebook_decode_packed(packed, self.signed)
        return values if values.shape[-1] == size else values[..., :size].contiguous()

    def cells(self) -> Cells:
        """The table for the lookup in a kernel, see :class:`Cells`.

        Raises:
            ValueError: this is a book of 4 bits, whose codes are computed.
        """
        if self.bits == 4:
            raise ValueError("the books of 4 bits have no cells: see the module")
        return _cells(self.signed)


def _square_above_or_below(z: Tensor, root: Tensor, random: Tensor) -> Tensor:
    """`level` of the module, float32. `z`: 0 .. 49; `root`: its root, truncated, or one more or less next to a whole
    number. Both are overwritten."""
    rest = z.addcmul_(root, root, value=-1).mul_(65536)
    threshold = random.float().add_(0.5).mul_(root * 2 + 1)
    return root.add_(rest > threshold)


def power_of_two_above(x: Tensor) -> Tensor:
    """The power of two that is not below x, at most 2**127. x: float32, normal and positive, or NaN."""
    bits = x.view(torch.int32).add(0x7FFFFF).bitwise_and_(-0x800000).clamp_(max=0x7F000000)
    return torch.where(x.isnan(), x, bits.view(torch.float32))


def quantize_blockwise(
    x: Tensor, book: Codebook | torch.dtype, block: int, random: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale each block of the last dimension by its largest magnitude, and encode it.

    Args:
        x: any floating dtype, ``[..., C]``; computed in float32.
        book: a :class:`Codebook`, or ``torch.float8_e4m3fn``.
        block: elements that share a scale; the last block of a row may be shorter.
        random: None rounds to nearest. Random bits as `Codebook.encode_stochastically` takes them, of the shape of
            ``x``, round stochastically; for today's books of 4 bits.

    Returns:
        codes ``[..., C]``, uint8 (one code a byte for any number of bits; see :mod:`lowbit.numerics.packing`) or
        float8_e4m3fn; and scale, float32 ``[..., ceil(C / block)]``: ``max(absmax, 2**-100)`` of the block,
        divided by 448 for float8, rounded up to a power of two (at most ``2**127``) for 4 bits without a sign. A
        block that holds a NaN or an infinity gets a NaN scale, and dequantizes to NaN throughout.

    Raises:
        TypeError: ``x`` is not floating point, or ``book`` is neither of the two.
        ValueError: ``block`` is not a positive integer, ``x`` has no dimension, ``book`` has no stochastic rounding, or
            ``random`` has another shape than ``x``.
    """
    _check_block(book, block)
    if not x.is_floating_point():
        raise TypeError(f"quantize_blockwise takes a floating tensor, got {x.dtype}")
    if x.dim() == 0:
        raise ValueError("quantize_blockwise takes x [..., C], got a 0-d tensor; use x.reshape(1)")
    y = x.detach().to(torch.float32, memory_format=torch.contiguous_format)
    absmax = [part.abs().amax(dim=-1) for part in _blocks(y, block)]
    joined = absmax[0] if len(absmax) == 1 else torch.cat(absmax, dim=-1)
    scale = torch.where(joined.isfinite(), joined.clamp_min(ABSMAX_FLOOR), math.nan)
    if not isinstance(book, Codebook):
        # By a tensor: CUDA multiplies with the reciprocal of a Python number, which is off by an ulp.
        scale = scale / torch.full_like(scale, FLOAT8_MAX)
    elif book.scales_are_powers:
        scale = power_of_two_above(scale)
    each = zip(_blocks(y, block), _scales(y, scale, block), strict=True)
    parts = [(part / part_scale).flatten(-2) for part, part_scale in each]
    scaled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if random is not None:
        if not isinstance(book, Codebook):
            raise ValueError(
                f"{book} is not rounded stochastically; accepted: a Codebook of 4 bits"
            )
        return book.encode_stochastically(scaled, random), scale
    return (book.encode(scaled) if isinstance(book, Codebook) else scaled.to(book)), scale


def dequantize_blockwise(
    codes: Tensor, scale: Tensor, book: Codebook | torch.dtype, block: int
) -> Tensor:
    """The inverse of :func:`quantize_blockwise`: float32 ``[..., C]``.

    Args:
        codes: ``[..., C]``, uint8 or float8_e4m3fn as ``book`` says.
        scale: float32 ``[..., ceil(C / block)]``.
        book, block: as quantized.

    Raises:
        TypeError: ``codes`` is not of the dtype of ``book``.
        ValueError: the shape of ``scale`` does not match.
    """
    _check_block(book, block)
    expected = torch.uint8 if isinstance(book, Codebook) else book
    if codes.dtype != expected:
        raise TypeError(f"codes of {book} are {expected}, got {codes.dtype}")
    shape = (*codes.shape[:-1], -(-codes.shape[-1] // block))
    if scale.shape != shape:
        raise ValueError(
            f"codes {tuple(codes.shape)} in blocks of {block} take a scale of shape {shape}, "
            f"got {tuple(scale.shape)}"
        )
    y = book.decode(codes) if isinstance(book, Codebook) else _from_float8(codes)
    return scale_blocks(y, scale, block)


def scale_blocks(y: Tensor, scale: Tensor, block: int) -> Tensor:
    """Multiply blocks of the last dimension of contiguous float32 ``y`` by their ``scale``, in place."""
    for part, part_scale in zip(_blocks(y, block), _scales(y, scale, block), strict=True):
        part.mul_(part_scale)
    return y


def _blocks(y: Tensor, block: int) -> list[Tensor]:
    """Views of the whole blocks ``[..., n, block]`` and of the shorter last one ``[..., 1, rest]``."""
    whole, rest = divmod(y.shape[-1], block)
    parts = [y[..., : whole * block].unflatten(-1, (whole, block))] if whole or not rest else []
    return [*parts, y[..., whole * block :].unsqueeze(-2)] if rest else parts


def _scales(y: Tensor, scale: Tensor, block: int) -> list[Tensor]:
    """The scales of :func:`_blocks`, shaped to broadcast over them."""
    whole, rest = divmod(y.shape[-1], block)
    parts = [scale[..., :whole, None]] if whole or not rest else []
    return [*parts, scale[..., whole:, None]] if rest else parts


def _check_block(book: Codebook | torch.dtype, block: int) -> None:
    if not isinstance(book, Codebook) and book is not torch.float8_e4m3fn:
        raise TypeError(f"book must be a Codebook or torch.float8_e4m3fn, got {book!r}")
    check_whole("block", block)


@functools.cache
def _values(book: Codebook) -> np.ndarray:
    """The table, computed in float64 and rounded once: float32 ``[2**bits]``, ascending."""
    bits, signed, codes = book.bits, book.signed, np.arange(16.0)
    if book.scales_are_powers:
        return (2 ** (codes - 15)).astype(np.float32)
    if bits == 4:
        return ((codes - 7) * np.abs(codes - 7) / 49).astype(np.float32)
    first, last = (1, bits - 2) if signed else (2, bits - 1)
    rank = np.arange(first, 2 ** (last + 1), dtype=np.float64)
    decade = np.floor(np.log2(rank))
    step = 0.9 / 2**decade
    positive = 10.0 ** (decade - last) * (0.1 + step * (rank - 2**decade + 0.5))
    mirrored = -positive[::-1] if signed else positive[:0]
    return np.concatenate([mirrored, [0.0], positive, [1.0]]).astype(np.float32)


def boundaries(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The midpoints of neighbouring values, float64, and the largest float32 that are not above them."""
    wide = values.astype(np.float64)
    midpoints = (wide[:-1] + wide[1:]) / 2  # exact: two float32 within 2**24 of each other
    below = midpoints.astype(np.float32)
    below = np.where(below > midpoints, np.nextafter(below, np.float32(-np.inf)), below)
    return midpoints, below


class Cells(NamedTuple):
    """A book's boundaries between magnitudes, packed into 4 bytes for one read an element.

    The cell of ``y`` is ``r >> shift``, where r are the bits of float32 y rotated left by one (the sign becomes the
    last bit), clamped to ``first .. first + len(words) - 1``. Then the rank of \\|y\\| among the magnitudes of the
    book, nearest and with ties to the lower code (for negative y the larger magnitude), is::

        (words[cell - first] + (r & (2**shift - 1))) >> shift

    A word is the rank of the cell's smallest element, above ``shift`` bits that carry into it beyond the boundary.
    """

    first: int
    shift: int
    words: np.ndarray  # uint32


@functools.cache
def _cells(signed: bool) -> Cells:
    """The cells of the 8-bit book with or without a sign."""
    values = _values(Codebook(8, signed))
    values = values[values >= 0]
    midpoints, below = boundaries(values)
    boundary_bits = below.view(np.uint32)
    # keep the fewest bits of the mantissa that leave at most one boundary in a cell
    low = next(n for n in range(22, 0, -1) if len(set(boundary_bits >> n)) == len(boundary_bits))
    cell = (boundary_bits >> low).astype(np.int64)
    first = int(cell[0]) - 1
    rank = np.searchsorted(cell, np.arange(first, int(cell[-1]) + 2), side="left")
    carry = np.zeros(len(rank), np.int64)  # up from 2 * low bits + sign >= threshold
    threshold = 2 * (boundary_bits & ((1 << low) - 1)).astype(np.int64) + 2
    threshold -= below.astype(np.float64) == midpoints  # a tie: only a negative y goes up
    carry[cell - first] = (1 << (low + 1)) - threshold
    return Cells(first, low + 1, ((rank << (low + 1)) + carry).astype(np.uint32))


class _CodebookTables(NamedTuple):
    values: Tensor  # float32 [2**bits]
    step: Tensor  # int32 [_CELLS], at cell + _CELLS / 2
    pairs: Tensor  # int64 [256]: two float32 values, for the two codes of 4 bits in a byte


@functools.cache
def _on_device(book: Codebook, device: torch.device) -> _CodebookTables:
    if device.type != "cpu":
        return _CodebookTables(*(t.to(device) for t in _on_device(book, torch.device("cpu"))))
    values = _values(book)
    return _CodebookTables(
        torch.from_numpy(values.copy()),
        torch.from_numpy(steps(boundaries(values)[1])),
        pairs(values[:16]),
    )


def pairs(values: np.ndarray) -> Tensor:
    """int64 [256]: for each byte, the two float32 values of its 4-bit codes. `values`: float32, one a code."""
    byte = np.arange(256)
    both = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    return torch.from_numpy(both).view(torch.int64).squeeze(-1)


def share_a_cell(boundary: np.ndarray) -> bool:
    """True if two of these boundaries fall into one cell, so that `steps` cannot tell them apart."""
    return len(set(boundary.view(np.uint32) >> 16)) < len(boundary)


def steps(boundary: np.ndarray) -> np.ndarray:
    """`step` of the module docstring, int32 [_CELLS], negative cells before the others. `boundary`: float32, the
    largest x of each code but the last."""
    cell = np.arange(-_CELLS // 2, _CELLS // 2, dtype=np.int64)
    bits = (cell << 16).astype(np.int32)
    last = (bits | 0xFFFF).view(np.float32)
    smallest = np.where(cell < 0, last, bits.view(np.float32))
    minus_infinity = np.float32(-np.inf)
    smallest[bits == minus_infinity.view(np.int32)] = minus_infinity  # the rest of this cell is NaN
    code = np.searchsorted(boundary, smallest, side="left").clip(max=len(boundary) - 1)
    limit = boundary[code].view(np.int32).astype(np.int64)
    inside, low = limit >> 16 == cell, limit & 0xFFFF
    above = np.isnan(smallest) | (smallest > boundary[code])  # the whole cell, beyond the last one
    first_up = np.where(inside, low + 1, np.where(above, 0, _CELLS))
    first_down = np.where(inside, low, np.where(above, _CELLS, 0))
    up = ((code - cell) << 16) + _CELLS - first_up
    down = ((-code - 1 - cell) << 16) + _CELLS - first_down
    return np.where(cell < 0, down, up).astype(np.int32)  # modulo 2**32


@functools.cache
def _float8_values(device: torch.device) -> Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def _from_float8(codes: Tensor) -> Tensor:
    if codes.device.type == "cuda":  # CUDA has an instruction for this; CPUs convert one by one
        return codes.to(torch.float32)
    return torch.ops.lowbit.float8_decode(codes)


# Operators hide the cached tables from tracing (torch.compile, fake tensors, a tensor subclass under either).


def codes_like(x: Tensor, *_: object) -> Tensor:
    """Uninitialised codes for each element of x."""
    return x.new_empty(x.shape, dtype=torch.uint8)


def values_like(codes: Tensor, *_: object) -> Tensor:
    """Uninitialised float32 values for each element of `codes`."""
    return codes.new_empty(codes.shape, dtype=torch.float32)


def _two_values_each(packed: Tensor, *_: object) -> Tensor:
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=torch.float32)


@opaque("codebook_encode(Tensor x, int bits, bool signed) -> Tensor", codes_like)
def _encode(x: Tensor, bits: int, signed: bool) -> Tensor:
    step = _on_device(Codebook(bits, signed), x.device).step
    return ranks(x, step).to(torch.uint8)


def ranks(x: Tensor, step: Tensor) -> Tensor:
    """int32 of the shape of float32 x: how many boundaries of `step`, from `steps`, lie below each element."""
    raw = x.reshape(-1).view(torch.int32)
    code = step.index_select(0, (raw >> 16).add_(_CELLS // 2))
    return code.add_(raw).bitwise_right_shift_(16).abs_().view(x.shape)


@opaque("codebook_decode(Tensor codes, int bits, bool signed) -> Tensor", values_like)
def _decode(codes: Tensor, bits: int, signed: bool) -> Tensor:
    values = _on_device(Codebook(bits, signed), codes.device).values
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


@opaque("codebook_decode_packed(Tensor packed, bool signed) -> Tensor", _two_values_each)
def _decode_packed(packed: Tensor, signed: bool) -> Tensor:
    pairs = _on_device(Codebook(4, signed), packed.device).pairs
    values = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


@opaque("float8_decode(Tensor codes) -> Tensor", values_like)
def _float8_decode(codes: Tensor) -> Tensor:
    index = codes.view(torch.uint8).reshape(-1).to(torch.int32)
    return _float8_values(codes.device).index_select(0, index).view(codes.shape)
