"""Int8 weights in products: gradients by name against float64, int8 x int8, compiled, checkpointed, looked up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit
from lowbit import Int8Weight, Int8WeightTensor, train
from tests.scaled_products import scaled_products
from tests.train.problems import (
    HOW,
    Model,
    int8_products,
    linear,
    outcome,
    prepared,
    relative,
    tokens,
    values,
)
from tests.train.test_int8_weight import PRODUCTS, same, weight_of


@pytest.mark.parametrize("shape", [(5,), (2, 3, 7), (1,), (0,)], ids=str)
def test_gradients_against_float64_by_name(shape):
    layer = linear(24, 100)
    model, x = prepared(layer, Int8Weight()), values(*shape, 100, seed=4)
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


def test_int8_products_run_and_are_counted():
    layer = linear(48, 96)
    x = values(2, 16, 96, seed=4)
    expected = outcome(prepared(layer, Int8Weight()), x)
    model = prepared(layer, PRODUCTS)
    with scaled_products() as calls:
        found = outcome(model, x)
    assert calls["int8"] == 3
    for name, value in expected.items():
        assert relative(found[name], value) < 0.03, name
    for name in ("output", "input", "weight"):
        assert not torch.equal(found[name], expected[name])
    with torch.no_grad(), scaled_products() as calls:
        assert torch.equal(model(x), found["output"])
    assert calls["int8"] == 1


@pytest.mark.parametrize("scheme", [Int8Weight(), PRODUCTS], ids=["weight", "products"])
@pytest.mark.parametrize("how", HOW)
def test_compiled_and_checkpointed(scheme, how):
    model, x = prepared(linear(48, 96), scheme), values(32, 96, seed=4)
    assert (int8_products(model, x, how) > 0) == (scheme is PRODUCTS)


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
