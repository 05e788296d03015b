"""Products written as matmul, and 3-D weights: an expert at a time, batched, grouped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit import BitNet, BitNetTensor, Int4Weight, Int8Weight, trace, train
from lowbit.tensor.frozen.ternary import pack_ternary
from tests.scaled_products import scaled_products
from tests.traced import low_bit, ran_in, reasons
from tests.train.problems import SCHEMES, every_scheme, outcome, snr, values


class Experts(nn.Module):
    """Weights [E, N, K], or [E, K, N] as others store them; `product` gives the output."""

    def __init__(self, product, shape=(3, 24, 64)):
        super().__init__()
        self.weight = nn.Parameter(values(*shape, seed=1))
        self.product = product

    def forward(self, x):
        return self.product(x, self.weight)


def prepared(model, scheme):
    model = copy.deepcopy(model)
    report = train.prepare_(model, scheme, lambda module, name: isinstance(module, Experts))
    assert report.converted == ["weight"]
    return model


def by_index(x, w):
    return sum(F.linear(x[i], w[i]) for i in range(2))


PRODUCTS = {
    "index": (by_index, (3, 24, 64), 2),
    "bmm": (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (3, 24, 64), 3),
    "matmul": (lambda x, w: x @ w.mT, (3, 24, 64), 3),
    "einsum": (lambda x, w: torch.einsum("ebk,enk->ben", x, w), (3, 24, 64), 3),
    "stored-transposed": (lambda x, w: x.bmm(w), (3, 64, 24), 3),
    "2d": (lambda x, w: x @ w.t(), (24, 64), 1),
    "2d-stored-transposed": (lambda x, w: torch.matmul(x, w), (64, 24), 1),
}


@every_scheme
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(scheme, name):
    product, shape, count = PRODUCTS[name]
    model = Experts(product, shape)
    low = prepared(model, scheme)
    x = values(3, 16, 64)
    with scaled_products() as calls:
        found, expected = outcome(low, x), outcome(model, x)
    assert sum(calls.values()) == 3 * count
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert snr(found[key], value) > 20, key
    if name == "index":
        assert not found["weight"][2].any(), "no token reached this expert"


INT8_WEIGHT = Int8Weight(True, True, True, always=True)
WEIGHTS = {"weight": Int8Weight(), "weight-products": INT8_WEIGHT, "bitnet": BitNet()}


@pytest.mark.parametrize("scheme", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_weights_in_low_bits(scheme, name):
    """As those of the dequantized weight."""
    product, shape, count = PRODUCTS[name]
    low = prepared(Experts(product, shape), scheme)
    exact = Experts(product, shape)
    with torch.no_grad():
        exact.weight.copy_(low.weight.dequantize())
    x = values(3, 16, 64)
    with scaled_products() as calls:
        found, expected = outcome(low, x), outcome(exact, x)
    transposed = name.endswith("stored-transposed")  # where an int8 weight's scales are of columns
    ran = {"weight": 0, "weight-products": 0 if transposed else 3 * count, "bitnet": count}
    assert calls["int8"] == next(ran[key] for key in WEIGHTS if WEIGHTS[key] is scheme)
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert snr(found[key], value) > 30, key


@pytest.mark.parametrize("name", ["bmm", "2d", "2d-stored-transposed"])
def test_traced_with_all_products(name):
    product, shape, count = PRODUCTS[name]
    low = prepared(Experts(product, shape), INT8_WEIGHT)
    found = trace(low, values(3, 16, 64).requires_grad_())
    if name.endswith("transposed"):
        assert "scales belong to columns" in reasons(found).pop() and not low_bit(found)
    else:
        products = ("output", "grad_input", "grad_weight")
        assert ran_in(found) == {key: {"int8": count} for key in products}


@pytest.mark.parametrize("scheme", [*WEIGHTS.values(), SCHEMES["int8"]], ids=[*WEIGHTS, "int8"])
def test_addmm(scheme):
    low = prepared(Experts(lambda x, w: torch.addmm(x.new_ones(24), x, w.t()), (24, 64)), scheme)
    exact = Experts(lambda x, w: 1 + x @ w.t(), (24, 64))
    with torch.no_grad():
        exact.weight.copy_(low.weight.dequantize())
    x = values(16, 64)
    found, expected = outcome(low, x), outcome(exact, x)
    for key, value in expected.items():
        assert snr(found[key], value) > 30, key
    with pytest.raises(NotImplementedError, match="alpha=2"):
        torch.addmm(x.new_ones(24), x, low.weight.t(), alpha=2)


def test_a_ternary_weight_turned():
    weight = BitNetTensor(values(3, 24, 64), BitNet())
    for turned in (weight.mT, weight.transpose(1, 2), weight.permute(0, 2, 1), weight[1].t()):
        expected = weight.dequantize() if turned.ndim == 3 else weight[1].dequantize()
        assert torch.equal(turned.dequantize(), expected.mT)
    scale = weight.own_scale()
    codes = {"codes": pack_ternary(weight.ternary()[0]), "scale": scale}
    gathered = BitNetTensor.gathered.from_inner(codes, weight.meta(), weight.shape, weight.dtype)
    assert torch.equal(gathered.mT.dequantize(), weight.dequantize().mT)
    assert gathered.mT.shape == (3, 64, 24)
    with pytest.raises(NotImplementedError, match="last two swapped"):
        weight.transpose(0, 1)


@pytest.mark.parametrize("scheme", [Int8Weight(), BitNet()], ids=["weight", "bitnet"])
def test_grouped_products_of_weights_in_low_bits(scheme):
    offsets = torch.tensor([10, 16, 48], dtype=torch.int32)

    def grouped(x, w):
        return torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)

    low, exact = prepared(Experts(grouped).bfloat16(), scheme), Experts(grouped).bfloat16()
    with torch.no_grad():
        exact.weight.copy_(low.weight.dequantize())
    x = values(48, 64, dtype=torch.bfloat16)
    found, expected = outcome(low, x), outcome(exact, x)
    for key, value in expected.items():
        assert snr(found[key], value) > 25, key
    assert all("high precision" in why or "was asked for" in why for why in reasons(trace(low, x)))


@pytest.mark.parametrize("name", ["int8", "weight-products", "bitnet"])
def test_compiled(name):
    torch._dynamo.reset()
    low = prepared(Experts(PRODUCTS["bmm"][0]), {**SCHEMES, **WEIGHTS}[name])
    compiled = copy.deepcopy(low)
    compiled.compile(fullgraph=True, backend="aot_eager")
    x = values(3, 16, 64)
    with scaled_products() as calls:
        found = outcome(compiled, x)
    assert calls == {"int8": 3 if name == "bitnet" else 9}
    for key, value in outcome(low, x).items():
        assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-5), key


def test_other_products_are_refused():
    low = prepared(Experts(by_index), SCHEMES["int8"])
    with pytest.raises(NotImplementedError, match=r"only the weight, the second, may be"):
        low.weight @ values(3, 64, 5)
    with pytest.raises(NotImplementedError, match=r'set_experts_implementation\("grouped_mm"\)'):
        low.weight[torch.tensor([0, 2])] @ values(2, 64, 1)
    with pytest.raises(NotImplementedError, match=r"accepted: a weight \[K, N\]"):
        values(2, 3, 16, 64) @ low.weight.mT
    with pytest.raises(ValueError, match="number of experts differs"):
        values(2, 16, 64) @ low.weight.mT
    for scheme in (SCHEMES["int8"], Int8Weight(), BitNet()):
        weight = prepared(Experts(by_index), scheme).weight
        with pytest.raises(NotImplementedError, match=r"filter_fn.* no gradient reaches it"):
            weight @ values(3, 64, 5)


@pytest.mark.parametrize("scheme", [Int8Weight(), Int4Weight(16)], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("turned", [True, False], ids=["[E, N, K]", "[E, K, N]"])
def test_grouped_products_in_high_precision_keep_no_values(scheme, turned):
    """Backward makes them again: the gradients of torch's product of the same values, also of a sum, whose rows share
    their memory."""
    offs = torch.tensor([5, 5, 16], dtype=torch.int32)

    def product(x, w):
        return torch._grouped_mm(x, w.mT if turned else w, offs=offs)

    model = Experts(product, (3, 24, 64) if turned else (3, 64, 24)).bfloat16()
    low = prepared(model, scheme)
    exact = Experts(product).bfloat16()
    exact.weight = nn.Parameter(low.weight.dequantize().contiguous())
    kept = []
    x = values(16, 64).bfloat16()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        low(x.clone().requires_grad_())
    plain = [t for t in kept if type(t) is torch.Tensor and t.is_floating_point()]
    assert kept and all(t.numel() <= x.numel() for t in plain)
    found, expected = outcome(low, x), outcome(exact, x)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    own = x.clone().requires_grad_()
    low(own).sum().backward()
    wanted = exact.weight.detach().double().sum(1 if turned else 2)[[0] * 5 + [2] * 11]
    assert snr(own.grad, wanted) > 40


@pytest.mark.parametrize("grad_input", [True, False])
def test_the_gradient_of_a_sum(grad_input):
    """Its rows share their memory."""
    scheme = Int8Weight(True, grad_input, False, always=True)

    def product(x, w):
        return torch._grouped_mm(x, w.mT, offs=torch.tensor([5, 5, 16], dtype=torch.int32))

    model = prepared(Experts(product, (3, 32, 64)).bfloat16(), scheme)
    found = []
    for upstream in (torch.ones(16, 32).bfloat16(), torch.ones(()).bfloat16().expand(16, 32)):
        x = values(16, 64).bfloat16().requires_grad_()
        model.weight.grad = None
        model(x).backward(upstream)
        found.append((x.grad, model.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
