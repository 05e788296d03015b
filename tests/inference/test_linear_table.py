"""The public list of linears: order, conditions, and gradients that do not depend on the implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.linear.frozen import choose_linear
from lowbit.linear.frozen.dequantized import plain_linear

INT4 = lb.Int4WeightOnly(8)


class Recorder:
    """An implementation that counts its calls and adds `offset` to the plain result."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return plain_linear(x, weight, bias) + self.offset

    __name__ = "recorder"


@pytest.fixture
def registered() -> Iterator[list[Any]]:
    """The test appends implementations that it registers; they are unregistered afterwards."""
    found: list[Any] = []
    yield found
    for impl in found:
        lb.unregister_linear(impl)


def quantized(scheme: lb.Scheme = INT4, dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = nn.Linear(16, 8, dtype=dtype)
    lb.quantize_(linear, scheme)
    return linear


def test_the_last_registered_comes_first(registered) -> None:
    first, second = Recorder(1.0), Recorder(2.0)
    model, x = quantized(), torch.randn(3, 16)
    y = model(x)
    lb.register_linear(lambda x, w, b: True, first)
    lb.register_linear(lambda x, w, b: True, second)
    registered += [first, second]
    assert torch.equal(model(x), y + 2) and not first.shapes
    lb.unregister_linear(registered.pop())
    assert torch.equal(model(x), y + 1)
    lb.unregister_linear(registered.pop())
    assert torch.equal(model(x), y)


def test_a_condition_sees_activation_weight_and_bias(registered) -> None:
    seen, impl = [], Recorder()

    def condition(x: Tensor, weight: lb.LowbitTensor, bias: Tensor | None) -> bool:
        seen.append((tuple(x.shape), x.dtype, weight, bias))
        return weight.spec.format == lb.Int(4) and x.shape[0] > 2

    lb.register_linear(condition, impl)
    registered.append(impl)
    model = quantized()
    model(torch.randn(2, 16))
    assert not impl.shapes
    model(torch.randn(3, 5, 16))
    assert impl.shapes == [(3, 5, 16)]
    quantized(lb.Int8WeightOnly())(torch.randn(4, 16))
    assert len(impl.shapes) == 1
    assert seen[0][:2] == ((2, 16), torch.float32)
    assert seen[0][2].spec == INT4.weight and torch.equal(seen[0][3], model.bias)


def test_as_a_decorator() -> None:
    @lb.register_linear(lambda x, w, b: b is None)
    def only_without_bias(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return x.new_full((*x.shape[:-1], weight.shape[0]), 7.0)

    try:
        weight = quantized().weight
        x = torch.randn(2, 16)
        assert torch.equal(F.linear(x, weight), torch.full((2, 8), 7.0))
        assert not torch.equal(F.linear(x, weight, torch.zeros(8)), torch.full((2, 8), 7.0))
    finally:
        lb.unregister_linear(only_without_bias)


def test_unregistering_an_unknown_implementation(registered) -> None:
    registered.append(Recorder())
    lb.register_linear(lambda x, w, b: True, registered[0])
    with pytest.raises(ValueError, match=r"is not registered; registered: \['recorder'\]"):
        lb.unregister_linear(Recorder())
    with pytest.raises(ValueError, match=r"plain_linear.* is not registered"):
        lb.unregister_linear(plain_linear)


def test_unregistering_takes_every_registration() -> None:
    impl = Recorder()
    lb.register_linear(lambda x, w, b: True, impl)
    lb.register_linear(lambda x, w, b: True, impl)
    lb.unregister_linear(impl)
    quantized()(torch.randn(1, 16))
    assert not impl.shapes


def test_the_implementation_on_cpu() -> None:
    x = torch.randn(3, 16)
    chosen = {
        name: choose_linear(x, quantized(scheme).weight).name
        for name, scheme in {
            "int4": INT4,
            "int8": lb.Int8WeightOnly(),
            "int8xint8": lb.Int8DynamicActivationInt8Weight(),
            "int8xint4": lb.Int8DynamicActivationInt4Weight(8),
            "float8xfloat8": lb.Float8DynamicActivationFloat8Weight(),
        }.items()
    }
    assert chosen.pop("int8xint8") == "int8_dynamic_linear"
    assert set(chosen.values()) == {"cpu_linear"}


def test_gradients_do_not_depend_on_the_implementation(registered) -> None:
    def detached(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Like a kernel, it gives autograd nothing to follow."""
        with torch.no_grad():
            return plain_linear(x, weight, bias).detach()

    model = quantized()
    grads = []
    for _ in range(2):
        model.bias.grad = None
        x = torch.linspace(-1, 1, 48).view(3, 16).requires_grad_()
        model(x).square().sum().backward()
        grads.append((x.grad, model.bias.grad))
        lb.register_linear(lambda x, w, b: True, detached)
        registered.append(detached)
    registered.pop()
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_modules_and_functions_run_the_same_implementation(registered) -> None:
    impl = Recorder()
    lb.register_linear(lambda x, w, b: True, impl)
    registered.append(impl)
    model, x = quantized(), torch.randn(3, 16)
    results = [
        model(x),
        F.linear(x, model.weight, model.bias),
        F.linear(input=x, weight=model.weight, bias=model.bias),
        torch.nn.functional.linear(x, model.weight) + model.bias,
    ]
    assert len(impl.shapes) == 4
    for y in results[1:]:
        assert torch.allclose(y, results[0])


def test_a_quantized_weight_as_an_input_and_as_an_end_of_lerp() -> None:
    weight, plain = quantized().weight, torch.randn(8, 16)
    values = weight.dequantize()
    assert torch.allclose(F.linear(weight, plain), F.linear(values, plain), atol=1e-6)
    assert torch.equal(plain.clone().lerp_(weight, 0.25), plain.lerp(values, 0.25))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda m: m(torch.randn(3, 15)), ValueError, r"\(3, 15\).*\(8, 16\): K differs"),
        (lambda m: m(torch.randn(3, 16).bfloat16()), ValueError, r"bfloat16.*float32.*autocast"),
        (lambda m: m(torch.randn(3, 16).double()), ValueError, r"float64 input.*float32"),
        (lambda m: m(torch.ones(3, 16, dtype=torch.int64)), ValueError, r"int64 input"),
        (lambda m: F.linear(m.weight, m.weight), (NotImplementedError, ValueError), r"AffineTen"),
        (lambda m: m.weight.relu(), NotImplementedError, r"AffineTensor.*relu.*dequantize"),
        (lambda m: m.weight.exp(), NotImplementedError, r"AffineTensor.*exp.*dequantize"),
    ],
    ids=["K", "bfloat16", "float64", "integers", "twice", "relu", "exp"],
)
def test_operations_that_a_quantized_weight_refuses(call, error, match) -> None:
    with pytest.raises(error, match=match):
        call(quantized())
