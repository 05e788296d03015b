"""A compiled prepared model equals the converted one, bit for bit, and computes gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import Scheme

SCHEMES = {
    "int4": lowbit.Int4WeightOnly(group_size=32, mapping="symmetric"),  # of which some values clip
    "int4-asymmetric": lowbit.Int4WeightOnly(group_size=32, mapping="asymmetric"),
    "int4-float-zero-point": lowbit.Int4WeightOnly(group_size=32, mapping="float_zero_point"),
    "int3-row": lowbit.IntxWeightOnly(3),
    "int8": lowbit.Int8WeightOnly(),
    "float8": lowbit.Float8WeightOnly(),
    "int8-int4": lowbit.Int8DynamicActivationInt4Weight(group_size=32, mapping="symmetric"),
    "int4-unclipped": lowbit.Int4WeightOnly(group_size=32),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _compiled(fn: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.gpu
def test_compiled_values_are_the_converted_ones_on_a_gpu(
    scheme: Scheme, dtype: torch.dtype
) -> None:
    """Every group's largest weight is a tie of the codes: one last bit in the scale would move it a step."""
    _check_values(scheme, dtype, "cuda", rows=512)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["int4", "int4-float-zero-point"])
def test_compiled_values_are_the_converted_ones(name: str, dtype: torch.dtype) -> None:
    _check_values(SCHEMES[name], dtype, "cpu", rows=64)


def _check_values(scheme: Scheme, dtype: torch.dtype, device: str, rows: int) -> None:
    weight = torch.randn(rows, 256, device=device, dtype=dtype)
    prepared = nn.Parameter(lowbit.FakeQuantizedTensor(weight, scheme))
    converted = lowbit.AffineTensor.from_float(weight, scheme).dequantize()
    with torch.no_grad():
        found = _compiled(lambda p: p.fake_quantized())(prepared)
    assert torch.equal(found, converted)
    assert torch.equal(prepared.dequantize(), converted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param("int4", marks=pytest.mark.exhaustive), "int8-int4"])
def test_compiled_gradients(name: str, device: str) -> None:
    scheme = SCHEMES[name]
    weight = torch.randn(48, 64, device=device)
    x = torch.randn(5, 64, device=device, requires_grad=True)
    prepared = nn.Parameter(lowbit.FakeQuantizedTensor(weight, scheme))

    def gradients(fn: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return torch.autograd.grad(fn(x, prepared).square().sum(), (x, prepared))

    grad_x, grad_w = gradients(_compiled(lambda x, w: F.linear(x, w)))
    expected_x, expected_w = gradients(F.linear)
    assert (expected_w == 0).any() and (expected_w != 0).any(), "some weights clip, most do not"
    torch.testing.assert_close(grad_x, expected_x, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad_w, expected_w, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_gradient_of_a_leaf(device: str) -> None:
    """torch 2.11 returned zeros for an autograd function that does the rounding itself."""
    spec = SCHEMES["int4"].weight
    x = torch.randn(8, 64, device=device, requires_grad=True)
    (found,) = torch.autograd.grad(_compiled(spec.fake_quantize)(x).sum(), x)
    (expected,) = torch.autograd.grad(spec.fake_quantize(x).sum(), x)
    assert torch.equal(found, expected) and found.any()
