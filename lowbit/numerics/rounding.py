"""Counter-based stochastic rounding.

Random bits are a pure function of ``(seed, step, tensor, global element index)``. So a training run resumes bit for
bit, and gives the same weights on 1, 2 or 8 ranks. No generator state exists, nothing is saved, nothing synchronises.

The stream, exactly (all arithmetic modulo 2**32; ``lo``/``hi`` are the halves of a 64-bit integer)::

    F(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    K(k):  for w in (lo(seed), hi(seed), lo(step), hi(step), lo(tensor), hi(tensor)):
               k = F((k ^ w) + 0x9e3779b9)
           return k
    k0 = K(0x243f6a88);  k1 = K(0x85a308d3)                    # once per (seed, step, tensor)

    octet = index >> 3                                          # eight elements share one hash
    h     = lo(octet) ^ k0;  h ^= h >> 16;  h *= 0x7feb352d
    h    ^= (h >> 15) ^ (k1 + 0x9e3779b9 * hi(octet))
    h    *= 0x846ca68b;  h ^= h >> 16
    bits  = h * M[index & 7] >> 16                              # 16 bits

F is a bijective 32-bit finaliser with low avalanche bias (constants: https://github.com/skeeto/hash-prospector). An
octet takes one pass through F, with one key before it and one in the middle: about 9 integer instructions, where Philox
takes hundreds. The numbers in M are odd, so that the bits of every element are uniform. Any two of them give pairs that
fill the square evenly (the shortest vector of their lattice is over 0.75 * 2**16), and no three have a linear relation
in small numbers. This is not a cryptographic generator.

Stochastic rounding of weights: arXiv 2010.06192.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M = (
    *(0x2265B1F5, 0xD8F16ADF, 0x414C343D, 0x4A2F20AB),
    *(0xAA2CA1AF, 0x29E821A5, 0xCB6915C1, 0x56C58311),
)


def round_bf16(x: Tensor, random: Tensor) -> Tensor:
    """Round float32 to bfloat16, up or down with probability proportional to the distance.

    The random bits are added to the 16 bits that bfloat16 lacks; the sum is truncated. So the expectation is exactly
    ``x``, and a value that bfloat16 can hold never changes. NaN and infinities are kept. A finite value never becomes
    infinite: beyond the largest finite bfloat16 it is truncated.

    Args:
        x: float32.
        random: int32 of the shape of ``x``, values 0..65535 (:func:`bits_at`).
    """
    bits = x.view(torch.int32)
    truncated = bits & -0x10000
    rounded = (bits + random) & -0x10000
    overflow = (rounded & 0x7F800000) == 0x7F800000
    rounded = torch.where(overflow, truncated, rounded).view(torch.float32)
    # A NaN's bits may carry over or truncate to an infinity: NaN takes the ordinary conversion.
    return torch.where(x.isnan(), x, rounded).to(torch.bfloat16)


def split_bf16(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Float32 as the nearest bfloat16 (a tie goes away from zero) and a correction of this dtype, int8 or int16.

    int16, all 32 bits: with u the bits of x, the bfloat16 b is the upper half of u + 0x8000, and the correction is
    u - (b << 16), in [-2**15, 2**15 - 1]. A cast to bfloat16 differs from b at exact ties only, where it takes the even
    neighbour; then 2**16 corrections would not tell all float32 numbers apart. b may be infinite where x is not. The
    bits of a NaN are not kept.

    int8, 24 bits: value24 = u + 0x80, its last 8 bits cleared (to the nearest, a tie away from zero); b is the upper
    half of value24 + 0x8000; correction = (value24 - (b << 16)) >> 8, in [-128, 127]. NaN, infinities, and values that
    b would round to an infinity take the ordinary conversion, with a correction of 0.
    """
    bits = x.view(torch.int32)
    if dtype == torch.int16:
        high = (bits + 0x8000) & -0x10000
        is_nan = x.isnan()
        weight = torch.where(is_nan, x, high.view(torch.float32)).to(torch.bfloat16)
        return weight, torch.where(is_nan, 0, bits - high).to(dtype)
    value24 = (bits + 0x80) & -0x100
    high = (value24 + 0x8000) & -0x10000
    finite = (high & 0x7F800000) != 0x7F800000
    finite &= x.isfinite()
    weight = torch.where(finite, high.view(torch.float32), x).to(torch.bfloat16)
    correction = torch.where(finite, (value24 - high) >> 8, 0)
    return weight, correction.to(torch.int8)


def join_bf16(weight: Tensor, correction: Tensor) -> Tensor:
    """The float32 that :func:`split_bf16` split: exactly from int16, rounded to 24 bits from int8."""
    units = correction.to(torch.int32)
    bits = weight.float().view(torch.int32)
    return (bits + (units if correction.dtype == torch.int16 else units << 8)).view(torch.float32)


def bits_at(index: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """The random bits of elements with the global ``index`` (int64 or int32). The keys, from :func:`keys`, are tensors
    of either dtype that broadcast.

    Returns int32 of the shape of ``index``, values 0..65535. See the module docstring for the exact stream.
    """
    h = _hash(index >> 3, k0, k1)
    h.mul_(_multipliers(index)[index & 7])
    return (h >> 16).bitwise_and_(0xFFFF)


def bits_of_octets(octet: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """:func:`bits_at` of the eight elements of every octet, with an eighth of the hashes.

    Args:
        octet: ``index >> 3``, int64 or int32 [..., n].
        k0, k1: as for :func:`bits_at`.

    Returns:
        int32 [..., 8 n], values 0..65535.
    """
    h = _hash(octet, k0, k1).unsqueeze(-1) * _multipliers(octet)
    return h.bitwise_right_shift_(16).bitwise_and_(0xFFFF).flatten(-2)


def _hash(octet: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """`h` of the module docstring, int32 of the shape of `octet`."""
    # int32 wraps as the formula needs, and is twice as fast
    k0, k1 = k0.to(torch.int32), k1.to(torch.int32)
    key = k1
    if octet.dtype == torch.int64:
        key = (octet >> 32).to(torch.int32).mul_(-0x61C88647).add_(k1)  # 0x9e3779b9 - 2**32
    h = octet.to(torch.int32) ^ k0
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)  # `>>` would keep the sign
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).bitwise_xor_(key).mul_(-0x7B935975)
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def _multipliers(index: Tensor) -> Tensor:
    """M of the module docstring, as int32 of the same bits, on the device of `index`."""
    if type(index) is Tensor:
        return _kept_multipliers(index.device)
    return _made_multipliers(index.device)  # a fake tensor under tracing, which no cache may keep


def _made_multipliers(device: torch.device) -> Tensor:
    return torch.tensor(_M, device="cpu").to(torch.int32).to(device)


# Once a device, because a copy to a GPU cannot be captured in a CUDA graph.
_kept_multipliers = functools.cache(_made_multipliers)


def _finalise(h: Any) -> Any:
    """F of the module docstring, on Python ints or int64 tensors with values 0 .. 2**32 - 1."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    # 0x846ca68b - 2**32: equal modulo 2**32, and the product fits a signed 64-bit integer.
    h = (h * -0x7B935975) & _MASK
    return h ^ (h >> 16)


def keys(seed: int, step: int | Tensor, tensor: int | Tensor) -> tuple[Any, Any]:
    """k0 and k1 of the module docstring: Python ints, or int64 tensors where ``step`` or ``tensor`` are."""
    words = [half for word in (seed, step, tensor) for half in (word & _MASK, (word >> 32) & _MASK)]
    found = []
    for key in (0x243F6A88, 0x85A308D3):
        for word in words:
            key = _finalise(((key ^ word) + 0x9E3779B9) & _MASK)
        found.append(key)
    return found[0], found[1]
