"""int4 and int8 linears: which products reach the kernels, with which arguments; float32 gives the bits of QAT."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.inference import grouped_linear, linear
from lowbit.linear.frozen import choose_linear
from lowbit.linear.frozen.dequantized import plain_linear
from tests.inference.weight_ops import CountedOps, counted
from tests.schemes import over, relative_error, rounded

SERVED = {
    "int4-g32": lb.Int4WeightOnly(32),
    "int4-g96-asymmetric": lb.Int4WeightOnly(96, "asymmetric"),
    "int4-row": lb.IntxWeightOnly(4),
    "int8": lb.Int8WeightOnly(),
    "int8-g64": lb.Int8WeightOnly(64),
    "int8-asymmetric": lb.IntxWeightOnly(8, 32, "asymmetric"),
}
NOT_SERVED = {
    "int4-g8": lb.Int4WeightOnly(8),
    "int3-g32": lb.IntxWeightOnly(3, 32),
    "float-zero": lb.Int4WeightOnly(32, "float_zero_point"),
    "half-integer": lb.Int4WeightOnly(32, "half_integer"),
    "uint4": lb.Scheme(lb.Spec(lb.Int(4, signed=False), lb.PerGroup(32))),
    "int4-tensor": lb.Scheme(lb.Spec(lb.Int(4), lb.PerTensor())),
    "int8-block": lb.Scheme(lb.Spec(lb.Int(8), lb.PerBlock(4, 32))),
    "float8": lb.Float8WeightOnly(),
}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> CountedOps:
    return counted(monkeypatch)


def layer(scheme: lb.Scheme, dtype: torch.dtype, k: int = 100, n: int = 24) -> nn.Linear:
    model = nn.Linear(k, n, dtype=dtype)
    lb.quantize_(model, scheme)
    return model


@over(SERVED)
@HALVES
@pytest.mark.parametrize("shape", [(100,), (5, 100), (2, 3, 100), (0, 100)], ids=str)
def test_the_kernel_serves(ops: CountedOps, scheme: lb.Scheme, dtype, shape) -> None:
    original = nn.Linear(100, 24, dtype=dtype)
    weight = rounded(original.weight.detach(), scheme.weight)
    lb.quantize_(original, scheme)
    x = torch.randn(shape, dtype=dtype)
    y = original(x)
    group = scheme.weight.block_size((24, 100))[-1]
    tokens = x.shape[:-1].numel()
    ((name, *rest),) = ops.calls
    assert name == f"int{scheme.weight.format.bits}"
    assert rest == [tokens, 24, 100, group, "bias"]
    expected = F.linear(x.double(), weight.double(), original.bias.detach().double())
    assert y.dtype is dtype and y.shape == (*shape[:-1], 24)
    assert relative_error(y, expected) < 2e-3


@over(NOT_SERVED)
def test_others_take_another_row(ops: CountedOps, scheme: lb.Scheme) -> None:
    model, x = layer(scheme, torch.bfloat16), torch.randn(3, 100, dtype=torch.bfloat16)
    assert choose_linear(x, model.weight).name == "cpu_half_linear"
    model(x)
    assert not ops.calls


@over(SERVED)
def test_float32_equals_the_prepared_model_to_the_bit(ops: CountedOps, scheme: lb.Scheme) -> None:
    model = nn.Sequential(nn.Linear(100, 64), nn.GELU(), nn.Linear(64, 7))
    qat.prepare_(model, scheme)
    x = torch.randn(5, 100)
    y = model(x)
    qat.convert_(model)
    assert torch.equal(model(x), y) and not ops.calls


@over(SERVED)
def test_weights_in_16_bits_are_equal_and_products_close(
    ops: CountedOps, scheme: lb.Scheme
) -> None:
    model = nn.Linear(100, 64, dtype=torch.bfloat16)
    qat.prepare_(model, scheme)
    x, before = torch.randn(5, 100, dtype=torch.bfloat16), model.weight.dequantize()
    y = model(x)
    qat.convert_(model)
    assert torch.equal(model.weight.dequantize(), before)
    assert relative_error(model(x), y.double()) < 8e-3 and len(ops.calls) == 1


def test_the_activation_is_rounded_before_the_kernel(ops: CountedOps) -> None:
    scheme = lb.Int8DynamicActivationInt4Weight(32)
    model, x = layer(scheme, torch.bfloat16), torch.randn(5, 100, dtype=torch.bfloat16)
    y, expected = model(x), plain_linear(x, model.weight, model.bias)
    assert len(ops.calls) == 1 and relative_error(y, expected.double()) < 5e-3


def test_autocast_and_gradients(ops: CountedOps) -> None:
    model, x = layer(SERVED["int4-g32"], torch.float32), torch.randn(5, 100, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16 and len(ops.calls) == 1
    y.float().sum().backward()
    expected = torch.ones(5, 24).double() @ model.weight.dequantize().double()
    assert relative_error(x.grad, expected) < 5e-3
    assert torch.equal(model.bias.grad, torch.full((24,), 5.0))
    assert len(ops.calls) == 1, "the gradient is one product with the dequantized weight"


@pytest.mark.parametrize("size", [3, 20])
def test_compiled(ops: CountedOps, size: int) -> None:
    torch._dynamo.reset()
    model = layer(SERVED["int4-g32"], torch.bfloat16, k=64)
    fn = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(size, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(fn(x), model(x))
    assert {call[0] for call in ops.calls} == {"int4"}
    torch._dynamo.reset()


# ---- linear ------------------------------------------------------------------------------------------------


@over(SERVED)
def test_the_residual_goes_into_the_kernel(ops: CountedOps, scheme: lb.Scheme) -> None:
    model, x = layer(scheme, torch.bfloat16), torch.randn(5, 100, dtype=torch.bfloat16)
    residual = torch.randn(5, 24, dtype=torch.bfloat16)
    with torch.no_grad():
        y = linear(x, model.weight, model.bias, residual)
        expected = x.double() @ model.weight.float().dequantize().double().t()
    expected = expected + model.bias.double() + residual.double()
    assert ops.calls[0][-1] == "bias+residual"
    assert relative_error(y, expected.detach()) < 2**-8  # one rounding to bfloat16


@pytest.mark.parametrize("quantized", [True, False], ids=["int4", "plain"])
def test_a_residual_without_a_kernel(quantized: bool) -> None:
    model, x = nn.Linear(100, 24), torch.randn(2, 5, 100)
    if quantized:
        lb.quantize_(model, SERVED["int4-g32"])
    residual = torch.randn(2, 5, 24, requires_grad=True)
    y = linear(x, model.weight, model.bias, residual)
    assert torch.equal(y, model(x) + residual)
    y.sum().backward()
    assert torch.equal(residual.grad, torch.ones(2, 5, 24))
    assert torch.equal(linear(x, model.weight), F.linear(x, model.weight))


def test_gradients_of_a_residual_do_not_need_the_kernel_to_have_one(ops: CountedOps) -> None:
    model, x = layer(SERVED["int8"], torch.bfloat16), torch.randn(5, 100, dtype=torch.bfloat16)
    residual = torch.randn(5, 24, dtype=torch.bfloat16, requires_grad=True)
    linear(x, model.weight, None, residual).sum().backward()
    assert torch.equal(residual.grad, torch.ones(5, 24, dtype=torch.bfloat16))
    assert ops.calls[0][-1] == ""


@pytest.mark.parametrize("quantized", [True, False], ids=["quantized", "plain"])
def test_a_residual_that_does_not_fit(quantized: bool) -> None:
    model, x = nn.Linear(100, 24), torch.randn(5, 100)
    if quantized:
        lb.quantize_(model, SERVED["int8"])
    with pytest.raises(ValueError, match=r"residual of shape \(5, 24\), got \(24,\)"):
        linear(x, model.weight, None, torch.zeros(24))
    with pytest.raises(ValueError, match=r"residual on meta with a weight on cpu; accepted"):
        linear(x, model.weight, None, torch.zeros(5, 24, device="meta"))


@pytest.mark.parametrize(
    "scheme", [lb.Int4WeightOnly(), lb.Int8DynamicActivationInt8Weight()], ids=["int4", "dynamic"]
)
def test_a_bias_that_does_not_fit(scheme: lb.Scheme) -> None:
    model = nn.Linear(64, 24)
    lb.quantize_(model, scheme)
    x = torch.randn(5, 64)
    for shape in ((23,), (1, 24), ()):
        with pytest.raises(ValueError, match=r"bias of shape \(24,\), got"):
            linear(x, model.weight, torch.zeros(shape))
    with pytest.raises(ValueError, match=r"bias on meta with a weight on cpu; accepted"):
        linear(x, model.weight, torch.zeros(24, device="meta"))


# ---- experts -----------------------------------------------------------------------------------------------


def experts(scheme: lb.Scheme | None, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.randn(4, 24, 100, dtype=dtype)
    return weight if scheme is None else lb.AffineTensor.from_float(weight, scheme)


@pytest.mark.parametrize("ends", [[3, 3, 9, 12], [0, 0, 0, 0], [0, 5, 5, 9]], ids=str)
@pytest.mark.parametrize("scheme", [None, *SERVED.values()], ids=["plain", *SERVED])
def test_rows_by_their_experts(scheme: lb.Scheme | None, ends: list[int]) -> None:
    weight, x = experts(scheme), torch.randn(12, 100, requires_grad=True)
    y = grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
    plain = weight if scheme is None else weight.dequantize()
    expected, x_grad = torch.zeros(12, 24).double(), torch.zeros(12, 100).double()
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        expected[start:end] = x.detach()[start:end].double() @ plain[e].double().t()
        x_grad[start:end] = plain[e].double().sum(0)
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=1e-5)
    assert not y[ends[-1] :].any()
    y.sum().backward()
    assert torch.allclose(x.grad.double(), x_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("write", ["copy_", "load", "detach", "slice", "data", "codes"])
def test_products_see_values_written_into_a_weight(write: str) -> None:
    """No kernel keeps a packed copy of the weight that could be stale."""
    model, other = (layer(lb.Int4WeightOnly(32), torch.bfloat16, 64, 32) for _ in range(2))
    x, weight, new = torch.randn(2, 64).bfloat16(), model.weight, other.weight
    with torch.no_grad():
        before = model(x), F.linear(x, weight[:16])
        if write == "load":
            model.load_state_dict({**other.state_dict(), "bias": model.bias})
        elif write == "slice":
            weight[:16].copy_(new[:16])
            weight[16:].copy_(new[16:])
        elif write == "codes":
            weight.codes.copy_(new.codes)
            weight.scale.copy_(new.scale)
        else:
            {"copy_": weight, "detach": weight.detach(), "data": weight.data}[write].copy_(new)
        assert relative_error(model(x), F.linear(x, weight.dequantize(), model.bias)) < 4e-3
        if write != "codes":
            assert relative_error(F.linear(x, weight[:16]), x @ new.dequantize()[:16].T) < 4e-3
    assert relative_error(before[0], model(x)) > 0.1


def test_experts_in_16_bits_reach_the_kernels(ops: CountedOps) -> None:
    weight, x = experts(SERVED["int4-g32"], torch.bfloat16), torch.randn(12, 100).bfloat16()
    grouped_linear(x, weight, torch.tensor([3, 3, 9, 12], dtype=torch.int32))
    assert [call[1] for call in ops.calls] == [3, 0, 6, 3]


@pytest.mark.parametrize(
    ("x", "offsets", "match"),
    [
        (torch.zeros(12, 99), [3, 3, 9, 12], r"\(12, 99\) and \(4, 24, 100\)"),
        (torch.zeros(12, 100), [3, 9, 12], r"int32 \[4\], got torch.int32 \(3,\)"),
        (torch.zeros(12, 100), [3, 2, 9, 12], r"\[3, 2, 9, 12\] must rise"),
        (torch.zeros(12, 100), [3, 3, 9, 13], r"within the 12 rows"),
        (torch.zeros(12, 100).bfloat16(), [3, 3, 9, 12], r"bfloat16.*float32"),
    ],
    ids=["K", "count", "falling", "past the end", "dtype"],
)
def test_groups_that_do_not_fit(x: Tensor, offsets: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        grouped_linear(x, experts(None), torch.tensor(offsets, dtype=torch.int32))
