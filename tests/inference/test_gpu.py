"""The flows on a GPU: same values as on the CPU, integer and float8 products where PyTorch has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.linear.coded_linear import product_of
from lowbit.linear.frozen import choose_linear
from lowbit.linear.frozen.dequantized import plain_linear
from tests.inference.test_report import BOTH, Model
from tests.schemes import (
    DYNAMIC,
    PER_TOKEN,
    SCHEMES,
    over,
    relative_error,
    rounded,
    rounded_activation,
)

pytestmark = pytest.mark.gpu
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
INT4 = lb.Int4WeightOnly(32)
INT8, FLOAT8 = DYNAMIC["int8xint8"], DYNAMIC["float8xfloat8"]
INT8_INT4 = lb.Int8DynamicActivationInt4Weight(64, "asymmetric")
FLOAT8_MXFP4 = lb.Float8DynamicActivationMXFP4Weight()
FLOAT8_NVFP4 = lb.Float8DynamicActivationNVFP4Weight()


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """No TF32 in the references."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.cover("pairs")
@over(SCHEMES)
@DTYPES
@pytest.mark.parametrize("k", [64, 67])
def test_against_float64(scheme: lb.Scheme, dtype: torch.dtype, k: int) -> None:
    linear = nn.Linear(k, 48, dtype=dtype)
    weight = rounded(linear.weight.detach(), scheme.weight)
    on_cpu = copy.deepcopy(linear)
    lb.quantize_(on_cpu, scheme, scales="minmax")
    model = linear.cuda()
    lb.quantize_(model, scheme, scales="minmax")
    for name, inner in on_cpu.weight.inner_tensors().items():
        assert torch.equal(getattr(model.weight, name).cpu(), inner), (
            f"{name} differs from the CPU's"
        )
    assert torch.equal(model.weight.dequantize().cpu(), on_cpu.weight.dequantize())
    for shape in [(3, k), (40, k), (k,), (2, 20, k), (0, k)]:
        x = torch.randn(shape, dtype=dtype)
        expected = F.linear(
            rounded_activation(x, scheme.activation), weight, on_cpu.bias.detach().double()
        )
        y = model(x.cuda())
        assert y.dtype is dtype and y.shape == expected.shape
        assert relative_error(y.cpu(), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("scheme", "tokens", "k", "n", "dtype", "chosen"),
    [
        (INT4, 1, 64, 48, torch.bfloat16, "weight_linear"),
        (INT4, 70, 67, 47, torch.float16, "weight_linear"),
        (INT4, 70, 64, 48, torch.float32, "plain_linear"),
        (lb.Int4WeightOnly(8), 3, 64, 48, torch.bfloat16, "matrix_linear"),
        (lb.IntxWeightOnly(3, 32), 3, 64, 48, torch.bfloat16, "matrix_linear"),
        (lb.IntxWeightOnly(2, 32, "half_integer"), 70, 67, 48, torch.float16, "matrix_linear"),
        (lb.Float8WeightOnly(), 3, 67, 48, torch.bfloat16, "matrix_linear"),
        (lb.Float8WeightOnly(lb.PerBlock(16, 32)), 3, 64, 48, torch.bfloat16, "matrix_linear"),
        (lb.NF4WeightOnly(16, True), 70, 67, 48, torch.bfloat16, "matrix_linear"),
        (lb.MXFP4WeightOnly(), 3, 64, 48, torch.float16, "matrix_linear"),
        (lb.MXFP8WeightOnly(), 3, 64, 48, torch.bfloat16, "matrix_linear"),
        (lb.MXFP8DynamicActivationMXFP8Weight(), 70, 67, 48, torch.bfloat16, "matrix_linear"),
        (lb.NVFP4WeightOnly(), 70, 64, 48, torch.bfloat16, "matrix_linear"),
        (lb.NVFP4WeightOnly(), 70, 64, 48, torch.float32, "plain_linear"),
        (lb.Int8WeightOnly(), 3, 64, 48, torch.bfloat16, "weight_linear"),
        (INT8, 17, 64, 48, torch.bfloat16, "dynamic_linear"),
        (INT8, 16, 64, 48, torch.bfloat16, "dynamic_linear"),
        (INT8, 64, 67, 48, torch.float16, "dynamic_linear"),
        (INT8, 64, 64, 47, torch.bfloat16, "dynamic_linear"),
        (INT8, 64, 128, 256, torch.float32, "int8_dynamic_linear"),
        (INT8, 16, 128, 256, torch.float32, "plain_linear"),
        (FLOAT8, 1, 64, 48, torch.bfloat16, "dynamic_linear"),
        (FLOAT8, 33, 128, 256, torch.bfloat16, "dynamic_linear"),
        (FLOAT8, 33, 64, 48, torch.float32, "plain_linear"),
        (FLOAT8, 33, 72, 47, torch.bfloat16, "dynamic_linear"),
        (FLOAT8_MXFP4, 3, 64, 48, torch.bfloat16, "e2m1_dynamic_linear"),
        (FLOAT8_MXFP4, 300, 1056, 47, torch.bfloat16, "e2m1_dynamic_linear"),
        (FLOAT8_MXFP4, 70, 64, 48, torch.float16, "e2m1_dynamic_linear"),
        (FLOAT8_NVFP4, 70, 64, 48, torch.bfloat16, "e2m1_dynamic_linear"),
        (FLOAT8_NVFP4, 3, 64, 48, torch.float16, "e2m1_dynamic_linear"),
        (INT8_INT4, 3, 64, 48, torch.bfloat16, "int4_dynamic_linear"),
        (INT8_INT4, 300, 256, 47, torch.float16, "int4_dynamic_linear"),
        (INT8_INT4, 3, 64, 48, torch.float32, "plain_linear"),
    ],
)
def test_the_product_that_runs(scheme, tokens, k, n, dtype, chosen) -> None:
    model = nn.Linear(k, n, dtype=dtype, device="cuda")
    lb.quantize_(model, scheme)
    x = torch.randn(tokens, k, dtype=dtype, device="cuda")
    row = choose_linear(x, model.weight, model.bias)
    assert row.name == chosen
    bound = 1e-5 if dtype is torch.float32 else 1e-2
    for bias in (model.bias, None):
        with torch.no_grad():
            y = row.implementation(x, model.weight, bias)
        assert relative_error(y, plain_linear(x, model.weight, bias)) < bound
        assert torch.equal(y, F.linear(x, model.weight, bias))


@pytest.mark.parametrize("tokens", [17, 300])
def test_integer_products_are_exact(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch._int_mm
    monkeypatch.setattr(
        torch, "_int_mm", lambda a, b: calls.append((a, b, real(a, b))) or calls[-1][2]
    )
    model = nn.Linear(4096, 64, device="cuda")
    lb.quantize_(model, INT8)
    model(torch.randn(tokens, 4096, device="cuda"))
    ((a, b, product),) = calls
    assert torch.equal(product.cpu().long(), a.cpu().long() @ b.cpu().long())


@over(PER_TOKEN)
@pytest.mark.parametrize("tokens", [4, 32])
def test_unusual_values(scheme: lb.Scheme, tokens: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Linear(64, 32, dtype=dtype, device="cuda")
        lb.quantize_(model, scheme)
        x = torch.randn(tokens, 64, dtype=dtype, device="cuda")
        clean = model(x)
        for bad in (float("nan"), float("inf"), float("-inf")):
            dirty = x.clone()
            dirty[2, 5] = bad
            y = model(dirty)
            others = [i for i in range(tokens) if i != 2]
            assert torch.equal(y[others], clean[others]) and y[2].isnan().all()
        x[1] = 0
        assert torch.equal(model(x)[1], model.bias)
        model.bias = None
        has_powers = scheme.activation.scale_format == "e8m0"  # other codes for another magnitude
        for magnitude in (1e-20, 1e10):
            error = relative_error(model(x * magnitude), model(x).double() * magnitude)
            assert error < (0.06 if has_powers else 0.02)


@pytest.mark.cover("values")
@over(SCHEMES)
@DTYPES
def test_gradients(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    model = nn.Linear(64, 48, dtype=dtype, device="cuda")
    lb.quantize_(model, scheme)
    x = torch.randn(2, 20, 64, dtype=dtype, device="cuda", requires_grad=True)
    upstream = torch.randn(2, 20, 48, dtype=dtype, device="cuda")
    model(x).backward(upstream)
    expected = upstream.double() @ model.weight.dequantize().double()
    assert relative_error(x.grad, expected) < TOLERANCE[dtype]
    assert relative_error(model.bias.grad, upstream.double().sum((0, 1))) < TOLERANCE[dtype]


@over({k: v for k, v in SCHEMES.items() if k != "int5-blocks"})
def test_embeddings(scheme: lb.Scheme) -> None:
    model = nn.Embedding(50, 37, device="cuda")
    qat.prepare_(model, scheme, lambda m, name: True)
    indices = torch.randint(50, (2, 7), device="cuda")
    y = model(indices)
    qat.convert_(model)
    assert torch.equal(model(indices), y)
    assert torch.equal(y, model.weight.dequantize()[indices])


@pytest.mark.cover("values")
@over(SCHEMES)
@DTYPES
def test_prepared_equals_converted(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    """Weights to the bit, and outputs: of products of codes those that the converted model gives, which runs the same
    kernel for more than 64 tokens; of others those of `plain_linear`."""
    model = nn.Sequential(nn.Linear(67, 48), nn.Linear(48, 16)).to("cuda", dtype)
    qat.prepare_(model, scheme)
    prepared = []
    for layer in model:
        x = torch.randn(80, layer.in_features, device="cuda", dtype=dtype)
        is_coded = product_of(x, layer.weight) is not None
        # cuBLAS may add larger products in an order that depends on the strides of a padded weight.
        x = x if is_coded else x[:9]
        prepared.append((x, layer.weight.fake_quantized(), layer(x), is_coded))
    qat.convert_(model)
    for layer, (x, values, y, is_coded) in zip(model, prepared, strict=True):
        assert torch.equal(layer.weight.dequantize(), values)
        chosen = choose_linear(x, layer.weight, layer.bias).name
        assert is_coded == (chosen in ("dynamic_linear", "int8_dynamic_linear"))
        plain = plain_linear(x, layer.weight, layer.bias)
        if is_coded:
            assert torch.equal(layer(x), y)
            assert relative_error(y, plain) < TOLERANCE[dtype]
        else:
            assert torch.equal(plain, y)


@pytest.mark.parametrize("name", ["int4-g8", "int8xint4", "float8"])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_qat_trains(name: str, options: dict[str, bool]) -> None:
    model = Model(tied=True).cuda()
    qat.prepare_(model, SCHEMES[name], lambda m, n: isinstance(m, BOTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for i in range(60):
        tokens = torch.randint(20, (64,), generator=torch.Generator().manual_seed(i)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens).float(), (tokens * 7 + 3) % 20)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert model.head.weight is model.embedding.weight
    qat.convert_(model)
    assert model(tokens).isfinite().all()


@over({"int4-g8": SCHEMES["int4-g8"], "int8xint8": INT8, "float8": SCHEMES["float8"]})
def test_moving_a_model(scheme: lb.Scheme) -> None:
    model = Model(tied=True)
    lb.quantize_(model, scheme)
    tokens = torch.randint(20, (4, 9))
    y = model(tokens)
    model.cuda()
    assert model.head.weight.is_cuda and model.head.weight is model.embedding.weight
    assert relative_error(model(tokens.cuda()).cpu(), y) < 0.02
    model.cpu()
    assert torch.equal(model(tokens), y)
