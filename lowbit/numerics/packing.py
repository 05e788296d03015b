"""Codes of 1 to 8 bits to bytes and back, and float8 codes as bytes.

The last dimension is a little-endian bit stream: code ``i`` occupies the bits ``[i * bits, (i + 1) *
bits)`` of its row, bit 0 being the least significant bit of byte 0. So an even int4 code is the low
nibble of its byte and the odd one after it the high nibble; eight 3-bit codes fill three bytes. Rows
never share a byte: any slice, split or concatenation of the leading dimensions of codes is the same
slice of the packed bytes.

The stream repeats after a *cycle*: the fewest codes that end on a byte boundary (2 codes in 1 byte for 4
bits, 4 in 3 for 6, 8 in 3 for 3). Both directions assemble one cycle in one integer word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.numerics.settings import check_whole

# bits: codes and bytes of a cycle, and an integer dtype that holds one
_CYCLES = {
    1: (8, 1, torch.uint8),
    2: (4, 1, torch.uint8),
    3: (8, 3, torch.int32),
    4: (2, 1, torch.uint8),
    5: (8, 5, torch.int64),
    6: (4, 3, torch.int32),
    7: (8, 7, torch.int64),
}


def as_bytes(t: Tensor) -> Tensor:
    """A float8 tensor viewed as uint8, which every collective backend moves and every operation takes; other tensors
    unchanged."""
    dtype = t.dtype
    return t.view(torch.uint8) if dtype.itemsize == 1 and dtype.is_floating_point else t


def packed_size(size: int, bits: int) -> int:
    """Bytes that ``size`` codes of ``bits`` bits (1..8) take: ``ceil(size * bits / 8)``."""
    check_whole("bits", bits, most=8)
    if size < 0:
        raise ValueError(f"size must be 0 or more codes, got {size}")
    return (size * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the last dimension of ``codes``.

    Args:
        codes: integers of any integer dtype, ``[..., K]``, values ``0 .. 2**bits - 1``. Only the low
            ``bits`` bits of a code are stored, so negative codes are kept in two's complement.
        bits: 1..8.

    Returns:
        uint8 ``[..., packed_size(K, bits)]``; the unused high bits of the last byte are 0.

    Raises:
        TypeError: ``codes`` is not of an integer dtype.
        ValueError: ``bits`` is not in 1..8, or ``codes`` has no dimension to pack.
    """
    check_whole("bits", bits, most=8)
    if codes.is_floating_point() or codes.is_complex():
        raise TypeError(
            f"pack takes integer codes, got {codes.dtype}; convert with .to(torch.uint8)"
        )
    if codes.dim() == 0:
        raise ValueError("pack takes codes [..., K], got a 0-d tensor; use codes.reshape(1)")
    size = codes.shape[-1]
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes
    codes = codes & (2**bits - 1)
    if bits == 4 and size % 2 == 0 and _is_aligned(codes):
        pair = codes.flatten().view(torch.int16).view(*codes.shape[:-1], size // 2)
        return (pair | pair >> 4).to(torch.uint8)
    codes_per_cycle, bytes_per_cycle, word_dtype = _CYCLES[bits]
    cycles = _pad_last(codes, codes_per_cycle).unflatten(-1, (-1, codes_per_cycle))
    word = cycles[..., 0].to(word_dtype)
    for i in range(1, codes_per_cycle):
        word = word | (cycles[..., i].to(word_dtype) << (i * bits))
    if bytes_per_cycle == 1:
        return word
    packed = torch.stack(
        [(word >> (8 * j)).to(torch.uint8) for j in range(bytes_per_cycle)], dim=-1
    )
    return packed.flatten(-2)[..., : packed_size(size, bits)].contiguous()


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The inverse of :func:`pack`.

    Args:
        packed: uint8 ``[..., packed_size(size, bits)]``.
        bits: 1..8, as packed.
        size: K, the number of codes in a row.

    Returns:
        uint8 ``[..., size]``, values ``0 .. 2**bits - 1``.

    Raises:
        TypeError: ``packed`` is not uint8.
        ValueError: the last dimension of ``packed`` is not ``packed_size(size, bits)``.
    """
    expected = packed_size(size, bits)
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack takes uint8 bytes, got {packed.dtype}; view them as torch.uint8")
    if packed.dim() == 0 or packed.shape[-1] != expected:
        raise ValueError(
            f"{size} codes of {bits} bits take a last dimension of {expected} bytes, "
            f"got a tensor of shape {tuple(packed.shape)}; pass the size and bits it was packed with"
        )
    if bits == 8:
        return packed
    codes_per_cycle, bytes_per_cycle, word_dtype = _CYCLES[bits]
    cycles = _pad_last(packed, bytes_per_cycle).unflatten(-1, (-1, bytes_per_cycle))
    word = cycles[..., 0].to(word_dtype)
    for j in range(1, bytes_per_cycle):
        word = word | (cycles[..., j].to(word_dtype) << (8 * j))
    mask = 2**bits - 1
    codes = torch.stack(
        [((word >> (i * bits)) & mask).to(torch.uint8) for i in range(codes_per_cycle)], dim=-1
    ).flatten(-2)
    return codes[..., :size].contiguous()


def _is_aligned(codes: Tensor) -> bool:
    """True if pairs of these bytes can be viewed as words. False in compiled code: Dynamo traces no storage offset."""
    if torch.compiler.is_compiling():
        return False
    return codes.is_contiguous() and codes.storage_offset() % 2 == 0


def _pad_last(x: Tensor, multiple: int) -> Tensor:
    """``x`` with zeros appended to the last dimension up to a multiple of ``multiple``."""
    missing = -x.shape[-1] % multiple
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:-1], missing))], dim=-1)
