"""Negative scales, in everything that a stored weight passes: maths, tensors, products, kernels, files, gathers.

A scale of −s with the mirrored codes has the same values, so most tests compare with a float64 reference or with the
formula code · scale.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.numerics.affine import (
    MAPPINGS,
    dequantize_affine,
    fake_quantize_affine,
    quantize_affine,
    unclamped_codes,
)
from lowbit_kernels.runtime import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HALVES = pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
SCHEMES = {
    "int4-g32": lb.Int4WeightOnly(32),
    "int4-row": lb.IntxWeightOnly(4),
    "int8-row": lb.Int8WeightOnly(),
    "int8-g32": lb.Int8WeightOnly(32),
    "int3-g16": lb.IntxWeightOnly(3, 16),
    "int2-g32": lb.IntxWeightOnly(2, 32),
    "uint5-blocks": lb.Scheme(lb.Spec(lb.Int(5, signed=False), lb.PerBlock(4, 8))),
    "int4-tensor": lb.Scheme(lb.Spec(lb.Int(4), lb.PerTensor())),
    "int8xint8": lb.Int8DynamicActivationInt8Weight(),
    "int8xint4": lb.Int8DynamicActivationInt4Weight(32),
}
over = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def negative(
    scheme: lb.Scheme, shape: tuple[int, ...] = (24, 96), dtype: torch.dtype = torch.float32
) -> tuple[lb.AffineTensor, Tensor]:
    """A weight of which every second scale is negative (the only one, where there is one), and its values."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    spec = scheme.weight
    scale, zero_point = spec.choose_qparams(spec.pad(weight), dtype)
    sign = torch.ones(scale.numel()).index_fill_(0, torch.arange(0, scale.numel(), 2), -1)
    scale = scale * sign.view(scale.shape).to(dtype)
    found = lb.AffineTensor.from_float(weight, scheme, (scale, zero_point))
    assert (found.scale < 0).any()
    return found, values_of(found)


def values_of(weight: lb.AffineTensor) -> Tensor:
    """(code − zero point) · scale in float64, element by element."""
    spec = weight.spec
    codes = weight._load(spec.padded_shape(weight.shape)[-1]).double()
    scale, zero = weight.scale.double(), weight.zero_point
    zero = torch.zeros_like(scale) if zero is None else zero.double()
    for dim, size in enumerate(spec.block_size(weight.shape)):
        scale, zero = scale.repeat_interleave(size, dim), zero.repeat_interleave(size, dim)
    return ((codes - zero) * scale)[tuple(slice(n) for n in weight.shape)]


# ---- maths -----------------------------------------------------------------------------------------------------


@pytest.mark.cover("pairs")
@dtypes
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_fake_quantize_is_quantize_then_dequantize(mapping, bits: int, dtype: torch.dtype) -> None:
    spec = lb.Spec(lb.Int(bits), lb.PerGroup(8), mapping)
    for seed in range(10):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(seed)).to(dtype)
        scale, zero_point = spec.choose_qparams(x, dtype)
        args = (-scale, zero_point, torch.int8, spec.format.quant_min, spec.format.quant_max)
        fake = fake_quantize_affine(x, (1, 8), *args)
        codes = quantize_affine(x, (1, 8), *args)
        values = dequantize_affine(codes, (1, 8), -scale, zero_point, *args[3:], output_dtype=dtype)
        assert torch.equal(fake, values)
        own, _, _ = spec.quantize(x, qparams=(-scale, zero_point))
        assert torch.equal(own, codes)


def test_the_codes_of_a_negative_scale_are_mirrored() -> None:
    x = torch.tensor([[8.0, 7.0, -7.0, -8.0, 0.4, -0.6, torch.nan, torch.inf]])
    codes = quantize_affine(x, (1, 8), -torch.ones(1), None, torch.int8, -8, 7)
    assert codes.tolist() == [[-8, -7, 7, 7, 0, 1, 0, -8]]


def test_the_gradient_stops_where_codes_clip() -> None:
    x = torch.tensor([[8.0, 8.6, -7.0, -7.6, 1.0, 0.0, 2.0, -3.0]], requires_grad=True)
    fake_quantize_affine(x, (1, 8), -torch.ones(1), None, torch.int8, -8, 7).sum().backward()
    assert x.grad.tolist() == [[1, 0, 1, 0, 1, 1, 1, 1]]
    unclamped = unclamped_codes(x.detach(), (1, 8), -torch.ones(1), None, torch.int8, -8, 7)
    assert unclamped[0, :4].tolist() == [-8, -9, 7, 8]


# ---- the tensor ------------------------------------------------------------------------------------------------


@pytest.mark.cover("pairs")
@over
@dtypes
@pytest.mark.parametrize("shape", [(24, 96), (7, 101)], ids=str)
def test_dequantize(scheme: lb.Scheme, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, values = negative(scheme, shape, dtype)
    assert torch.equal(weight.dequantize(), values.float().to(dtype))


@over
@dtypes
def test_linear_and_its_input_gradient(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    weight, values = negative(scheme, dtype=dtype)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, 96, dtype=dtype, requires_grad=True)
        y = F.linear(x, weight)
        rounded = weight.rounded_input(x.detach()).double()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
        expected = rounded @ values.T
        assert (y.double() - expected).norm() <= tolerance * expected.norm()
        (dx,) = torch.autograd.grad(y.sum(), x)
        expected = values.sum(0).expand(tokens, -1)
        assert (dx.double() - expected).norm() <= tolerance * expected.norm()


@over
def test_embedding_rows(scheme: lb.Scheme) -> None:
    weight, values = negative(scheme)
    if scheme.weight.shares_rows:
        pytest.skip("rows that share scales are not looked up singly")
    indices = torch.tensor([[3, 0], [23, 3]])
    assert torch.equal(F.embedding(indices, weight), values.float()[indices])


@over
def test_a_write_keeps_scales_that_are_nearer(scheme: lb.Scheme) -> None:
    weight, _ = negative(scheme)
    before = weight.clone()
    weight.requantize_(before.dequantize())  # nothing is rounded, so nothing is said
    assert torch.equal(weight.scale, before.scale) and torch.equal(weight.codes, before.codes)
    values = torch.randn(24, 96)
    with pytest.warns(UserWarning, match="takes new values"):
        weight.requantize_(values)
    fresh = lb.AffineTensor.from_float(values, scheme)
    errors = [(w.dequantize() - values).square().sum() for w in (weight, fresh)]
    assert errors[0] <= errors[1] * 1.0001


@over
def test_slices_copies_casts_and_arithmetic(scheme: lb.Scheme) -> None:
    weight, values = negative(scheme)
    values = values.float()
    assert torch.equal(weight[8:16].dequantize(), values[8:16])
    assert torch.equal(weight.t().dequantize(), values.t())
    assert torch.equal(copy.deepcopy(weight).dequantize(), values)
    assert torch.equal(weight.to(torch.bfloat16).dequantize(), values.bfloat16())
    assert torch.equal(weight + 1, values + 1) and torch.equal(weight.abs(), values.abs())
    joined = torch.cat([weight[:8], weight[8:]])
    assert torch.equal(joined.dequantize(), values)


@over
def test_state_dicts_files_and_pickles(scheme: lb.Scheme, tmp_path) -> None:
    weight, values = negative(scheme)
    model = nn.Linear(96, 24)
    lb.quantize_(model, scheme)
    model.weight = nn.Parameter(weight, requires_grad=False)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    again = nn.Linear(96, 24)
    lb.quantize_(again, scheme)
    again.load_state_dict(state)
    assert torch.equal(again.weight.dequantize(), values.float())
    lb.save(model, tmp_path / "model.safetensors")
    loaded = nn.Linear(96, 24)
    loaded.load_state_dict(lb.load(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(loaded.weight.dequantize(), values.float())
    assert torch.equal(loaded.weight.scale, weight.scale)
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer).dequantize(), values.float())


@over
def test_dequantize_gives_a_plain_model_back(scheme: lb.Scheme) -> None:
    weight, values = negative(scheme)
    model = nn.Linear(96, 24)
    lb.quantize_(model, scheme)
    model.weight = nn.Parameter(weight, requires_grad=False)
    lb.dequantize_(model)
    assert torch.equal(model.weight.detach(), values.float())


def test_fsdp_parts_travel_with_their_scales() -> None:
    weight, values = negative(SCHEMES["int4-g32"])
    parts = [weight[:8], weight[8:16], weight[16:]]
    gathered = torch.cat(parts)
    assert torch.equal(gathered.scale, weight.scale)
    padded = weight[:0]._pad_rows(4) if weight.shape[0] else weight
    assert not padded.dequantize().any()
    assert torch.equal(gathered.dequantize(), values.float())


@pytest.mark.parametrize("name", ["4bit", "8bit", "float8"])
def test_codebook_tensors(name: str) -> None:
    """They choose positive scales. One that is negative is read as it is, and a write replaces it."""
    values = torch.randn(8, 512)
    state = lb.CodebookTensor.from_float(values, name, signed=True)
    read = state.dequantize()
    state.scale.neg_()
    assert torch.equal(state.dequantize(), -read)
    state.copy_(values)
    assert torch.equal(state.dequantize(), read) and (state.scale > 0).all()


# ---- kernels ---------------------------------------------------------------------------------------------------


def _operands(
    scheme: lb.Scheme, dtype: torch.dtype, tokens: int
) -> tuple[Tensor, lb.AffineTensor, Tensor]:
    weight, values = negative(scheme, (48, 128), dtype)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, weight, x.double() @ values.T


SERVED = pytest.mark.parametrize(
    "scheme",
    [SCHEMES[n] for n in ("int4-g32", "int4-row", "int8-row", "int8-g32")]
    + [lb.IntxWeightOnly(4, 32, "asymmetric")],
    ids=["int4-g32", "int4-row", "int8-row", "int8-g32", "int4-g32-asymmetric"],
)


def _near(y: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    return bool((y.double() - expected).norm() <= tolerance * expected.norm())


@SERVED
@HALVES
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_weight_linear(scheme: lb.Scheme, dtype: torch.dtype, tokens: int) -> None:
    """The op's own choice on this machine: the C++ kernel where it is built. tests/kernels tests all implementations,
    with scales of both signs."""
    x, weight, expected = _operands(scheme, dtype, tokens)
    with launches.counted() as counts:
        y = F.linear(x, weight)
    assert _near(y, expected, dtype) and counts


@pytest.mark.gpu
@SERVED
@HALVES
@pytest.mark.parametrize("tokens", [1, 8, 16, 64, 300])
def test_weight_linear_on_a_gpu(scheme: lb.Scheme, dtype: torch.dtype, tokens: int) -> None:
    x, weight, expected = _operands(scheme, dtype, tokens)
    y = F.linear(x.cuda(), weight.cuda())
    assert _near(y.cpu(), expected, dtype)


@pytest.mark.gpu
@over
@dtypes
def test_dequantize_on_a_gpu(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    weight, values = negative(scheme, (48, 128), dtype)
    assert torch.equal(weight.cuda().dequantize().cpu(), values.float().to(dtype))


@pytest.mark.gpu
@HALVES
def test_int8_by_int8_on_a_gpu(dtype: torch.dtype) -> None:
    weight, values = negative(SCHEMES["int8xint8"], (48, 128), dtype)
    x = torch.randn(40, 128).to(dtype)
    y = F.linear(x.cuda(), weight.cuda()).cpu()
    expected = weight.rounded_input(x).double() @ values.T
    assert _near(y, expected, dtype)


@pytest.mark.gpu
@HALVES
@pytest.mark.parametrize("name", ["int4-g32", "int8-row"])
def test_experts_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    weight, values = negative(SCHEMES[name], (3, 48, 128), dtype)
    x, ends = torch.randn(20, 128).to(dtype), torch.tensor([5, 5, 20], dtype=torch.int32)
    y = lb.inference.grouped_linear(x.cuda(), weight.cuda(), ends.cuda()).cpu()
    expected = torch.cat([x[:5].double() @ values[0].T, x[5:].double() @ values[2].T])
    assert _near(y, expected, dtype)
