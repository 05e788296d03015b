"""The blocks of GGUF: rows of bytes to weights, and weights to rows of bytes.

| type   | bits | elements, bytes | value of an element                          | written |
|--------|-----:|-----------------|----------------------------------------------|---------|
| Q4_0   | 4    | 32, 18          | d · (q − 8)                                  | yes     |
| Q4_1   | 4    | 32, 20          | d · q + m                                    | yes     |
| Q5_0   | 5    | 32, 22          | d · (q − 16)                                 | no      |
| Q5_1   | 5    | 32, 24          | d · q + m                                    | no      |
| Q8_0   | 8    | 32, 34          | d · q                                        | yes     |
| Q2_K   | 2    | 256, 84         | d · s · q − dmin · m for groups of 16        | no      |
| Q3_K   | 3    | 256, 110        | d · s · (q − 4) for groups of 16             | no      |
| Q4_K   | 4    | 256, 144        | d · s · q − dmin · m for groups of 32        | no      |
| Q5_K   | 5    | 256, 176        | d · s · q − dmin · m for groups of 32        | no      |
| Q6_K   | 6    | 256, 210        | d · s · (q − 32) for groups of 16            | no      |
| IQ4_NL | 4    | 32, 18          | d · IQ4[q]                                   | no      |
| IQ4_XS | 4    | 256, 136        | d · (s − 32) · IQ4[q] for groups of 32       | no      |

d, m and dmin are float16; s and m of K-quants are small integers. A minimum becomes a zero point that is a value, in
float32: x̂ = (q − 2^(b−1)) · scale + zero_point. If float32 cannot hold that zero point exactly, the weight is read in
high precision. `IQ4` is a table of 16 values, so weights of the last two types become a `TableTensor`.

Files of one name mix types: a "Q4_K_M" also has Q6_K. If the length of rows is not a multiple of 256, a type with
blocks of 32 replaces the K-quant: Q4_0 for Q2_K and Q3_K, Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for
IQ4_XS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats.base import FormatError
from lowbit.formats.integers import (
    IntegerLayout,
    exact_scales,
    from_integers,
    integers_of,
    layout_of,
)
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import pack
from lowbit.numerics.spec import Spec
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.table_tensor import TableTensor

Block = tuple[Tensor, Tensor, Tensor | None]
"""The contents of blocks [N, B, bytes]: unsigned codes [N, B, elements], scales [N, B, groups], and minimums to
add. None for minimums: 2^(bits − 1) is subtracted from each code, or a table gives its value."""

IQ4 = LookupTable((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""The values of IQ4_NL and IQ4_XS: dense around zero, as weights are."""

SMALL = 32
"""Elements of a block that lowbit writes."""


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode(weight: LowbitTensor) -> tuple[str, Tensor]:
    """The type and the bytes [N, …] of a weight, with the same values. Raises FormatError if no type holds it."""
    has_minimum = getattr(getattr(weight, "spec", None), "mapping", None) == "float_zero_point"
    layout = _layout_with_minimum(weight) if has_minimum else layout_of(weight, "gguf")
    assert isinstance(weight, AffineTensor)
    columns, group = weight.shape[1], layout.group_size or weight.shape[1]
    if weight.activation is not None:
        raise FormatError(f"gguf rounds no inputs by a rule of the file, got {weight.activation}")
    if layout.bits not in (4, 8) or (layout.bits == 8 and layout.has_zero_point):
        raise FormatError(f"gguf is written with 4 bits, or 8 symmetric ones, got {weight.spec}")
    if columns % SMALL or group % SMALL:
        raise FormatError(f"gguf has groups of {SMALL}, got {columns} inputs in groups of {group}")
    minimum = None
    if has_minimum:
        codes, scale, minimum = _with_minimum(weight)
    else:
        codes, scale, zero = integers_of(weight, layout)
        minimum = None if zero is None else -(zero.float() + 8) * scale.float()
    times = columns // SMALL // scale.shape[1]
    d = exact_scales(scale, torch.float16, "gguf").repeat_interleave(times, 1)
    q = codes.unflatten(1, (-1, SMALL))
    if layout.bits == 8:
        return "Q8_0", torch.cat([_bytes(d), q.view(torch.uint8)], -1).flatten(1)
    parts = [_bytes(d)]
    if minimum is not None:
        m = exact_scales(minimum, torch.float16, "gguf (Q4_1, its minimums)")
        parts.append(_bytes(m.repeat_interleave(times, 1)))
    low, high = (q.short() + 8).to(torch.uint8).split(SMALL // 2, -1)
    return "Q4_0" if minimum is None else "Q4_1", torch.cat([*parts, low | high << 4], -1).flatten(
        1
    )


def _layout_with_minimum(weight: LowbitTensor) -> IntegerLayout:
    """`layout_of` of a weight whose zero points are values."""
    assert isinstance(weight, AffineTensor)
    spec = replace(weight.spec, mapping="asymmetric", scale_dtype=None)
    return layout_of(weight._with(spec=spec), "gguf")


def _with_minimum(weight: AffineTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Signed codes [N, K], scales [N, G] and the smallest value of each group."""
    assert weight.zero_point is not None
    codes = weight._load(weight.shape[1])
    least = int(weight.spec.format.quant_min)
    signed = (codes.short() - least - 8).to(torch.int8)
    minimum = weight.zero_point.double() - 8 * weight.scale.double()
    return signed, weight.scale, minimum


def _bytes(half: Tensor) -> Tensor:
    """float16 [N, B] as uint8 [N, B, 2]."""
    return half.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


# ---- reading ---------------------------------------------------------------------------------------------------------


def decode(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of `dtype` that bytes [N, …] of a type hold; plain if no low-bit weight has the same values.

    Raises FormatError for a type that lowbit does not read, and for rows that are not whole blocks.
    """
    if kind not in TYPES:
        raise FormatError(f"its type is {kind}; lowbit reads {', '.join(TYPES)} and plain ones")
    format, size, read = TYPES[kind]
    if rows.ndim != 2 or rows.shape[1] % size:
        raise FormatError(
            f"rows of {tuple(rows.shape)} bytes are not whole {kind} blocks of {size}"
        )
    codes, scale, minimum = read(rows.unflatten(1, (-1, size)))
    q, scale = codes.flatten(1), scale.flatten(1).contiguous()
    group = q.shape[1] // scale.shape[1]
    if isinstance(format, LookupTable):
        packed, spec = pack(q, format.bits), Spec(format, PerGroup(group))
        return TableTensor(packed, {"scale": scale}, spec, q.shape, dtype)
    bits = format.bits
    signed = (q.short() - 2 ** (bits - 1)).to(torch.int8)
    if minimum is None:
        return from_integers(IntegerLayout(bits, group, False), signed, scale, None, dtype)
    return _added(q, signed, scale, minimum.flatten(1), bits, dtype)


def _added(
    q: Tensor, signed: Tensor, scale: Tensor, minimum: Tensor, bits: int, dtype: torch.dtype
) -> Tensor:
    """The weight of unsigned and signed codes [N, K], and of scales and minimums [N, G]."""
    group = q.shape[1] // scale.shape[1]
    zero = (-minimum.double() / scale.double()).nan_to_num(0, 0, 0).round().clamp(0, 2**bits - 1)
    if torch.equal(-zero * scale.double(), minimum.double()):
        point = (zero - 2 ** (bits - 1)).to(torch.int8)
        return from_integers(IntegerLayout(bits, group, True), signed, scale, point, dtype)
    exact = minimum.double() + 2 ** (bits - 1) * scale.double()
    if not torch.equal(exact.float().double(), exact):
        values = q.float() * scale.repeat_interleave(group, 1) + minimum.repeat_interleave(group, 1)
        return values.to(dtype)
    spec = Spec(Int(bits), PerGroup(group), "float_zero_point")
    return AffineTensor(pack(q, bits), scale, exact.float(), spec, q.shape, dtype)


def _half(b: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, as float32 [N, B, 1]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(b: Tensor) -> Tensor:
    """[N, B, 32·c] as low nibbles of 32, high nibbles of 32, …"""
    parts = b.unflatten(-1, (-1, 1, 32))
    return torch.cat([parts & 15, parts >> 4], -2).flatten(2)


def _bits_of(b: Tensor, width: int) -> Tensor:
    """[N, B, 32·c] as planes of 32 fields: the lowest `width` bits of all 32 bytes, the next ones, …"""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return ((b.unflatten(-1, (-1, 1, 32)) >> shifts) & (2**width - 1)).flatten(2)


def _q4_0(b: Tensor) -> Block:
    return torch.cat([b[..., 2:] & 15, b[..., 2:] >> 4], -1), _half(b, 0), None


def _q4_1(b: Tensor) -> Block:
    return torch.cat([b[..., 4:] & 15, b[..., 4:] >> 4], -1), _half(b, 0), _half(b, 2)


def _fifth_bit(b: Tensor, at: int) -> Tensor:
    """[N, B, 32], 0 or 16: bit j of the four bytes at `at` is the highest bit of element j."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((b[..., at : at + 4, None] >> shifts) & 1) << 4).flatten(2)


def _q5_0(b: Tensor) -> Block:
    low = torch.cat([b[..., 6:] & 15, b[..., 6:] >> 4], -1)
    return low | _fifth_bit(b, 2), _half(b, 0), None


def _q5_1(b: Tensor) -> Block:
    low = torch.cat([b[..., 8:] & 15, b[..., 8:] >> 4], -1)
    return low | _fifth_bit(b, 4), _half(b, 0), _half(b, 2)


def _q8_0(b: Tensor) -> Block:
    return b[..., 2:] ^ 0x80, _half(b, 0), None


def _q2_k(b: Tensor) -> Block:
    s, d, low = b[..., :16], _half(b, 80), _half(b, 82)
    return _bits_of(b[..., 16:80], 2), d * (s & 15).float(), -(low * (s >> 4).float())


def _q3_k(b: Tensor) -> Block:
    packed, d = b[..., 96:108], _half(b, 108)
    low = torch.cat([packed[..., :8] & 15, packed[..., :8] >> 4], -1)
    high = torch.cat([(packed[..., 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    s = (low | high << 4).float() - 32
    return _bits_of(b[..., 32:96], 2) | _bits_of(b[..., :32], 1) << 2, d * s, None


def _scales_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of 8 groups from the 12 bytes of Q4_K and Q5_K, times d and dmin."""
    s, m, both = b[..., 4:16].split(4, -1)
    scale = torch.cat([s & 63, (both & 15) | (s >> 6) << 4], -1)
    minimum = torch.cat([m & 63, (both >> 4) | (m >> 6) << 4], -1)
    return _half(b, 0) * scale.float(), -(_half(b, 2) * minimum.float())


def _q4_k(b: Tensor) -> Block:
    return _nibbles(b[..., 16:]), *_scales_k(b)


def _q5_k(b: Tensor) -> Block:
    return _nibbles(b[..., 48:]) | _bits_of(b[..., 16:48], 1) << 4, *_scales_k(b)


def _q6_k(b: Tensor) -> Block:
    low = b[..., :128].unflatten(-1, (2, 1, 64))
    q = torch.cat([low & 15, low >> 4], -2).flatten(2) | _bits_of(b[..., 128:192], 2) << 4
    return q, _half(b, 208) * b[..., 192:208].contiguous().view(torch.int8).float(), None


def _iq4_xs(b: Tensor) -> Block:
    """Scales of 6 bits: low nibbles in four bytes, two high bits of each group in two."""
    low = torch.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], -1).flatten(2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = ((b[..., 2:4, None] >> shifts) & 3).flatten(2)
    parts = b[..., 8:].unflatten(-1, (8, 16))
    q = torch.cat([parts & 15, parts >> 4], -1).flatten(2)
    return q, _half(b, 0) * ((low | high << 4).float() - 32), None


TYPES: dict[str, tuple[Int | LookupTable, int, Callable[[Tensor], Block]]] = {
    "Q4_0": (Int(4), 18, _q4_0),
    "Q4_1": (Int(4), 20, _q4_1),
    "Q5_0": (Int(5), 22, _q5_0),
    "Q5_1": (Int(5), 24, _q5_1),
    "Q8_0": (Int(8), 34, _q8_0),
    "Q2_K": (Int(2), 84, _q2_k),
    "Q3_K": (Int(3), 110, _q3_k),
    "Q4_K": (Int(4), 144, _q4_k),
    "Q5_K": (Int(5), 176, _q5_k),
    "Q6_K": (Int(6), 210, _q6_k),
    "IQ4_NL": (IQ4, 18, _q4_0),
    "IQ4_XS": (IQ4, 136, _iq4_xs),
}
"""For each type its format, the bytes of a block, and the function that reads blocks."""
