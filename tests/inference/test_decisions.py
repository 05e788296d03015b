"""A weight caches the implementation of its products, by every property that decides it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
import lowbit_kernels as kernels
from lowbit.inference import linear
from lowbit.linear.frozen import (
    BUILT_IN,
    Row,
    built_in,
    registered,
)
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit.tracing.watched import watched
from tests.schemes import relative_error

CASES = {
    "weight_linear": (lb.Int4WeightOnly(32), torch.bfloat16),
    "int8_dynamic_linear": (lb.Int8DynamicActivationInt8Weight(), torch.bfloat16),
    "cpu_linear": (lb.Int4WeightOnly(32), torch.float32),
    "cpu_half_linear": (lb.Int4WeightOnly(8), torch.bfloat16),
}
"""By the name of the row that serves it on a CPU: a scheme and the dtype of weight and activation."""

every_row = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the built-in rows that were chosen, one for each time that a decision was made."""
    names: list[str] = []
    built_in_row = built_in.built_in_row

    def choose(x: Tensor, weight: lb.LowbitTensor, bias: Tensor | None) -> Row:
        row = built_in_row(x, weight, bias)
        names.append(row.name)
        return row

    monkeypatch.setattr(built_in, "built_in_row", choose)
    return names


def layer(name: str, k: int = 64, n: int = 48) -> tuple[nn.Linear, Tensor]:
    """A quantized layer that the row `name` serves, and an input for it."""
    scheme, dtype = CASES[name]
    model = nn.Linear(k, n, dtype=dtype)
    lb.quantize_(model, scheme)
    return model, torch.randn(3, k, dtype=dtype)


@pytest.fixture
def more() -> Iterator[Callable[[Tensor, lb.LowbitTensor, Tensor | None], Tensor]]:
    """A registered implementation that adds 1 to the plain product."""

    def more(x: Tensor, weight: lb.LowbitTensor, bias: Tensor | None) -> Tensor:
        return plain_linear(x, weight, bias) + 1

    lb.register_linear(lambda x, weight, bias: True, more)
    yield more
    if any(row.implementation is more for row in registered.rows):
        lb.unregister_linear(more)


def test_the_list_is_complete() -> None:
    names = [row.name for row in BUILT_IN]
    assert [row.implementation.__name__ for row in BUILT_IN] == names
    assert names[-1] == "plain_linear" and set(CASES) <= set(names)


@every_row
@torch.no_grad()
def test_equal_products_are_decided_once(name: str, asked: list[str]) -> None:
    model, x = layer(name)
    first = model(x)
    for _ in range(3):
        assert torch.equal(model(x), first)
    model(torch.randn_like(x))
    assert asked == [name]


@every_row
@torch.no_grad()
def test_alternating_shapes_are_decided_once_each(name: str, asked: list[str]) -> None:
    model, x = layer(name)
    inputs = (x, x[:1], x[None], x[:2])
    for _ in range(3):
        for each in inputs:
            model(each)
    assert asked == [name] * 4
    for rows in range(20):
        model(x.new_zeros(rows + 4, 64))
    assert len(model.weight._known_products) == 4


def test_what_a_call_costs_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known product asks its weight through one `__torch_function__`, and calls one op."""
    model, x = layer("weight_linear")
    result = F.linear(x, model.weight)
    given: list[Any] = []
    op = lambda *tensors, **options: given.append(tensors) or result  # noqa: E731
    monkeypatch.setattr(kernels.weight_linear, "weight_linear", op)
    called: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        y = F.linear(x, model.weight)
    finally:
        sys.setprofile(None)
    assert y is result and len(given) == 1
    assert called.count("__torch_function__") == 1 and len(called) <= 15, called


@every_row
@torch.no_grad()
def test_every_deciding_property_is_compared(name: str, asked: list[str]) -> None:
    model, x = layer(name)
    residual = torch.zeros(3, 48, dtype=x.dtype)
    calls = [
        lambda: model(x),
        lambda: model(x[:2]),
        lambda: model(x[None]),
        lambda: F.linear(x, model.weight),
        lambda: linear(x, model.weight, residual=residual),
        lambda: linear(x, model.weight, model.bias, residual),
        lambda: linear(x, model.weight, residual=residual.double()),
    ]
    for count, call in enumerate(calls, 1):
        first = call()
        assert torch.equal(call(), first)
        assert len(asked) == count


@every_row
@torch.no_grad()
def test_other_arguments_are_still_refused(name: str) -> None:
    model, x = layer(name)
    weight, residual = model.weight, torch.zeros(3, 48, dtype=x.dtype)
    linear(x, weight, model.bias, residual)
    linear(x, weight, model.bias, residual)
    for match, call in {
        "K differs": lambda: linear(x[:, :63], weight, model.bias, residual),
        "float64 input": lambda: linear(x.double(), weight, model.bias, residual),
        r"bias of shape \(48,\), got": lambda: linear(x, weight, torch.zeros(47), residual),
        "float64: convert it": lambda: linear(x, weight, model.bias.double(), residual),
        r"residual of shape \(3, 48\), got": lambda: linear(x, weight, model.bias, residual[:2]),
        "residual on meta": lambda: linear(x, weight, model.bias, residual.to("meta")),
        "input on meta": lambda: linear(x.to("meta"), weight, model.bias, residual),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.vmap(model)(x[None])


@every_row
@torch.no_grad()
def test_registrations(name: str, more: Callable[..., Tensor]) -> None:
    lb.unregister_linear(more)
    model, x = layer(name)
    y = model(x)
    assert torch.equal(model(x), y)
    lb.register_linear(lambda x, weight, bias: True, more)
    assert torch.equal(model(x), plain_linear(x, model.weight, model.bias) + 1)
    assert torch.equal(model(x), plain_linear(x, model.weight, model.bias) + 1)
    lb.unregister_linear(more)
    assert torch.equal(model(x), y)


@every_row
@torch.no_grad()
def test_a_registered_condition_is_asked_for_every_product(name: str) -> None:
    """It may read what the cache of built-in decisions does not compare."""
    model, x = layer(name)
    y, wide = model(x), torch.empty(3, 128, dtype=x.dtype)[:, ::2].copy_(x)
    for condition, holds, fails in (
        (lambda x, w, b: torch.is_grad_enabled(), torch.enable_grad, torch.no_grad),
        (lambda x, w, b: x.is_contiguous(), nullcontext, nullcontext),
    ):
        impl = lb.register_linear(condition)(lambda x, w, b: plain_linear(x, w, b) + 1)
        try:
            for _ in range(2):
                with fails():
                    assert torch.equal(model(wide), y)
                with holds():
                    assert torch.equal(model(x), plain_linear(x, model.weight, model.bias) + 1)
        finally:
            lb.unregister_linear(impl)


def test_graphs_on_disk_depend_on_the_registrations(tmp_path: Path) -> None:
    """torch takes a graph of an earlier process by this key."""
    weight, file = layer("weight_linear")[0].weight, tmp_path / "mine.py"

    def registered(text: str) -> str:
        file.write_text(text)
        names: dict[str, Any] = {"__name__": "mine"}
        exec(compile(text, str(file), "exec"), names)
        lb.register_linear(names["condition"], names["impl"])
        try:
            return weight._stable_hash_for_caching()
        finally:
            lb.unregister_linear(names["impl"])

    plain = weight._stable_hash_for_caching()
    text = "condition = lambda x, w, b: True\ndef impl(x, w, b):\n    return x\n"
    assert registered(text) == registered(text) != plain
    assert registered(text.replace("return x", "return -x")) != registered(text)
    assert registered(f"{text}condition = lambda x, w, b: True") != registered(f"{text}impl = impl")
    state = f"{text}def outer(y):\n    return lambda x, w, b: y\nimpl = outer(1)\n"
    assert registered(state) != registered(state), "the value in the closure is not in the file"
    assert weight._stable_hash_for_caching() == plain


@every_row
def test_gradients_autocast_and_tracers_come_and_go(name: str) -> None:
    model, x = layer(name)
    with torch.no_grad():
        y = model(x)
        assert torch.equal(model(x), y)
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        leaf.grad = None
        found = model(leaf)
        assert found.requires_grad and torch.allclose(found, y, rtol=1e-5, atol=1e-6)
        found.sum().backward()
        values = model.weight.dequantize().double().sum(0)
        assert relative_error(leaf.grad, values.expand(3, 64)) < 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            assert model(x).dtype is torch.bfloat16
    with torch.no_grad():
        assert torch.equal(model(x), y)
    with watched(model) as watch:
        model(x)
        model(leaf).sum().backward()
    model(x)
    assert [note.ran["output"].implementation for note in watch.notes] == [name] * 2


@pytest.mark.parametrize("mapping", ["symmetric", "symmetric_no_clipping_err"])
@torch.no_grad()
def test_metadata_that_changes_in_place(mapping: str) -> None:
    """Copying a weight of the other symmetric mapping changes the spec; so may the user."""
    model, x = layer("weight_linear")
    other = nn.Linear(64, 48, dtype=torch.bfloat16)
    lb.quantize_(other, lb.Int4WeightOnly(32, mapping))
    model(x)
    model.weight.copy_(other.weight)
    expected = F.linear(x.double(), other.weight.dequantize().double(), model.bias.double())
    assert relative_error(model(x), expected) < 4e-3
    rounded = lb.Int8DynamicActivationInt8Weight().activation
    model.weight.activation = rounded
    seen = F.linear(rounded.fake_quantize(x).double(), other.weight.dequantize().double())
    assert relative_error(F.linear(x, model.weight), seen) < 4e-3


@every_row
@torch.no_grad()
def test_weights_that_move_are_copied_or_viewed(name: str, asked: list[str]) -> None:
    model, x = layer(name)
    y = model(x)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), y) and asked == [name]
    assert torch.equal(F.linear(x, model.weight[:32], model.bias[:32]), y[:, :32])
    copied.to(torch.float64)
    assert copied(x.double()).dtype is torch.float64
    copied.to("meta")
    assert copied(x.double().to("meta")).is_meta
    with pytest.raises(ValueError, match="input on cpu with a weight on meta"):
        copied(x.double())


@every_row
@torch.no_grad()
def test_parts_that_no_longer_fit_are_refused(name: str) -> None:
    """An error, instead of a read beyond their end."""
    model, x = layer(name)
    model(x)
    model.weight.codes = model.weight.codes[:4].clone()
    with pytest.raises((ValueError, RuntimeError)):
        model(x)
