"""The blocks of GGUF: rows of bytes to weights, and weights to rows of bytes.

| type   | bits | elements, bytes | value of an element                          | written |
|--------|-----:|-----------------|----------------------------------------------|---------|
| Q4_0   | 4    | 32, 18          | d · (q − 8)                                  | yes     |
| Q4_1   | 4    | 32, 20          | d · q + m                                    | yes     |
| Q5_0   | 5    | 32, 22          | d · (q − 16)                                 | yes     |
| Q5_1   | 5    | 32, 24          | d · q + m                                    | yes     |
| Q8_0   | 8    | 32, 34          | d · q                                        | yes     |
| Q2_K   | 2    | 256, 84         | d · s · q − dmin · m for groups of 16        | yes     |
| Q3_K   | 3    | 256, 110        | d · s · (q − 4) for groups of 16             | yes     |
| Q4_K   | 4    | 256, 144        | d · s · q − dmin · m for groups of 32        | yes     |
| Q5_K   | 5    | 256, 176        | d · s · q − dmin · m for groups of 32        | yes     |
| Q6_K   | 6    | 256, 210        | d · s · (q − 32) for groups of 16            | yes     |
| MXFP4  | 4    | 32, 17          | 2^(s − 127) · E2M1[q]                        | yes     |
| IQ4_NL | 4    | 32, 18          | d · IQ4[q]                                   | no      |
| IQ4_XS | 4    | 256, 136        | d · (s − 32) · IQ4[q] for groups of 32       | no      |

d, m and dmin are float16; s and m of K-quants are small integers (`lowbit.numerics.super_blocks`, which chooses them).
A minimum becomes a zero point that is a value, in float32: x̂ = (q − 2^(b−1)) · scale + zero_point. If float32 cannot
hold that zero point exactly, the weight is read in high precision. `IQ4` is a table of 16 values, so weights of the
last two types become a `TableTensor`, as those of MXFP4 do.

Files of one name mix types: a "Q4_K_M" also has Q6_K. If the length of rows is not a multiple of 256, a type with
blocks of 32 replaces the K-quant: Q4_0 for Q2_K and Q3_K, Q5_0 for Q4_K, Q5_1 for Q5_K, Q8_0 for Q6_K, IQ4_NL for
IQ4_XS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lowbit.formats.base import FormatError, check_matrix, check_plain_inputs
from lowbit.formats.integers import (
    IntegerLayout,
    exact_scales,
    from_integers,
    integers_of,
    layout_of,
)
from lowbit.numerics.affine import MappingName
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.lookup_table import E2M1, LookupTable
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.row_chunks import count_nonfinite
from lowbit.numerics.spec import Spec
from lowbit.numerics.super_blocks import INPUTS, LARGEST, Fields, SuperBlocks
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.frozen.table_tensor import TableTensor

Block = tuple[Tensor, Tensor, Tensor | None]
"""The contents of blocks [N, B, bytes]: unsigned codes [N, B, elements], scales [N, B, groups], and minimums to
add. None for minimums: 2^(bits − 1) is subtracted from each code, or a table gives its value."""

IQ4 = LookupTable((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""The values of IQ4_NL and IQ4_XS: dense around zero, as weights are."""

SMALL = 32
"""Elements of a block of the types that are not K-quants."""
MXFP4 = Spec(E2M1, PerGroup(SMALL), "symmetric_no_clipping_err", scale_format="e8m0")


# ---- writing ---------------------------------------------------------------------------------------------------------


def encode(weight: LowbitTensor) -> tuple[str, Tensor]:
    """The type and the bytes [N, …] of a weight, with the same values. Raises FormatError if no type holds it."""
    spec = getattr(weight, "spec", None)
    if isinstance(weight, TableTensor) and spec is not None and MXFP4.same_values(spec):
        return "MXFP4", _mxfp4_of(weight)
    has_minimum = getattr(spec, "mapping", None) == "float_zero_point"
    layout = _layout_with_minimum(weight) if has_minimum else layout_of(weight, "gguf")
    assert isinstance(weight, AffineTensor)
    check_plain_inputs(weight, "gguf")
    if weight.spec.super_blocks is not None:
        return f"Q{layout.bits}_K", _k_quant_of(weight, weight.spec.super_blocks)
    columns, group = weight.shape[1], layout.group_size or weight.shape[1]
    if layout.bits not in (4, 5, 8) or (layout.bits == 8 and layout.has_zero_point):
        raise FormatError(
            f"gguf is written with 4 or 5 bits, or 8 symmetric ones, or scales of K-quants "
            f"(lowbit.formats.gguf_scheme), got {weight.spec}"
        )
    if columns % SMALL or group % SMALL:
        raise FormatError(f"gguf has groups of {SMALL}, got {columns} inputs in groups of {group}")
    minimum, middle = None, layout.middle
    if has_minimum:
        codes, scale, minimum = _with_minimum(weight, middle)
    else:
        codes, scale, zero = integers_of(weight, layout)
        minimum = None if zero is None else -(zero.float() + middle) * scale.float()
    times = columns // SMALL // scale.shape[1]
    d = exact_scales(scale, torch.float16, "gguf").repeat_interleave(times, 1)
    q = codes.unflatten(1, (-1, SMALL))
    if layout.bits == 8:
        return "Q8_0", torch.cat([_bytes(d), q.view(torch.uint8)], -1).flatten(1)
    parts = [_bytes(d)]
    if minimum is not None:
        m = exact_scales(minimum, torch.float16, f"gguf (Q{layout.bits}_1, its minimums)")
        parts.append(_bytes(m.repeat_interleave(times, 1)))
    unsigned = (q.short() + middle).to(torch.uint8)
    if layout.bits == 5:
        parts.append(_merged((unsigned >> 4).unflatten(-1, (4, 8)), 1))
    low, high = (unsigned & 15).split(SMALL // 2, -1)
    kind = f"Q{layout.bits}_{0 if minimum is None else 1}"
    return kind, torch.cat([*parts, low | high << 4], -1).flatten(1)


def _layout_with_minimum(weight: LowbitTensor) -> IntegerLayout:
    """`layout_of` of a weight whose zero points are values."""
    assert isinstance(weight, AffineTensor)
    spec = replace(weight.spec, mapping="asymmetric", scale_dtype=None, scale_format="float")
    return layout_of(weight._with(spec=spec), "gguf")


def _with_minimum(weight: AffineTensor, middle: int) -> tuple[Tensor, Tensor, Tensor]:
    """Signed codes [N, K], scales [N, G] and the smallest value of each group."""
    assert weight.zero_point is not None
    codes = weight._load(weight.shape[1])
    least = int(weight.spec.format.quant_min)
    signed = (codes.short() - least - middle).to(torch.int8)
    minimum = weight.zero_point.double() - middle * weight.scale.double()
    return signed, weight.scale, minimum


def _bytes(half: Tensor) -> Tensor:
    """float16 [N, B] as uint8 [N, B, 2]."""
    return half.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


def _merged(fields: Tensor, width: int) -> Tensor:
    """Fields uint8 [..., 8 / width] of `width` bits as bytes [...], the first one in the lowest bits."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    return (fields << shifts).sum(-1, dtype=torch.uint8)


def _planes(fields: Tensor, width: int) -> Tensor:
    """The inverse of `_bits_of`."""
    return _merged(fields.unflatten(-1, (-1, 8 // width, 32)).transpose(-1, -2), width).flatten(2)


def _mxfp4_of(weight: TableTensor) -> Tensor:
    check_matrix(weight, "gguf", rounds_inputs=False)
    if weight.shape[1] % SMALL:
        raise FormatError(f"gguf has groups of {SMALL}, got {weight.shape[1]} inputs")
    codes = unpack(weight.codes, 4, weight.shape[1]).unflatten(1, (-1, SMALL))
    low, high = codes.split(SMALL // 2, -1)
    return torch.cat([weight.scale.unsqueeze(-1), low | high << 4], -1).flatten(1)


def _k_quant_of(weight: AffineTensor, kind: SuperBlocks) -> Tensor:
    if weight.shape[1] % INPUTS:
        raise FormatError(
            f"K-quants have super-blocks of {INPUTS} inputs, got {weight.shape[1]}; "
            "lowbit.formats.gguf_mix gives such a weight another type"
        )
    fields = kind.fields(weight.scale, weight.zero_point)
    if fields is None:
        raise FormatError(
            f"its scales are not those of super-blocks of {INPUTS} inputs, as training or slicing leaves them"
        )
    least = int(weight.spec.format.quant_min)
    q = (weight._load(weight.shape[1]).short() - least).to(torch.uint8).unflatten(1, (-1, INPUTS))
    return torch.cat(_K_PARTS[kind.bits](q, fields), -1).flatten(1)


def _q2_k_of(q: Tensor, f: Fields) -> list[Tensor]:
    assert f.dmin is not None and f.m is not None
    both = f.s.to(torch.uint8) | f.m.to(torch.uint8) << 4
    return [both, _planes(q, 2), _bytes(f.d.half()), _bytes(f.dmin.half())]


def _q3_k_of(q: Tensor, f: Fields) -> list[Tensor]:
    s = (f.s + 32).to(torch.uint8)
    first, last = (s & 15).split(8, -1)
    high = _merged((s >> 4).unflatten(-1, (4, 4)).transpose(-1, -2), 2)
    return [_planes(q >> 2, 1), _planes(q & 3, 2), first | last << 4, high, _bytes(f.d.half())]


def _scales_k_of(f: Fields) -> list[Tensor]:
    """The inverse of `_scales_k`."""
    assert f.dmin is not None and f.m is not None
    (s, last), (m, top) = (t.to(torch.uint8).split(4, -1) for t in (f.s, f.m))
    packed = [s | last >> 4 << 6, m | top >> 4 << 6, last & 15 | (top & 15) << 4]
    return [_bytes(f.d.half()), _bytes(f.dmin.half()), *packed]


def _q4_k_of(q: Tensor, f: Fields) -> list[Tensor]:
    return [*_scales_k_of(f), _low_nibbles(q)]


def _q5_k_of(q: Tensor, f: Fields) -> list[Tensor]:
    return [*_scales_k_of(f), _planes(q >> 4, 1), _low_nibbles(q)]


def _low_nibbles(q: Tensor) -> Tensor:
    """The inverse of `_nibbles`, for the low four bits."""
    low, high = (q & 15).unflatten(-1, (-1, 2, 32)).unbind(-2)
    return (low | high << 4).flatten(2)


def _q6_k_of(q: Tensor, f: Fields) -> list[Tensor]:
    low, high = (q & 15).unflatten(-1, (2, 2, 64)).unbind(-2)
    s = f.s.to(torch.int8).view(torch.uint8)
    return [(low | high << 4).flatten(2), _planes(q >> 4, 2), s, _bytes(f.d.half())]


_K_PARTS = {2: _q2_k_of, 3: _q3_k_of, 4: _q4_k_of, 5: _q5_k_of, 6: _q6_k_of}


# ---- reading ---------------------------------------------------------------------------------------------------------


def decode(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of `dtype` that bytes [N, …] of a type hold; plain if no low-bit weight has the same values.

    Raises FormatError for a type that lowbit does not read, for rows that are not whole blocks, and for values that
    `dtype` does not hold.
    """
    made = _decoded(kind, rows, dtype)
    if dtype is torch.float16 and not made.is_meta and (bad := _nonfinite(made)):
        bad -= count_nonfinite(_plain(_decoded(kind, rows, torch.float32)))  # those of the file
        if bad:
            raise FormatError(
                f"{bad} of {made.numel()} values are beyond {LARGEST:g}, the largest of torch.float16, in which lowbit "
                "reads GGUF files without bfloat16; `dequantize` of the package gguf gives them in float32"
            )
    return made


def _plain(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, LowbitTensor) else weight


def _nonfinite(weight: Tensor) -> int:
    """How many values of a float16 weight are infinite or NaN."""
    if isinstance(weight, (AffineTensor, TableTensor)):
        scale, zero = weight.scale, getattr(weight, "zero_point", None)
        top = float(scale.abs().max())
        if scale.dtype is torch.uint8:  # exponents of two, less 127
            top = 2.0 ** (int(top) - 127)
        # codes have 8 bits at most: where this bound holds nothing needs to be decoded
        if 256 * top + (0.0 if zero is None else float(zero.float().abs().max())) < LARGEST:
            return 0
    return count_nonfinite(_plain(weight))


def _decoded(kind: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    if kind not in TYPES:
        raise FormatError(f"its type is {kind}; lowbit reads {', '.join(TYPES)} and plain ones")
    format, size, read = TYPES[kind]
    if rows.ndim != 2 or rows.shape[1] % size:
        raise FormatError(
            f"rows of {tuple(rows.shape)} bytes are not whole {kind} blocks of {size}"
        )
    if kind == "MXFP4":
        return _mxfp4(rows.unflatten(1, (-1, size)), dtype)
    codes, scale, minimum = read(rows.unflatten(1, (-1, size)))
    q, scale = codes.flatten(1), scale.flatten(1).contiguous()
    group = q.shape[1] // scale.shape[1]
    if isinstance(format, LookupTable):
        packed, spec = pack(q, format.bits), Spec(format, PerGroup(group))
        return TableTensor(packed, {"scale": scale}, spec, q.shape, dtype)
    bits = format.bits
    signed = (q.short() - 2 ** (bits - 1)).to(torch.int8)
    if kind.endswith("_K"):
        return _in_super_blocks(q, scale, minimum, bits, dtype)
    if minimum is None:
        return from_integers(IntegerLayout(bits, group, False), signed, scale, None, dtype)
    return _added(q, signed, scale, minimum.flatten(1), bits, dtype)


def _mxfp4(b: Tensor, dtype: torch.dtype) -> TableTensor:
    q = _halves(b[..., 1:]).flatten(1)
    return TableTensor(pack(q, 4), {"scale": b[..., 0].contiguous()}, MXFP4, q.shape, dtype)


def _in_super_blocks(
    q: Tensor, scale: Tensor, minimum: Tensor | None, bits: int, dtype: torch.dtype
) -> Tensor:
    """The weight of a K-quant; plain where float32 does not represent a zero point."""
    group, zero = PerGroup(q.shape[1] // scale.shape[1]), None
    if minimum is not None:
        exact = minimum.flatten(1).double() + 2 ** (bits - 1) * scale.double()
        zero = exact.float()
        if not torch.equal(zero.double(), exact):
            return _values(q, scale, minimum.flatten(1)).to(dtype)
    mapping: MappingName = "symmetric" if zero is None else "float_zero_point"
    spec = Spec(Int(bits), group, mapping, scale_format="super_block")
    return AffineTensor(pack(q, bits), scale, zero, spec, q.shape, dtype)


def _values(q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Unsigned codes [N, K] times scales plus minimums [N, G], in float32."""
    group = q.shape[1] // scale.shape[1]
    return q.float() * scale.repeat_interleave(group, 1) + minimum.repeat_interleave(group, 1)


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
        return _values(q, scale, minimum).to(dtype)
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


def _halves(b: Tensor) -> Tensor:
    """The low nibbles of all bytes, then the high ones."""
    return torch.cat([b & 15, b >> 4], -1)


def _q_of_32(has_minimum: bool, has_fifth: bool, b: Tensor) -> Block:
    """Q4_0, Q4_1, Q5_0 and Q5_1: d, the minimum, the fifth bits of all elements in four bytes, their low bits."""
    at = 4 if has_minimum else 2
    q = _halves(b[..., at + 4 * has_fifth :])
    if has_fifth:
        shifts = torch.arange(8, dtype=torch.uint8)
        q = q | (((b[..., at : at + 4, None] >> shifts) & 1) << 4).flatten(2)
    return q, _half(b, 0), _half(b, 2) if has_minimum else None


def _q8_0(b: Tensor) -> Block:
    return b[..., 2:] ^ 0x80, _half(b, 0), None


def _q2_k(b: Tensor) -> Block:
    s, d, low = b[..., :16], _half(b, 80), _half(b, 82)
    return _bits_of(b[..., 16:80], 2), d * (s & 15).float(), -(low * (s >> 4).float())


def _q3_k(b: Tensor) -> Block:
    packed, d = b[..., 96:108], _half(b, 108)
    low = _halves(packed[..., :8])
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
    q = _halves(b[..., 8:].unflatten(-1, (8, 16))).flatten(2)
    return q, _half(b, 0) * ((low | high << 4).float() - 32), None


TYPES: dict[str, tuple[Int | LookupTable, int, Callable[[Tensor], Block]]] = {
    "Q4_0": (Int(4), 18, partial(_q_of_32, False, False)),
    "Q4_1": (Int(4), 20, partial(_q_of_32, True, False)),
    "Q5_0": (Int(5), 22, partial(_q_of_32, False, True)),
    "Q5_1": (Int(5), 24, partial(_q_of_32, True, True)),
    "Q8_0": (Int(8), 34, _q8_0),
    "Q2_K": (Int(2), 84, _q2_k),
    "Q3_K": (Int(3), 110, _q3_k),
    "Q4_K": (Int(4), 144, _q4_k),
    "Q5_K": (Int(5), 176, _q5_k),
    "Q6_K": (Int(6), 210, _q6_k),
    "MXFP4": (E2M1, 17, partial(_q_of_32, False, False)),
    "IQ4_NL": (IQ4, 18, partial(_q_of_32, False, False)),
    "IQ4_XS": (IQ4, 136, _iq4_xs),
}
"""For each type its format, the bytes of a block, and the function that reads blocks."""
