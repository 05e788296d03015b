"""Products written as matmul, and 3-D weights: an expert at a time, batched, grouped."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit import train
from lowbit_kernels.scaled_mm import calls
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
    calls.clear()
    found, expected = outcome(low, x), outcome(model, x)
    assert sum(calls.values()) == 3 * count
    for key, value in expected.items():
        assert found[key].shape == value.shape
        assert snr(found[key], value) > 20, key
    if name == "index":
        assert not found["weight"][2].any(), "no token reached this expert"


def test_compiled():
    torch._dynamo.reset()
    low = prepared(Experts(PRODUCTS["bmm"][0]), SCHEMES["int8"])
    compiled = copy.deepcopy(low)
    compiled.compile(fullgraph=True, backend="aot_eager")
    x = values(3, 16, 64)
    calls.clear()
    found = outcome(compiled, x)
    assert calls == {"int8_scaled_mm": 9}
    for key, value in outcome(low, x).items():
        assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-5), key


def test_grouped_products_run_in_high_precision_and_explain_says_so():
    offsets = torch.tensor([10, 16, 48], dtype=torch.int32)
    model = Experts(lambda x, w: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets)).bfloat16()
    low = prepared(model, SCHEMES["int8"])
    x = values(48, 64, dtype=torch.bfloat16)
    calls.clear()
    found, expected = outcome(low, x), outcome(model, x)
    assert not calls
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    layer = train.explain(low, x).layers[""]
    assert layer.why == ["grouped products run in high precision"] and not layer.low_bit


def test_other_products_are_refused():
    low = prepared(Experts(by_index), SCHEMES["int8"])
    with pytest.raises(NotImplementedError, match=r"only the second may be"):
        low.weight @ values(3, 64, 5)
    with pytest.raises(NotImplementedError, match=r"accepted: a weight \[K, N\]"):
        values(2, 3, 16, 64) @ low.weight.mT
    with pytest.raises(ValueError, match="number of experts differs"):
        values(2, 16, 64) @ low.weight.mT
    with pytest.raises(NotImplementedError, match=r"einsum|bmm|permute|dequantize"):
        torch.einsum("ebk,enk->ben", values(3, 16, 64), low.weight)
