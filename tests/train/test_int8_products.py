"""Int8 and int4 weights in products: gradients against float64 by name, int8 x int8, compiled, checkpointed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit
from lowbit import Int4Weight, Int8Weight, Int8WeightTensor, train
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime.launches import counted
from tests.scaled_products import scaled_products
from tests.train.problems import (
    HOW,
    SWITCHES,
    Model,
    int8_products,
    linear,
    outcome,
    prepared,
    relative,
    switched,
    tokens,
    values,
)
from tests.train.test_int8_weight import PRODUCTS, same, weight_of

INT4_PRODUCTS = Int4Weight(24, output=True, grad_input=True, grad_weight=True, always=True)
WITH_PRODUCTS = {"int8": PRODUCTS, "int4": INT4_PRODUCTS}


@pytest.mark.parametrize("scheme", [Int8Weight(), Int4Weight(24)], ids=["int8", "int4"])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 7), (1,), (0,)], ids=str)
def test_gradients_against_float64_by_name(shape, scheme):
    layer = linear(24, 100)
    model, x = prepared(layer, scheme), values(*shape, 100, seed=4)
    found = outcome(model, x)
    twin = copy.deepcopy(layer).double()
    with torch.no_grad():
        twin.weight.copy_(model.weight.dequantize())
    expected = outcome(twin, x.double())
    assert found.keys() == expected.keys() == {"output", "input", "weight", "bias"}
    for name, value in expected.items():
        assert found[name].shape == value.shape
        if value.numel() and value.any():
            assert relative(found[name], value) < 1e-6, name


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_int8_products_run_and_are_counted(name):
    """Their errors against float64, by name. Groups of 24 don't divide rows of 100."""
    scheme = WITH_PRODUCTS[name]
    layer, x = linear(48, 100), values(2, 16, 100, seed=4)
    model, twin = prepared(layer, scheme), copy.deepcopy(layer).double()
    with torch.no_grad():
        twin.weight.copy_(model.weight.dequantize())
    expected = outcome(twin, x.double())
    with scaled_products() as calls, counted() as ran:
        found = outcome(model, x)
    made = ran["int4_to_int8", "torch"]
    assert calls["int8"] == 3 and made == (2 if name == "int4" else 0)
    for key, value in expected.items():
        assert relative(found[key], value) < (0.03 if key != "bias" else 1e-6), key
        assert key == "bias" or relative(found[key], value) > 1e-4
    with torch.no_grad(), scaled_products() as calls:
        assert torch.equal(model(x), found["output"])
    assert calls["int8"] == 1


def test_both_directions_read_the_same_int8_codes_of_an_int4_weight():
    """Rows of the identity have exact codes, so that products show the weight: its values rounded as one in high
    precision is. A row of zeros stays 0, and one with NaN NaN."""
    plain = values(32, 100, seed=1)
    plain[3] = 0
    weight = nn.Parameter(lowbit.Int4WeightTensor(plain, INT4_PRODUCTS, "w"))
    codes, scale, _, _ = quantize_rowcol(weight.detach().dequantize(), "int8", columns=False)
    rounded = codes[:, :100] * scale[:, None]
    x = torch.zeros(32, 100, requires_grad=True)
    F.linear(x, weight).backward(torch.eye(32))
    for found in (F.linear(torch.eye(100), weight).detach().t(), x.grad):
        assert not found[3].any() and relative(found, rounded) < 1e-6
        assert relative(found, weight.detach().dequantize()) > 1e-3
    weight.detach().scale[5, 0] = torch.nan
    y = F.linear(torch.eye(100), weight).detach()
    assert y[:, 5].isnan().all() and torch.equal(y.isnan().any(0), torch.arange(32) == 5)


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
def test_int4_products_one_by_one(switch):
    """Each may run in int8 alone, the others in high precision."""
    model, x = prepared(linear(48, 100), switched(INT4_PRODUCTS, switch)), values(16, 100, seed=4)
    exact = outcome(prepared(linear(48, 100), Int4Weight(24)), x)
    with scaled_products() as calls:
        found = outcome(model, x)
    assert calls["int8"] == sum(switch)
    for on, key in zip(switch, ("output", "input", "weight"), strict=True):
        assert (
            (1e-4 < relative(found[key], exact[key]) < 0.03)
            if on
            else torch.equal(found[key], exact[key])
        )


@pytest.mark.parametrize(
    "scheme", [Int8Weight(), PRODUCTS, INT4_PRODUCTS], ids=["weight", *WITH_PRODUCTS]
)
@pytest.mark.parametrize("how", HOW)
def test_compiled_and_checkpointed(scheme, how):
    model, x = prepared(linear(48, 96), scheme), values(32, 96, seed=4)
    assert (int8_products(model, x, how) > 0) == bool(scheme.products)


@pytest.mark.parametrize(
    "scheme",
    [Int8Weight(True, True, True), replace(INT4_PRODUCTS, always=False)],
    ids=["int8", "int4"],
)
def test_where_products_gain_nothing_they_stay_exact(scheme):
    model, x = prepared(linear(48, 96), scheme), values(32, 96, seed=4)
    kind = "int4" if isinstance(scheme, Int4Weight) else "int8"
    assert f"{kind} weight, dequantized: on cpu low-bit products" in str(lowbit.trace(model, x))
    with scaled_products() as calls:
        outcome(model, x)
    assert calls.total() == 0


def test_layers_share_one_compiled_graph():
    """They differ in values, not in metadata."""
    torch._dynamo.reset()
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    train.prepare_(layers, Int8Weight())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x, w, b: F.linear(x, w, b), fullgraph=True, backend=counter)
    for layer in layers:
        call(values(4, 32), layer.weight, layer.bias)
    assert counter.frame_count == 1


def test_a_compiled_step_updates_as_the_eager_one():
    torch._dynamo.reset()
    weight, twin = (nn.Parameter(weight_of(24, 100)) for _ in range(2))

    def step(p, g):
        with torch.no_grad():
            p.mul_(0.999).add_(g, alpha=-0.01)

    g = values(24, 100, seed=1)
    torch.compile(step, fullgraph=True, backend="aot_eager")(weight, g)
    step(twin, g)
    assert same(weight.detach(), twin.detach())


def test_an_embedding_gets_dense_gradients():
    model, plain = Model(), Model()
    train.prepare_(model, Int8Weight(), lambda m, n: isinstance(m, nn.Embedding))
    with torch.no_grad():
        plain.table.weight.copy_(model.table.weight.dequantize())
    for m in (model, plain):
        m(tokens()).square().mean().backward()
    assert relative(model.table.weight.grad, plain.table.weight.grad) < 1e-6
    assert not model.table.weight.grad[3].any(), "the padding"


def test_an_embedding_with_sparse_gradients_is_left():
    model = nn.Sequential(nn.Embedding(50, 32, sparse=True), nn.Linear(32, 32))
    report = train.prepare_(
        model, Int8Weight(), lambda m, n: isinstance(m, nn.Embedding | nn.Linear)
    )
    assert report.converted == ["1.weight"] and "sparse=True" in report.left["0.weight"]
    model(tokens()).sum().backward()
    assert model[0].weight.grad.is_sparse
    assert lowbit.quantize_(
        nn.Embedding(50, 32, sparse=True), lowbit.Int8WeightOnly(), lambda m, n: True
    ).converted


def test_attention_and_experts():
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    x = values(2, 5, 32)
    plain = copy.deepcopy(attention)
    weight = Int8WeightTensor(attention.out_proj.weight.detach(), Int8Weight())
    attention.out_proj.weight = nn.Parameter(weight)
    with torch.no_grad():
        plain.out_proj.weight.copy_(weight.dequantize())
    for m in (attention, plain):
        m(x, x, x)[0].square().mean().backward()
    assert relative(attention.out_proj.weight.grad, plain.out_proj.weight.grad) < 1e-5
    experts = nn.Parameter(weight_of(3, 16, 100))
    F.linear(values(5, 100), experts[1]).sum().backward()
    torch.optim.SGD([experts], lr=0.1).step()
    assert experts.grad[1].any() and not experts.grad[[0, 2]].any()
