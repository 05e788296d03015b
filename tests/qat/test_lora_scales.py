"""Learned scales beside adapters, and of weights that adapters merge into."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import qat
from lowbit.layers.frozen import shown_class
from lowbit.tensor.trained.adapted import is_merged
from lowbit.tensor.trained.learned_scales import is_learned, scales_of
from tests.qat.lora_layers import LoraEmbedding, LoraLayer, Net
from tests.qat.test_factors import rounded_by_factors
from tests.qat.test_lora import INT4, merged, steps
from tests.schemes import (
    FREE_DYNAMIC,
    FREE_SCALES,
    over,
    relative_error,
)


@pytest.mark.parametrize("adapters", ["merge", "keep"])
def test_learned_scales_beside_adapters_warn_of_their_files(adapters: Any) -> None:
    with pytest.warns(UserWarning, match=r"PEFT's files .* hold adapters alone") as found:
        qat.prepare_(Net(), INT4, scales="learned", adapters=adapters)
    assert [one.filename for one in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qat.prepare_(Net(), INT4, adapters=adapters)
        qat.prepare_(nn.Sequential(nn.Linear(32, 8)), INT4, scales="learned")


@over({**FREE_SCALES, **FREE_DYNAMIC})
def test_learned_scales_of_merged_weights(scheme: lb.Scheme) -> None:
    """They train with the adapters, and the converted weight is the one that was trained."""
    torch.manual_seed(0)
    model = Net(torch.float32)
    report = qat.prepare_(model, scheme, scales="learned")
    assert "present scales" not in str(report)
    base: Any = model.up.base_layer
    assert is_merged(base.weight) and is_learned(base.weight)
    start = base.weight_scale.detach().clone()
    steps(model)
    assert not torch.equal(base.weight_scale, start)
    seen = {n: merged(layer) for n, layer in model.named_children() if isinstance(layer, LoraLayer)}
    scales = {n: scales_of(getattr(model, n).base_layer) for n in seen}
    expected = {n: rounded_by_factors(w, *scales[n], scheme.weight) for n, w in seen.items()}
    x = torch.randn(5, 64)
    before = model(x)
    qat.convert_(model)
    for name, values in expected.items():
        layer: Any = getattr(model, name)
        assert shown_class(layer) is nn.Linear and torch.equal(layer.weight.dequantize(), values), (
            name
        )
        assert not any(p.endswith("_scale") for p in layer._parameters)
    assert relative_error(model(x), before) < 2e-2  # int8 products of activations


def test_gradients_of_learned_scales_of_merged_weights() -> None:
    torch.manual_seed(0)
    model = Net(torch.float32)
    qat.prepare_(model, INT4, scales="learned")
    steps(model, 1)
    layer: Any = model.up
    x = torch.randn(6, 64, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    scale, _ = scales_of(layer.base_layer)
    found = torch.autograd.grad(y, (x, scale, layer.lora_A["default"].weight), grad)
    whole = merged(layer).requires_grad_()
    own = scale.detach().clone().requires_grad_()
    z = F.linear(x, rounded_by_factors(whole, own, None, INT4.weight), layer.base_layer.bias)
    assert torch.equal(y, z)
    of_x, of_scale, of_whole = torch.autograd.grad(z, (x, own, whole), grad)
    b, s = layer.lora_B["default"].weight, layer.scaling["default"]
    expected = of_x, of_scale, s * b.T @ of_whole
    for name, value, right in zip(("x", "scale", "A"), found, expected, strict=True):
        assert relative_error(value, right) < 1e-5, name


def test_learned_scales_of_an_embedding_with_adapters() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoraEmbedding(nn.Embedding(20, 32)))
    qat.prepare_(
        model, INT4, lambda module, name: isinstance(module, nn.Embedding), scales="learned"
    )
    index = torch.tensor([[1, 19, 1]])
    model(index).square().sum().backward()
    assert model[0].base_layer.weight_scale.grad.abs().sum() > 0
    before = model(index)
    qat.convert_(model)
    assert torch.equal(model(index), before)
