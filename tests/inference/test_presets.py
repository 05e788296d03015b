"""quantize_ on nn.Linear: every scheme against a float64 reference, and the bytes that it stores."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from tests.schemes import (
    PER_TOKEN,
    SCHEMES,
    WEIGHT_ONLY,
    all_schemes_and_dtypes,
    over,
    relative_error,
    rounded,
    rounded_activation,
)

# rounding of the output, of the dequantized weight, and of a fake-quantized activation, in the input's dtype
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


def reference(x: Tensor, linear: nn.Linear, scheme: lb.Scheme) -> Tensor:
    """The product in float64 of x and the weight, each rounded as the scheme says."""
    bias = None if linear.bias is None else linear.bias.detach().double()
    weight = rounded(linear.weight.detach(), scheme.weight)
    return F.linear(rounded_activation(x, scheme.activation), weight, bias)


def quantized(linear: nn.Linear, scheme: lb.Scheme) -> nn.Linear:
    copied = copy.deepcopy(linear)
    lb.quantize_(copied, scheme, scales="minmax")
    return copied


@pytest.mark.cover("pairs", name=str, scheme=str, dtype=str)
@pytest.mark.parametrize(
    ("name", "scheme", "dtype"),
    all_schemes_and_dtypes(),
    ids=[f"{name}-{str(dtype)[6:]}" for name, _, dtype in all_schemes_and_dtypes()],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_against_float64(name: str, scheme: lb.Scheme, dtype: torch.dtype, bias: bool) -> None:
    linear = nn.Linear(67, 29, bias=bias, dtype=dtype)
    model = quantized(linear, scheme)
    for shape in [(5, 67), (67,), (2, 3, 67), (2, 1, 3, 67)]:
        x = torch.randn(shape, dtype=dtype)
        y = model(x)
        assert y.shape == (*shape[:-1], 29) and y.dtype is dtype and y.is_contiguous()
        assert relative_error(y, reference(x, linear, scheme)) < TOLERANCE[dtype]
    assert torch.equal(
        model.weight.dequantize(), rounded(linear.weight.detach(), scheme.weight).to(dtype)
    )
    assert model.weight.dtype is dtype


@over(SCHEMES)
def test_inputs_of_every_layout(scheme: lb.Scheme) -> None:
    linear = nn.Linear(24, 13)
    model = quantized(linear, scheme)
    base = torch.randn(24, 7, 3)
    for x in [
        base[:, :, 0].t(),
        base.permute(2, 1, 0),
        torch.randn(4, 48)[:, ::2],
        torch.randn(1, 24).expand(6, 24),
    ]:
        assert not x.is_contiguous()
        assert torch.equal(model(x), model(x.contiguous()))
        assert relative_error(model(x), reference(x, linear, scheme)) < 1e-5


@pytest.mark.cover("values")
@over(SCHEMES)
@pytest.mark.parametrize("shape", [(0, 24), (3, 0, 24), (0, 2, 24)], ids=str)
def test_empty_batch(scheme: lb.Scheme, shape: tuple[int, ...]) -> None:
    model = quantized(nn.Linear(24, 13), scheme)
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    assert y.shape == (*shape[:-1], 13)
    y.sum().backward()
    assert x.grad.shape == shape and torch.equal(model.bias.grad, torch.zeros(13))


@pytest.mark.cover("values")
@over(SCHEMES)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (1, 1)], ids=str)
def test_smallest_layers(scheme: lb.Scheme, size: tuple[int, int]) -> None:
    linear = nn.Linear(*size)
    model = quantized(linear, scheme)
    y = model(torch.randn(3, size[0]))
    assert y.shape == (3, size[1])
    if size[0] == 0:
        assert torch.equal(y, linear(torch.randn(3, 0)))


@settings(max_examples=60)
@given(st.sampled_from(list(SCHEMES)), st.integers(1, 70), st.integers(1, 40), st.integers(1, 9))
def test_every_size(name: str, k: int, n: int, batch: int) -> None:
    """Every size, also a K that no group divides: padded, and equal to the reference."""
    linear = nn.Linear(k, n)
    scheme = SCHEMES[name]
    report = None
    model = copy.deepcopy(linear)
    report = lb.quantize_(model, scheme, scales="minmax")
    x = torch.randn(batch, k)
    assert relative_error(model(x), reference(x, linear, scheme)) < 1e-5
    padded = scheme.weight.padded_shape((n, k)) != (n, k)
    assert ("padded" in str(report)) == padded and model.weight.shape == (n, k)


def stored_bytes(weight: lb.LowbitTensor) -> dict[str, int]:
    names, _ = weight.__tensor_flatten__()
    return {name: getattr(weight, name).untyped_storage().nbytes() for name in names}


@pytest.mark.parametrize(
    ("scheme", "codes", "scale", "zero_point"),
    [
        (lb.Int4WeightOnly(32), 256 * 512 // 2, 256 * 16 * 4, None),
        (lb.Int4WeightOnly(32, "asymmetric"), 256 * 512 // 2, 256 * 16 * 4, 256 * 16),
        (lb.Int4WeightOnly(64, "float_zero_point"), 256 * 512 // 2, 256 * 8 * 4, 256 * 8 * 4),
        (lb.IntxWeightOnly(3, 64), 256 * 512 * 3 // 8, 256 * 8 * 4, None),
        (lb.IntxWeightOnly(1), 256 * 512 // 8, 256 * 4, 256),
        (lb.IntxWeightOnly(2, 128), 256 * 512 // 4, 256 * 4 * 4, None),
        (lb.IntxWeightOnly(5, 128), 256 * 512 * 5 // 8, 256 * 4 * 4, None),
        (lb.IntxWeightOnly(7), 256 * 512 * 7 // 8, 256 * 4, None),
        (lb.Int8WeightOnly(), 256 * 512, 256 * 4, None),
        (lb.Float8WeightOnly(), 256 * 512, 256 * 4, None),
        (lb.Int8DynamicActivationInt4Weight(32), 256 * 512 // 2, 256 * 16 * 4, None),
    ],
    ids=lambda v: "" if isinstance(v, int | None) else str(v.weight.format) + str(v.weight.mapping),
)
def test_bytes_stored(scheme, codes, scale, zero_point) -> None:
    model = quantized(nn.Linear(512, 256, bias=False), scheme)
    expected = {"codes": codes, "scale": scale, "zero_point": zero_point}
    assert stored_bytes(model.weight) == {k: v for k, v in expected.items() if v is not None}


def test_scales_take_the_dtype_of_the_weight() -> None:
    model = quantized(nn.Linear(512, 256, bias=False).bfloat16(), lb.Int4WeightOnly(128))
    stored = stored_bytes(model.weight)
    assert sum(stored.values()) / model.weight.numel() == 0.5 + 2 / 128


@over(WEIGHT_ONLY)
def test_quantizing_is_deterministic_and_leaves_the_original(scheme: lb.Scheme) -> None:
    linear = nn.Linear(33, 9)
    before = linear.weight.detach().clone()
    first, second = (quantized(linear, scheme).weight for _ in range(2))
    assert torch.equal(linear.weight, before) and torch.equal(first, second)


@over(PER_TOKEN)
def test_dynamic_activations_depend_on_their_token_alone(scheme: lb.Scheme) -> None:
    model = quantized(nn.Linear(32, 24), scheme)
    x = torch.randn(6, 32) * torch.logspace(-3, 3, 6)[:, None]
    for row, y in zip(x, model(x), strict=True):
        assert relative_error(y, model(row[None])[0]) < 1e-6


def test_bits_buy_precision() -> None:
    linear = nn.Linear(512, 128)
    x = torch.randn(64, 512)
    exact = linear(x).detach()
    errors = [
        relative_error(quantized(linear, lb.IntxWeightOnly(bits, 32))(x), exact)
        for bits in range(2, 9)
    ]
    for fewer, more in itertools.pairwise(errors):
        assert 1.7 < fewer / more < 2.6, errors
    assert errors[-1] < 0.005
