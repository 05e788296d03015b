"""Linears with quantized activations: exact integer products, zeros, NaN, infinities and extreme magnitudes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
import lowbit_kernels as kernels
from lowbit.linear.frozen import BUILT_IN, built_in, choose_linear
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit.linear.frozen.eight_bits import int8_dynamic_linear
from tests.schemes import DYNAMIC, PER_TOKEN, over, relative_error, rounded

INT8 = lb.Int8DynamicActivationInt8Weight()


class Products:
    """Counts the integer products and keeps their operands and results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        real = torch._int_mm

        def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.calls.append((a, b, real(a, b)))
            return self.calls[-1][2]

        monkeypatch.setattr(torch, "_int_mm", int_mm)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


def layer(k: int, n: int, scheme: lb.Scheme, bias: bool = True) -> nn.Linear:
    linear = nn.Linear(k, n, bias=bias)
    lb.quantize_(linear, scheme)
    return linear


def test_int8_by_int8_runs_the_integer_product(products: Products) -> None:
    model = nn.Sequential(layer(64, 48, INT8), nn.ReLU(), layer(48, 16, INT8))
    model(torch.randn(2, 5, 64))
    assert len(products.calls) == 2
    assert [(a.shape, b.shape) for a, b, _ in products.calls] == [
        ((10, 64), (64, 48)),
        ((10, 48), (48, 16)),
    ]
    assert all(a.dtype is b.dtype is torch.int8 for a, b, _ in products.calls)


@pytest.mark.parametrize(
    "scheme", [INT8, lb.Float8DynamicActivationFloat8Weight()], ids=["int8", "float8"]
)
@torch.no_grad()
def test_the_kernel_of_dynamic_schemes_takes_the_residual(
    scheme: lb.Scheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op decides where it adds the residual. Here it runs on a CPU, which the list does not choose it for."""
    model = nn.Linear(64, 48, dtype=torch.bfloat16)
    lb.quantize_(model, scheme)
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 48).bfloat16()
    row = next(row for row in BUILT_IN if row.name == "dynamic_linear")
    monkeypatch.setattr(built_in, "built_in_row", lambda *_: row)
    op, given = kernels.dynamic_linear.dynamic_linear, []
    monkeypatch.setattr(
        kernels.dynamic_linear, "dynamic_linear", lambda *args: given.append(args[4]) or op(*args)
    )
    y = lb.inference.linear(x, model.weight, model.bias, residual)
    assert len(given) == 1 and given[0] is residual
    assert relative_error(y, plain_linear(x, model.weight, model.bias).double() + residual) < 1e-2


@pytest.mark.parametrize("scheme", ["int8xint4", "float8xfloat8", "tensor-int8xint8"])
def test_other_schemes_run_no_integer_product(products: Products, scheme: str) -> None:
    layer(64, 48, DYNAMIC[scheme])(torch.randn(3, 64))
    layer(64, 48, lb.Int8WeightOnly())(torch.randn(3, 64))
    assert not products.calls


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 2, 1), (1, 67, 29), (3, 67, 29), (17, 128, 64), (5, 4099, 3)]
)
def test_the_integer_product_is_exact(products: Products, m: int, k: int, n: int) -> None:
    model = layer(k, n, INT8)
    x = torch.randn(m, k)
    y = model(x)
    ((a, b, product),) = products.calls
    exact = a.long() @ b.long()
    assert torch.equal(product.long(), exact)
    a = a[:m]  # torch._int_mm gets two copies of a single token
    token_scale = (x.amax(1) / 127).maximum(-x.amin(1) / 128)[:, None].double()
    values = a.double() * token_scale @ model.weight.dequantize().double().t()
    assert relative_error(y, values + model.bias.double()) < 2e-7


def test_the_largest_sums_do_not_wrap(products: Products) -> None:
    """−128 · −128 · 131,071 is the largest sum that an int32 holds; a longer K takes the plain path."""
    for k, integer in [(2**17 - 1, True), (2**17, False)]:
        weight = lb.AffineTensor.from_float(torch.full((1, k), -1.0), INT8)
        weight.codes.fill_(-128)
        x = torch.full((2, k), -1.0)
        assert (choose_linear(x, weight).name == "int8_dynamic_linear") == integer
        y = nn.functional.linear(x, weight)
        assert y[0].item() == pytest.approx(k, rel=0.01)
    ((a, _, product),) = products.calls
    assert (a == -128).all() and (product == 2**14 * (2**17 - 1)).all()


@settings(max_examples=40)
@given(
    st.integers(1, 20), st.integers(1, 50), st.integers(1, 30), st.floats(-30, 30), st.integers(0)
)
def test_the_integer_path_equals_the_plain_one(
    m: int, k: int, n: int, magnitude: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    weight = lb.AffineTensor.from_float(torch.randn(n, k, generator=generator), INT8)
    x = torch.randn(m, k, generator=generator) * 10**magnitude
    fast, plain = int8_dynamic_linear(x, weight, None), plain_linear(x, weight, None)
    seen, values = rounded(x, INT8.activation), weight.dequantize().double()
    exact, bound = seen @ values.t(), seen.abs() @ values.abs().t() * 1e-6
    assert ((fast.double() - exact).abs() <= bound).all()
    assert ((plain.double() - exact).abs() <= bound).all()


@over(PER_TOKEN)
def test_rows_of_zeros(scheme: lb.Scheme) -> None:
    model = layer(48, 16, scheme)
    x = torch.randn(4, 48)
    x[1] = 0
    y = model(x)
    assert torch.equal(y[1], model.bias) and y.isfinite().all()
    assert torch.equal(model(torch.zeros(2, 48)), model.bias.expand(2, 16))


@over(PER_TOKEN)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_a_number_stays_in_its_row(scheme: lb.Scheme, bad: float) -> None:
    model = layer(48, 16, scheme)
    x = torch.randn(4, 48)
    clean = model(x)
    x[2, 5] = bad
    y = model(x)
    others = [0, 1, 3]
    assert torch.equal(y[others], clean[others])
    assert y[2].isnan().all(), "a bad input must show in every output of its token"


@over(PER_TOKEN)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e4, 1e37], ids="{:.0e}".format)
def test_magnitudes(scheme: lb.Scheme, magnitude: float) -> None:
    """A token's scale adapts, so the output scales with its input, without overflow on the way. A power of two takes
    other codes for another magnitude."""
    model = layer(64, 32, scheme, bias=False)
    x = torch.randn(5, 64)
    expected = model(x).double() * magnitude
    has_powers = scheme.activation.scale_format == "e8m0"
    assert relative_error(model(x * magnitude), expected) < (0.06 if has_powers else 0.01)
    mixed = model(torch.cat([x * magnitude, x]))
    assert relative_error(mixed[5:], expected / magnitude) < 1e-6


@over(PER_TOKEN)
def test_outliers_of_one_token_leave_the_others_precise(scheme: lb.Scheme) -> None:
    model = layer(64, 32, scheme)
    x = torch.randn(3, 64)
    alone = model(x[1:])
    x[0, 3] = 1e6
    assert torch.allclose(model(x)[1:], alone, rtol=1e-6, atol=1e-7)
