"""accelerate: prepare, mixed precision, accumulation and clipping give the results of a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowbit as lb

accelerate = pytest.importorskip("accelerate")

OPTIMIZERS = ("AdamW4bit", "AdamW8bit", "AdamWFp8", "Lion8bit", "SGD8bit")
WAYS = {
    "plain": lambda m: None,
    "qat": lambda m: lb.qat.prepare_(m, lb.Int4WeightOnly(32)),
    "int8 weight": lambda m: lb.train.prepare_(m, lb.Int8Weight()),
    "int8 products": lambda m: lb.train.prepare_(m, lb.Int8MixedPrecision(always=True)),
    "bitnet": lambda m: lb.train.prepare_(m, lb.BitNet()),
}


def made(way: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    WAYS[way](model)
    return model


def data() -> DataLoader:  # type: ignore[type-arg]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=4)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.master() if isinstance(p, lb.LowbitTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def accelerated(model: nn.Module, optimizer: Any, precision: str, accumulate: int) -> None:
    tool = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    model, optimizer, loader = tool.prepare(model, optimizer, data())
    for x, y in loader:
        with tool.accumulate(model):
            loss = (model(x) - y).square().mean()
            tool.backward(loss)
            if tool.sync_gradients:
                tool.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def by_hand(model: nn.Module, optimizer: Any, precision: str, accumulate: int) -> None:
    for i, (x, y) in enumerate(data(), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = model(x)
        ((found.float() - y).square().mean() / accumulate).backward()
        if i % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def check(way: str, optimizer: str, precision: str, accumulate: int) -> None:
    model = made(way)
    twin, start = copy.deepcopy(model), weights(model)
    for run, trained in ((accelerated, model), (by_hand, twin)):
        run(
            trained,
            getattr(lb.optim, optimizer)(trained.parameters(), lr=1e-2),
            precision,
            accumulate,
        )
    for found, wanted, before in zip(weights(model), weights(twin), start, strict=True):
        assert torch.equal(found, wanted) and not torch.equal(found, before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_optimizers(optimizer, precision) -> None:
    check("plain", optimizer, precision, accumulate=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_prepared_models(way, precision, accumulate) -> None:
    check(way, "AdamW8bit", precision, accumulate)


def test_a_quantized_model_with_trained_biases() -> None:
    model = made()
    lb.quantize_(model, lb.Int8WeightOnly())
    codes = model[0].weight.codes.clone()
    before = model[0].bias.detach().clone()
    parameters = [p for p in model.parameters() if p.requires_grad]
    accelerated(model, lb.optim.AdamW8bit(parameters, lr=1e-2), "bf16", 1)
    assert torch.equal(model[0].weight.codes, codes) and not torch.equal(model[0].bias, before)


def test_the_learning_rate_schedule_reaches_the_optimizer() -> None:
    model = made()
    tool = accelerate.Accelerator(cpu=True)
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, wrapped, schedule = tool.prepare(model, optimizer, schedule)
    for _ in range(3):
        tool.backward(model(torch.randn(2, 64)).sum())
        wrapped.step()
        schedule.step()
        wrapped.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)
