"""The products of a prepared linear, compared with float64 products of the rounded and of the exact operands."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit_kernels
from lowbit import MixedPrecisionTensor, train
from lowbit.linear import low_bit_linear
from lowbit.train import Float8MixedPrecision, Int8MixedPrecision, Int8Weight
from lowbit_kernels.matmul.block_scaled_mm import values as values_of
from lowbit_kernels.quantize.quantize_blocks import quantize_blocks
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from tests.scaled_products import scaled_products
from tests.train.problems import (
    SCHEMES,
    every_scheme,
    every_switch,
    linear,
    outcome,
    prepared,
    relative,
    snr,
    switched,
    values,
)

INPUTS = [(16, 64), (2, 9, 65), (3, 1, 5, 31), (7, 101), (1, 48)]
NAMES = ("output", "input", "weight")


def dequantized(x: Tensor, scheme, fmt: str, is_weight: bool = False) -> tuple[Tensor, Tensor]:
    """x as rounded for products that sum along its rows, and along its columns; float64."""
    if scheme.in_blocks:
        codes, scale, codes_t, scale_t = quantize_blocks(
            x, tiles=is_weight, power_of_two=scheme.power_of_two
        )
        rows = values_of(codes, scale, torch.float64)[:, : x.shape[1]]
        return rows, values_of(codes_t, scale_t, torch.float64)[:, : x.shape[0]].t()
    codes, scale, codes_t, scale_t = quantize_rowcol(x, fmt, tensorwise=scheme.one_scale)
    rows = codes.double()[:, : x.shape[1]] * scale.double()[:, None]
    columns = codes_t.double()[:, : x.shape[0]] * scale_t.double()[:, None]
    return rows, columns.t()


@every_scheme
@pytest.mark.parametrize("shape", INPUTS, ids=str)
def test_as_float64_products_of_the_quantized_operands(scheme, shape):
    layer = linear(37, shape[-1])
    x = values(*shape)
    upstream = values(*shape[:-1], 37, seed=3)
    found = outcome(prepared(layer, scheme), x, upstream)
    x_rows, x_columns = dequantized(x.view(-1, shape[-1]), scheme, scheme.forward_format)
    weight, grad = layer.weight.detach(), upstream.view(-1, 37)
    w_rows, w_columns = dequantized(weight, scheme, scheme.forward_format, True)
    g_rows, g_columns = dequantized(grad, scheme, scheme.backward_format)
    # the gradient is rounded with the weight's scales of rows, and multiplied by the codes that the output saw
    scale = quantize_rowcol(weight, scheme.forward_format, tensorwise=scheme.one_scale)[1]
    scaled, _ = dequantized(grad * scale, scheme, scheme.backward_format)
    expected = {
        "output": x_rows @ w_rows.t() + layer.bias.double(),
        "input": g_rows @ w_columns
        if scheme.in_blocks
        else scaled @ (w_rows / scale.double().view(-1, 1)),
        "weight": g_columns.t() @ x_columns,
        "bias": upstream.double().view(-1, 37).sum(0),
    }
    for name, reference in expected.items():
        assert relative(found[name], reference.view(found[name].shape)) < 3e-7, name


@pytest.mark.cover("pairs")
@every_scheme
@every_switch
@pytest.mark.parametrize("shape", [(33, 100), (2, 19, 80), (2, 3, 11, 64)], ids=["2d", "3d", "4d"])
def test_signal_to_noise(scheme, switch, shape):
    scheme = switched(scheme, switch)
    layer = linear(48, shape[-1])
    with scaled_products() as calls:
        found = outcome(prepared(layer, scheme), values(*shape))
    format = "int8" if scheme.forward_format == "int8" else "float8"
    assert calls == {format: sum(switch)}
    expected = outcome(layer.double(), values(*shape).double())
    for name, low in zip(NAMES, switch, strict=True):
        decibels = snr(found[name], expected[name])
        assert decibels > (35 if format == "int8" else 20) if low else decibels > 120, name
    assert snr(found["bias"], expected["bias"]) > 120


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Int8Weight(True, True, True, always=True)])
@pytest.mark.parametrize("m", [1, 16, 48])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (48, 1), (1, 1), (16, 16)])
def test_sizes_of_one(scheme, m, n, k):
    """A product's operand is a single row or column, with any stride."""
    layer = linear(n, k)
    found, expected = outcome(prepared(layer, scheme), values(m, k)), outcome(layer, values(m, k))
    for name, value in expected.items():
        assert relative(found[name], value) < 0.15, name


@every_scheme
@pytest.mark.parametrize("shape", [(0, 64), (4, 0, 64), (64,)], ids=str)
def test_no_rows_and_one_row(scheme, shape):
    layer = linear(24, 64)
    low = prepared(layer, scheme)
    found, expected = outcome(low, values(*shape)), outcome(layer, values(*shape))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        if shape == (64,) or name in ("weight", "bias"):
            assert torch.allclose(found[name], value, atol=0.3), name


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_models(scheme, dtype):
    layer = linear(48, 96, dtype=dtype)
    x = values(2, 20, 96, dtype=dtype)
    found = outcome(prepared(layer, scheme), x)
    expected = outcome(copy.deepcopy(layer).double(), x.double())
    for name, value in expected.items():
        assert found[name].dtype is dtype
        assert snr(found[name], value) > 20, name


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("k", [16, 96, 2000])
def test_autocast(scheme, dtype, k):
    """Backward inside of it too, as in a compiled step."""
    layer = linear(48, k)
    low = prepared(layer, scheme)
    for inside in (False, True):
        low.zero_grad()
        x = values(20, k).requires_grad_()
        with scaled_products() as calls:
            with torch.autocast("cpu", dtype):
                y = low(x)
            assert y.dtype is dtype
            with torch.autocast("cpu", dtype, enabled=inside):
                y.backward(values(20, 48, seed=3, dtype=dtype))
        assert sum(calls.values()) == 3
        assert low.weight.grad.dtype is torch.float32 and x.grad.dtype is torch.float32
        expected = outcome(layer, values(20, k))
        found = {"output": y.detach(), "input": x.grad, "weight": low.weight.grad}
        for name, value in found.items():
            assert snr(value, expected[name]) > 20, name


def test_an_input_of_another_dtype_is_refused():
    low = prepared(linear(8, 16), SCHEMES["int8"])
    with pytest.raises(ValueError, match=r"bfloat16 input.*float32"):
        low(values(4, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="K differs"):
        low(values(4, 17))


@every_scheme
def test_strided_inputs_and_expanded_gradients(scheme):
    layer = linear(24, 40)
    low = prepared(layer, scheme)
    x, upstream = values(40, 18).t(), values(1, 24, seed=3).expand(18, 24)
    found = outcome(low, x, upstream)
    expected = outcome(low, x.contiguous(), upstream.contiguous())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@every_scheme
@pytest.mark.parametrize("size", [1e-30, 1e30], ids=["tiny", "huge"])
def test_scales_reach_far(scheme, size):
    layer = linear(24, 64, bias=False)
    found = outcome(prepared(layer, scheme), values(16, 64) * size)
    expected = outcome(layer.double(), values(16, 64).double() * size)
    for name, value in expected.items():
        assert snr(found[name], value) > 20, name


@every_scheme
def test_rows_of_zeros(scheme):
    layer = linear(24, 64)
    with torch.no_grad():
        layer.weight[3] = 0
        layer.weight[:, 5] = 0
    x = values(16, 64)
    x[2] = x[:, 7] = 0
    found = outcome(prepared(layer, scheme), x)
    assert all(value.isfinite().all() for value in found.values())
    assert torch.equal(found["output"][2], layer.bias)
    assert (found["weight"][:, 7] == 0).all() and (found["input"][:, 5] == 0).all()
    zeros = outcome(prepared(layer, scheme), torch.zeros(16, 64), torch.zeros(16, 24))
    assert not any(zeros[name].any() for name in ("input", "weight", "bias"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@every_scheme
def test_nan_and_infinity_stay_visible(scheme, bad):
    """In all of its row and column, and with one scale a tensor everywhere."""
    low = prepared(linear(24, 64), scheme)
    x, upstream = values(16, 64), values(16, 24, seed=3)
    x[2, 7] = bad
    found = outcome(low, x, upstream)
    assert found["output"][2].isnan().all() and found["weight"][:, 7].isnan().all()
    assert found["input"].isfinite().all()
    assert scheme.one_scale or found["output"][3:].isfinite().all()
    upstream[2, 5] = bad
    found = outcome(low, values(16, 64), upstream)
    assert found["input"][2].isnan().all() and found["weight"][5].isnan().all()
    assert found["output"].isfinite().all()


def test_float16_overflows_to_an_infinity_as_plain_products_do():
    layer = linear(16, 64, bias=False, dtype=torch.float16)
    x = torch.full((16, 64), 6e4, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    for scheme in SCHEMES.values():
        assert prepared(layer, scheme)(x).isinf().all()


def test_long_sums_of_int8_products_are_cut(monkeypatch):
    low, x = prepared(linear(24, 96), SCHEMES["int8"]), values(80, 96)
    expected = outcome(low, x)
    monkeypatch.setattr(lowbit_kernels.matmul.scaled_mm, "MOST_TERMS", 32)
    with scaled_products() as calls:
        found = outcome(low, x)
    assert calls["int8"] == 3 + 1 + 3
    for name, value in expected.items():
        assert relative(found[name], value) < 1e-6, name
    most = 2**17 * 127**2
    assert most < 2**31 < most * 2


@every_scheme
def test_a_frozen_weight_passes_gradients_on(scheme):
    low = prepared(linear(24, 64), scheme)
    low.requires_grad_(False)
    with scaled_products() as calls:
        found = outcome(low, values(16, 64))
    assert sum(calls.values()) == 2 and found.keys() == {"output", "input"}
    layer = linear(24, 64)
    assert snr(found["input"], outcome(layer, values(16, 64))["input"]) > 20


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, without weights; shared memory counts once."""
    parts = (p.weight if isinstance(p, MixedPrecisionTensor) else p for p in model.parameters())
    own = {p.data_ptr() for p in parts}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if not isinstance(t, MixedPrecisionTensor) and t.data_ptr() not in own:
            kept[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(kept.values())


class Heads(nn.Module):
    """Three linears of one input."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (linear(32, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)


def test_backward_keeps_a_byte_an_element():
    x = values(128, 64, dtype=torch.bfloat16)
    layer = linear(32, 64, dtype=torch.bfloat16)
    for scheme in SCHEMES.values():
        assert saved_bytes(layer, x) == 2 * 128 * 64
        assert saved_bytes(prepared(layer, scheme), x) <= 128 * 64 + 4 * 64
        by_output = replace(scheme, grad_weight=False)
        assert saved_bytes(prepared(layer, by_output), x) == 2 * 128 * 64
    frozen = prepared(layer, by_output).requires_grad_(False)
    assert saved_bytes(frozen, x.requires_grad_()) == 0


def test_an_input_of_several_layers_is_quantized_once(monkeypatch):
    made = []

    def counting(*args, **kwargs):
        if args[0].shape == (128, 64):  # the input, not a weight
            made.append(args)
        return quantize_rowcol(*args, **kwargs)

    monkeypatch.setattr(lowbit_kernels.quantize.quantize_rowcol, "quantize_rowcol", counting)
    model = prepared(Heads(), SCHEMES["int8"])
    leaf = values(128, 64).requires_grad_()
    x = leaf * 1
    assert saved_bytes(model, x) <= 128 * 64 + 4 * 64, "what backward keeps is shared too"
    assert len(made) == 1
    model(x)
    assert len(made) == 1
    x.mul_(2)
    changed = model(x)
    assert len(made) == 2, "the input has changed"
    assert torch.equal(changed, prepared(Heads(), SCHEMES["int8"])(x.detach().clone()))
    assert len(made) == 5, "a leaf may be rewritten unseen"
    model(x)
    assert len(made) == 5
    del x, changed
    assert low_bit_linear._last is None, "codes live no longer than the input that they are of"


def test_casts_of_one_input_and_a_layer_beside_a_larger_one_share_codes(monkeypatch):
    made = []

    def counting(*args, **kwargs):
        made.extend([args] if args[0].shape == (128, 64) else [])
        return quantize_rowcol(*args, **kwargs)

    monkeypatch.setattr(lowbit_kernels.quantize.quantize_rowcol, "quantize_rowcol", counting)
    model, scheme = Heads(), SCHEMES["int8"]
    train.prepare_(model, {"query": scheme, "*": replace(scheme, beside=2.0)})
    x = values(128, 64).requires_grad_() * 1
    expected = model(x)
    assert len(made) == 1
    with torch.autocast("cpu", torch.bfloat16):
        half = model(x)
    assert len(made) == 2, "of another dtype, and once for three casts"
    assert half.dtype == torch.bfloat16 and relative(half.float(), expected) < 0.02


def test_inference(monkeypatch):
    low = prepared(linear(24, 64), SCHEMES["int8"])
    expected = low(values(5, 64)).detach()
    seen = []
    monkeypatch.setattr(
        lowbit_kernels.quantize.quantize_rowcol,
        "quantize_rowcol",
        lambda *a, **options: seen.append(options) or quantize_rowcol(*a, **options),
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = values(5, 64)
            assert torch.equal(low(x), expected) and torch.equal(low(x), expected)
    assert not any(options["columns"] for options in seen)
    assert not low(values(5, 64)).isnan().any()


def test_experts_by_index():
    """A 3-D weight, one expert at a time; those that no token reached get gradients of zero."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(values(3, 24, 64, seed=1))

        def forward(self, x):
            return sum(F.linear(x, self.weight[i]) for i in range(2))

    model = Experts()
    low = copy.deepcopy(model)
    report = train.prepare_(
        low, SCHEMES["float8"], lambda module, name: isinstance(module, Experts)
    )
    assert report.converted == ["weight"]
    with scaled_products() as calls:
        found, expected = outcome(low, values(16, 64)), outcome(model, values(16, 64))
    assert calls["float8"] == 6
    for name, value in expected.items():
        assert snr(found[name], value) > 20, name
    assert not found["weight"][2].any()


@given(
    scheme=st.sampled_from(list(SCHEMES.values())),
    sizes=st.tuples(*[st.integers(1, 40)] * 3),
    batch=st.lists(st.integers(1, 3), max_size=2),
    magnitude=st.sampled_from([1e-20, 1.0, 1e15]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40)
def test_any_shape_has_the_error_of_its_rounded_operands(scheme, sizes, batch, magnitude, seed):
    """The error of each result is bounded by the rounding of its two operands, also where sums cancel."""
    m, n, k = sizes
    layer = linear(n, k, bias=False)
    x = values(*batch, m, k, seed=seed) * magnitude
    upstream = values(*batch, m, n, seed=seed + 1)
    found = outcome(prepared(layer, scheme), x, upstream)
    flat, weight, grad = (
        x.view(-1, k).double(),
        layer.weight.detach().double(),
        upstream.view(-1, n).double(),
    )
    step = {"int8": 1 / 254, "e4m3": 1 / 16, "e5m2": 1 / 8}
    noise = (1 + step[scheme.forward_format]) * (1 + step[scheme.backward_format]) - 1
    # of the largest, as far as one scale reaches
    largest = [t.abs().amax() for t in (flat, weight, grad)]
    for name, a, b, most in (
        ("output", flat, weight.t(), largest[0] * largest[1] * k),
        ("input", grad, weight, largest[2] * largest[1] * n),
        ("weight", grad.t(), flat, largest[2] * largest[0] * flat.shape[0]),
    ):
        error = (found[name].view(a.shape[0], -1).double() - a @ b).abs().max()
        assert error <= 2 * noise * most, name


@pytest.mark.parametrize("kind", [Int8MixedPrecision, Float8MixedPrecision])
def test_on_a_cpu_products_are_plain_unless_asked_for(kind):
    layer = linear(24, 64)
    low = copy.deepcopy(layer)
    low.weight = nn.Parameter(MixedPrecisionTensor(low.weight, kind()))
    with scaled_products() as calls:
        found, expected = outcome(low, values(16, 64)), outcome(layer, values(16, 64))
    assert not calls
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
