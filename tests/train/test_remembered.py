"""A trained weight remembers what its products need: which calls it holds for, and how little Python a call runs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import train
from lowbit.schemes.low_bit_weights import LowbitWeight
from lowbit.train import Float8MixedPrecision, Int4Weight, Int8MixedPrecision, Int8Weight

SCHEMES = {
    "int8": Int8MixedPrecision(always=True),
    "float8": Float8MixedPrecision(always=True),
    "int8 weight": Int8Weight(),
    "int8 weight, int8 products": Int8Weight(True, True, True, always=True),
    "int4 weight": Int4Weight(),
}
LIBRARY = str(Path(lowbit.__file__).parent)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))


def prepared(scheme: Any, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24, bias, dtype=dtype))
    train.prepare_(model, scheme)
    return model


def outcome(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """The output, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    y = layer(x)
    own = tuple(p for p in layer.parameters() if p.requires_grad)
    found = torch.autograd.grad(y, (x, *own), torch.ones_like(y))
    return y.detach(), *found


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@every_scheme
def test_calls_that_differ_find_their_own(scheme):
    """Each call of one layer gives what the first call of a new layer gives."""
    x = torch.randn(3, 5, 40)
    flat = x.flatten(0, 1)
    layer = prepared(scheme)
    for case in (x, x, flat, x[:, :2], x[0, 0], x.transpose(0, 1), flat[:0], flat):
        assert same(outcome(layer, case), outcome(prepared(scheme), case))
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert same(outcome(layer, case), outcome(prepared(scheme), case))
    layer[0].weight.requires_grad_(False)
    expected = outcome(prepared(scheme), flat)
    assert same(outcome(layer, flat), (*expected[:2], expected[-1]))
    layer.to(torch.bfloat16)
    half = flat.bfloat16()
    assert same(outcome(layer, half)[:2], outcome(prepared(scheme).to(torch.bfloat16), half)[:2])


@every_scheme
def test_other_values_of_a_weight_are_seen(scheme):
    x = torch.randn(5, 40)
    layer, other = prepared(scheme), prepared(scheme)
    before = outcome(layer, x)
    with torch.no_grad():
        other[0].weight.mul_(3)
    expected = outcome(other, x)
    assert not torch.equal(before[0], expected[0])
    for change in ("in place", "data", "load", "copy"):
        own = prepared(scheme)
        outcome(own, x)
        with torch.no_grad():
            if change == "in place":
                own[0].weight.mul_(3)
            elif change == "data":
                own[0].weight.data = other[0].weight.data
            elif change == "load":
                own.load_state_dict(other.state_dict())
            else:
                own = copy.deepcopy(own)
                own[0].weight.mul_(3)
        assert same(outcome(own, x), expected), change


@every_scheme
def test_refusals_after_a_call_that_was_right(scheme):
    x = torch.randn(5, 40)
    layer = prepared(scheme)
    outcome(layer, x)
    with pytest.raises(ValueError, match="K differs"):
        layer(x[:, :39])
    with pytest.raises(ValueError, match=r"a torch\.float64 input with a weight"):
        layer(x.double())
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        x = x.requires_grad_()
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()), create_graph=True)
    layer[0].bias = nn.Parameter(layer[0].bias.double())
    with pytest.raises(ValueError, match=r"with a bias of dtype torch\.float64"):
        layer(x)


@every_scheme
@pytest.mark.parametrize("change", ["an operation", "a kernel"])
def test_an_update_between_the_passes_is_refused(scheme, change):
    layer = prepared(scheme)
    weight = layer[0].weight
    for _ in range(2):
        y = layer(torch.randn(5, 40, requires_grad=True))
        y.sum().backward()
    y = layer(torch.randn(5, 40, requires_grad=True))
    with torch.no_grad():
        if change == "an operation" or weight.updated_in_place() is not None:
            weight.mul_(0.5)
        else:
            weight.was_updated()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_scheme
def test_a_first_call_in_inference_mode(scheme):
    """As a trainer evaluates a model before the first step: what it leaves behind serves the steps too."""
    x = torch.randn(5, 40)
    layer = prepared(scheme)
    with torch.inference_mode():
        y = layer(x)
    found = outcome(layer, x)
    assert torch.equal(found[0], y) and same(found, outcome(prepared(scheme), x))


@every_scheme
def test_a_trace_sees_each_call(scheme):
    model = prepared(scheme)
    x = torch.randn(5, 40, requires_grad=True)
    for _ in range(2):
        found = lowbit.trace(model, x)
        assert {p.product for p in found.products} == {"output", "grad_input", "grad_weight"}
        outcome(model, x)


@every_scheme
def test_results_in_place(scheme):
    """The output of an input of three dimensions is not a view, which could not be written to."""
    layer = prepared(scheme)
    x = torch.randn(2, 3, 40)
    y = layer(x.requires_grad_())
    assert torch.equal(y.detach().relu(), y.relu_())
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def python_calls(run: Callable[[], Any]) -> int:
    """How many functions of the library's Python `run` calls."""
    count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@every_scheme
def test_an_eager_step_runs_little_python(scheme, monkeypatch):
    """Only the library's own calls count, without those of its ops and of a CPU that reads codes."""
    layer = prepared(scheme, torch.bfloat16)
    if isinstance(scheme, LowbitWeight):
        values = layer[0].weight.dequantize()
        monkeypatch.setattr(type(layer[0].weight), "dequantize", lambda self: values)
    x = torch.randn(2, 3, 40, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert python_calls(lambda: layer(x).sum().backward()) <= 30
