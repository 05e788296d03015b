"""Schemes to test with: every preset by a readable id, hypothesis strategies over all specs, and a reference.

`rounded` quantizes and dequantizes with the primitives of `lowbit.numerics.affine` alone: it pads, tiles and picks the
ranges itself, so that a mistake in `Spec` or in a tensor class shows.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lowbit as lb
from lowbit.numerics.affine import (
    MAPPINGS,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)
from lowbit.numerics.lookup_table import DYNAMIC8

WEIGHT_ONLY = {
    "int4-g8": lb.Int4WeightOnly(8),
    "int4-g32-asymmetric": lb.Int4WeightOnly(32, "asymmetric"),
    "int4-g16-float-zero": lb.Int4WeightOnly(16, "float_zero_point"),
    "int4-g16-float16-scales": lb.Int4WeightOnly(16, scale_dtype=torch.float16),
    "int4-g32-float16-minimum": lb.Int4WeightOnly(
        32, "float_zero_point", scale_dtype=torch.float16
    ),
    "int8": lb.Int8WeightOnly(),
    "int8-g32": lb.Int8WeightOnly(32),
    "int3-g16": lb.IntxWeightOnly(3, 16),
    "int1-row": lb.IntxWeightOnly(1),
    "int2-g16-half-integer": lb.IntxWeightOnly(2, 16, "half_integer"),
    "int6-row-asymmetric": lb.IntxWeightOnly(6, None, "asymmetric"),
    "float8": lb.Float8WeightOnly(),
    "int5-blocks": lb.Scheme(lb.Spec(lb.Int(5, signed=False), lb.PerBlock(4, 8))),
    "nf4-g16": lb.NF4WeightOnly(16),
    "nf4-g16-double": lb.NF4WeightOnly(16, double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "mxfp4-ocp": lb.MXFP4WeightOnly("symmetric"),
    "nvfp4": lb.NVFP4WeightOnly(),
    "mxfp8": lb.MXFP8WeightOnly(),
    "mxfp8-ocp": lb.MXFP8WeightOnly("symmetric"),
    "int4-tensor": lb.Scheme(lb.Spec(lb.Int(4), lb.PerTensor(), "symmetric_no_clipping_err")),
}
DYNAMIC = {
    "int8xint8": lb.Int8DynamicActivationInt8Weight(),
    "int8xint4": lb.Int8DynamicActivationInt4Weight(16),
    "float8xfloat8": lb.Float8DynamicActivationFloat8Weight(),
    "float8xmxfp4": lb.Float8DynamicActivationMXFP4Weight(),
    "float8xnvfp4": lb.Float8DynamicActivationNVFP4Weight(),
    "mxfp8xmxfp8": lb.MXFP8DynamicActivationMXFP8Weight(),
    "uint8xint4-asymmetric": lb.Scheme(
        lb.Spec(lb.Int(4), lb.PerGroup(16), "asymmetric"),
        lb.Spec(lb.Int(8), lb.PerToken(), "asymmetric"),
    ),
    "tensor-int8xint8": lb.Scheme(
        lb.Spec(lb.Int(8), lb.PerRow()), lb.Spec(lb.Int(8), lb.PerTensor())
    ),
}
FREE_SCALES = {n: s for n, s in WEIGHT_ONLY.items() if s.weight.scale_format == "float"}
"""Scales take any value: they can be searched and learned."""
FREE_DYNAMIC = {n: s for n, s in DYNAMIC.items() if s.weight.scale_format == "float"}
"""The same, with rounded inputs."""
AFFINE = {n: s for n, s in WEIGHT_ONLY.items() if not isinstance(s.weight.format, lb.LookupTable)}
PER_TOKEN = {name: s for name, s in DYNAMIC.items() if name != "tensor-int8xint8"}
SCHEMES = {**WEIGHT_ONLY, **DYNAMIC}


def over(schemes: dict[str, lb.Scheme]) -> pytest.MarkDecorator:
    """Parametrize `scheme` over these, by their names."""
    return pytest.mark.parametrize("scheme", list(schemes.values()), ids=list(schemes))


def axes_of(scheme: lb.Scheme) -> tuple[object, ...]:
    """How a scheme rounds, for the marker `cover`: what changes the operations, not their numbers alone."""
    weight, own = scheme.weight, scheme.activation
    activation = own and (type(own.format), type(own.granularity), own.mapping, own.static)
    return (
        (type(weight.format), getattr(weight.format, "bits", None) in (4, 8)),
        type(weight.granularity),
        weight.mapping,
        weight.scale_format,
        activation,
    )


# ---- hypothesis ---------------------------------------------------------------------------------------------

_sizes = st.integers(1, 40)
formats = st.one_of(
    st.builds(lb.Int, st.integers(1, 8), st.booleans()),
    st.builds(lb.Float8, st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])),
    st.sampled_from([lb.NF4, lb.E2M1]),
)
granularities = st.one_of(
    st.sampled_from([lb.PerTensor(), lb.PerRow(), lb.PerToken()]),
    st.builds(lb.PerGroup, _sizes),
    st.lists(_sizes, min_size=1, max_size=3).map(lambda shape: lb.PerBlock(*shape)),
)


def _fits(fmt: lb.Int | lb.Float8 | lb.LookupTable, mapping: str) -> bool:
    if not isinstance(fmt, lb.Int):
        return mapping == "symmetric"
    return fmt.bits > 1 or not mapping.startswith("symmetric")


def _scales(fmt: object, granularity: object) -> st.SearchStrategy[dict[str, object]]:
    """`scale_format` and `scale_dtype`."""
    if isinstance(fmt, lb.LookupTable):
        stored = ["float", "e8m0", "e4m3", "double"]
        return st.fixed_dictionaries({"scale_format": st.sampled_from(stored)})
    in_blocks = isinstance(fmt, lb.Float8) and isinstance(granularity, lb.PerBlock)
    dtypes = [None] if in_blocks else [None, torch.float16, torch.bfloat16]
    free = st.fixed_dictionaries({"scale_dtype": st.sampled_from(dtypes)})
    e8m0: dict[str, object] = {"scale_format": "e8m0"}
    return st.one_of(free, st.just(e8m0)) if isinstance(fmt, lb.Float8) else free


specs = (
    st.tuples(formats, granularities, st.sampled_from(MAPPINGS))
    .filter(lambda parts: _fits(parts[0], parts[2]))
    .flatmap(lambda parts: _scales(*parts[:2]).map(lambda scales: lb.Spec(*parts, **scales)))
)
activation_specs = specs.filter(
    lambda s: (
        isinstance(s.granularity, lb.PerToken | lb.PerTensor)
        and not isinstance(s.format, lb.LookupTable)
        and s.scale_dtype is None
    )
)


def weight_specs(rank: int) -> st.SearchStrategy[lb.Spec]:
    """Specs that fit a weight of `rank` dimensions."""
    return specs.filter(
        lambda s: (
            not isinstance(s.granularity, lb.PerToken)
            and not (isinstance(s.granularity, lb.PerBlock) and len(s.granularity.shape) > rank)
        )
    )


# ---- reference ----------------------------------------------------------------------------------------------


def _block(granularity: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    ones = [1] * len(shape)
    if isinstance(granularity, lb.PerTensor):
        return tuple(max(n, 1) for n in shape)
    if isinstance(granularity, lb.PerGroup):
        return (*ones[:-1], granularity.group_size)
    if isinstance(granularity, lb.PerBlock):
        return (*ones[len(granularity.shape) :], *granularity.shape)
    return (*ones[:-1], max(shape[-1], 1))


def rounded(x: Tensor, spec: lb.Spec) -> Tensor:
    """`x` quantized and dequantized, in float64 (the values have float32's precision), not rounded to x's dtype."""
    shape = tuple(x.shape)
    block = _block(spec.granularity, shape)
    padded = torch.zeros([-(-n // b) * b for n, b in zip(shape, block, strict=True)], dtype=x.dtype)
    inside = tuple(slice(n) for n in shape)
    padded[inside] = x
    fmt = spec.format
    if isinstance(fmt, lb.LookupTable) or spec.scale_format == "e8m0":
        return _rounded_to_table(padded.float(), spec, block)[inside].double()
    if isinstance(fmt, lb.Float8):
        dtype, low, high = fmt.dtype, None, None
    elif fmt.signed:
        dtype, low, high = torch.int8, -(2 ** (fmt.bits - 1)), 2 ** (fmt.bits - 1) - 1
    else:
        dtype, low, high = torch.uint8, 0, 2**fmt.bits - 1
    scale_dtype = torch.float32 if x.dtype is torch.float64 else x.dtype
    scale_dtype = spec.scale_dtype or scale_dtype
    has_minimum = spec.scale_dtype is not None and spec.mapping == "float_zero_point"
    given = {"zero_point_dtype": torch.float32} if has_minimum else {}
    scale, zero = choose_qparams_affine(
        padded, spec.mapping, block, dtype, low, high, scale_dtype=scale_dtype, **given
    )
    if has_minimum:
        first = 2 ** (fmt.bits - 1) * scale.double()
        exact = (zero.double() - first).float().to(scale_dtype).double() + first
        zero = torch.where(exact.float().double() == exact, exact, first).float()
        scale = scale.float()
    codes = quantize_affine(padded, block, scale, zero, dtype, low, high)
    return dequantize_affine(codes, block, scale, zero, low, high)[inside].double()


def _rounded_to_table(x: Tensor, spec: lb.Spec, block: tuple[int, ...]) -> Tensor:
    """`rounded` of padded x: the nearest of all values of a table or of float8, times the scale as it is stored."""
    counts = [size // b for size, b in zip(x.shape, block, strict=True)]
    tiled = x.reshape([n for pair in zip(counts, block, strict=True) for n in pair])
    is_float8 = isinstance(spec.format, lb.Float8)
    largest = spec.format.quant_max if is_float8 else max(abs(v) for v in spec.format.values)
    absmax = tiled.abs().amax(list(range(1, tiled.ndim, 2)))
    scale = absmax / largest
    if spec.scale_format == "e8m0":
        mantissa, exponent = absmax.clamp(min=2.0**-100).frexp()  # mantissa in [0.5, 1)
        if spec.mapping != "symmetric":
            beyond = mantissa > largest / 2 ** math.ceil(math.log2(largest))
            exponent = exponent + (beyond if is_float8 else mantissa >= 0.875)
        scale = torch.ldexp(torch.ones(()), exponent - 1 - int(math.log2(largest)))
    elif spec.scale_format == "e4m3":
        most = absmax.amax((-2, -1), keepdim=True)
        whole = torch.full_like(most, 448 * largest) / most  # a number / a tensor is rounded twice
        whole = torch.where(most == 0, 1.0, whole)
        scale = (scale * whole).clamp(min=2.0**-9, max=448).to(torch.float8_e4m3fn).float() / whole
    elif spec.scale_format == "double":
        scale = _quantized_twice(scale)
    scale = scale.reshape([n for count in counts for n in (count, 1)])
    least = torch.where(scale.abs() < 2.0**-126, 2.0**-126, scale)
    if is_float8:
        codes = (tiled / least).clamp(-largest, largest).to(spec.format.dtype)
        return (codes.float() * scale).view(x.shape)
    values = torch.tensor(spec.format.values)
    return (values[_nearest(tiled * (1 / least), spec.format)] * scale).view(x.shape)


def _quantized_twice(scale: Tensor) -> Tensor:
    """Each matrix [N, G] of scales around its mean, in flat blocks of 256, to 8 bits."""
    if scale.ndim > 2:
        return torch.stack([_quantized_twice(part) for part in scale])
    offset = scale.double().mean().float()
    book = torch.tensor(DYNAMIC8.values)
    found = []
    for part in (scale.flatten() - offset).split(256):
        absmax = part.abs().max()
        code = ((part / absmax.clamp(min=2.0**-126)).unsqueeze(-1) - book).abs().argmin(-1)
        found.append(book[code] * absmax)
    return torch.cat(found).view(scale.shape) + offset


def _nearest(x: Tensor, table: lb.LookupTable) -> Tensor:
    """Codes of the nearest values. At a tie the smaller value, or the even code."""
    values = torch.tensor(table.values, dtype=torch.float64)
    distance = (x.double().unsqueeze(-1) - values).abs()
    tied = distance == distance.amin(-1, keepdim=True)
    order = torch.arange(len(values)) % 2 if table.ties_to_even else values
    return torch.where(tied, order.double(), torch.inf).argmin(-1)


def rounded_activation(x: Tensor, spec: lb.Spec | None) -> Tensor:
    """float64; an activation's scales are float32 whatever its dtype."""
    return x.double() if spec is None else rounded(x.float(), spec)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖ in float64."""
    found, expected = found.detach(), expected.detach()
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-300))


def all_schemes_and_dtypes() -> list[tuple[str, lb.Scheme, torch.dtype]]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return [(name, SCHEMES[name], dtype) for name, dtype in product(SCHEMES, dtypes)]
