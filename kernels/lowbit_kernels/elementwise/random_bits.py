"""Random bits for stochastic rounding: a function of two keys and an element's index.

In arithmetic modulo 2**32, lo and hi the halves of a 64-bit integer::

    F(h):  h ^= h >> 16;  h *= 0x7feb352d;  h ^= h >> 15;  h *= 0x846ca68b;  h ^= h >> 16
    K(k):  for w in (lo(seed), hi(seed)):  k = F((k ^ w) + 0x9e3779b9)
    k0 = K(0x243f6a88);  k1 = K(0x85a308d3)                     # `keys`, or any two numbers

    octet = index >> 3                                          # eight elements share one hash
    h     = lo(octet) ^ k0;  h ^= h >> 16;  h *= 0x7feb352d
    h    ^= (h >> 15) ^ (k1 + 0x9e3779b9 * hi(octet))
    h    *= 0x846ca68b;  h ^= h >> 16
    bits  = h * M[index & 7]

To get n bits, take the upper n. The upper 16 are the stream of `lowbit.numerics.rounding`, whose docstring gives the
reasons for this construction. ``random_bits.h`` is the same in C++.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbit_kernels.runtime.triton_runtime import jit, tl

M = (
    *(0x2265B1F5, 0xD8F16ADF, 0x414C343D, 0x4A2F20AB),
    *(0xAA2CA1AF, 0x29E821A5, 0xCB6915C1, 0x56C58311),
)


def keys(seed: Tensor) -> tuple[Tensor, Tensor]:
    """k0 and k1: int32 of the shape of the int64 `seed`."""
    low, high = seed.to(torch.int32), (seed >> 32).to(torch.int32)
    zero = low & 0
    k0, k1 = (
        _finalise((_finalise((low ^ start) - 0x61C88647, zero) ^ high) - 0x61C88647, zero)
        for start in (0x243F6A88, 0x85A308D3 - 2**32)
    )
    return k0, k1


def hashed(octet: Tensor, k0: Tensor | int, k1: Tensor | int) -> Tensor:
    """h of int64 octets, as int32 of their shape. Keys: signed 32-bit integers."""
    return _finalise(octet.to(torch.int32) ^ k0, (octet >> 32).to(torch.int32) * -0x61C88647 + k1)


def random_bits(index: Tensor, k0: Tensor | int, k1: Tensor | int) -> Tensor:
    """The 32 random bits of int64 indices, as int32 of their shape. Keys: signed 32-bit integers."""
    return hashed(index >> 3, k0, k1) * multipliers(index.device)[index & 7]


def upper(x: Tensor, bits: int) -> Tensor:
    """The upper `bits` bits of int32, as 0 .. 2**bits - 1."""
    return (x >> (32 - bits)) & ((1 << bits) - 1)  # `>>` keeps the sign


@functools.cache  # once a device, because a copy to a GPU can't be captured in a graph
def multipliers(device: torch.device) -> Tensor:
    """M as int32 [8]."""
    return torch.tensor([m - 2**32 * (m >> 31) for m in M], dtype=torch.int32, device=device)


def _finalise(h: Tensor, key: Tensor) -> Tensor:
    """F of int32; `key` enters in the middle."""
    h = (h ^ upper(h, 16)) * 0x7FEB352D
    h = (h ^ upper(h, 17) ^ key) * -0x7B935975
    return h ^ upper(h, 16)


# ---- in Triton -----------------------------------------------------------------------------------------------------


@jit
def finalise(h, key):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= (h >> 15) ^ key
    h *= 0x846CA68B
    return h ^ (h >> 16)


@jit
def key_of(start, seed):
    zero = (seed & 0).to(tl.uint32)
    key = zero + start
    key = finalise((key ^ (seed & 0xFFFFFFFF).to(tl.uint32)) + 0x9E3779B9, zero)
    return finalise((key ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)) + 0x9E3779B9, zero)


@jit
def hash_of(octet, k0, k1):
    """h of int64 octets: uint32."""
    high = ((octet >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return finalise((octet & 0xFFFFFFFF).to(tl.uint32) ^ k0, high * 0x9E3779B9 + k1)


@jit
def multiplier_of(index):
    """M[index & 7], uint32."""
    j = index & 7
    zero = (j & 0).to(tl.uint32)
    m = tl.where(j == 0, zero + 0x2265B1F5, zero + 0xD8F16ADF)
    m = tl.where(j == 2, zero + 0x414C343D, m)
    m = tl.where(j == 3, zero + 0x4A2F20AB, m)
    m = tl.where(j == 4, zero + 0xAA2CA1AF, m)
    m = tl.where(j == 5, zero + 0x29E821A5, m)
    m = tl.where(j == 6, zero + 0xCB6915C1, m)
    return tl.where(j == 7, zero + 0x56C58311, m)
