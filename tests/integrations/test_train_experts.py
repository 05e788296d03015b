"""Training the stock experts of transformers with grouped products in 8 bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb
from tests.integrations.models import TOKENS, mixtral, qwen3_moe, train
from tests.traced import ran_in
from tests.train.problems import relative

pytest.importorskip("transformers")

SCHEMES = {
    "int8": (lb.Int8MixedPrecision(always=True), ("int8", "int8", "int8")),
    "float8": (lb.Float8MixedPrecision(always=True, backward="e5m2"), ("e4m3", "e5m2", "e5m2")),
    "blocks": (lb.train.Float8BlockMixedPrecision(always=True), ("e4m3", "e4m3", "e4m3")),
    "int8-weight": (lb.Int8Weight(True, True, True, always=True), ("int8", "int8", "int8")),
}
PRODUCTS = ("output", "grad_input", "grad_weight")


def is_experts(module: nn.Module, name: str) -> bool:
    return name.endswith("experts")


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("make", [mixtral, qwen3_moe], ids=["mixtral", "qwen3-moe"])
def test_grouped_products_of_the_stock_experts(make: Any, name: str) -> None:
    """All three run in 8 bits, as the trace shows; gradients are near the plain model's; the model learns."""
    scheme, formats = SCHEMES[name]
    plain = make().train()
    plain.set_experts_implementation("grouped_mm")
    low = copy.deepcopy(plain)
    report = lb.train.prepare_(low, scheme, is_experts)
    assert len(report.converted) == 2
    exact, found = gradients(plain), gradients(low)
    assert found.keys() == exact.keys()
    for key, expected in exact.items():
        assert relative(found[key], expected) < (0.1 if name.startswith("int8") else 0.2), key
    low.zero_grad()
    with torch.enable_grad():
        trace = lb.trace(low, input_ids=TOKENS)
    for attribute in ("gate_up_proj", "down_proj"):
        (layer,) = {p.layer for p in trace.products if p.layer.endswith(attribute)}
        expected = {key: {fmt: 1} for key, fmt in zip(PRODUCTS, formats, strict=True)}
        assert ran_in(trace, layer) == expected
    losses = train(low, lb.optim.AdamW8bit(low.parameters(), lr=3e-3), steps=3)
    assert losses[-1] < losses[0]
