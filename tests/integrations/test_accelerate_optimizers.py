"""lowbit's optimizers under accelerate's wrapper: stale parameters raise through it, and clipping works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import Int4WeightOnly, optim, qat

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)


def backward(accelerator, model, optimizer, seed):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
    with accelerator.accumulate(model):
        accelerator.backward(model(x).float().square().mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def test_clipped_and_accumulated_gradients(accelerator):
    model = nn.Linear(64, 64)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = model.weight.detach().clone()
    for seed in range(4):
        backward(accelerator, model, optimizer, seed)
    assert not torch.equal(before, model.weight)
    assert optimizer.optimizer.state[model.weight]["step"] == 2


def test_an_optimizer_made_before_raises_through_the_wrapper(accelerator):
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters()))
    qat.prepare_(model, Int4WeightOnly(group_size=32))
    model = accelerator.prepare(model)
    backward(accelerator, model, optimizer, 0)  # accumulates only
    with pytest.raises(RuntimeError, match=r"holds 1 parameters \(of 2\).*0\.weight"):
        backward(accelerator, model, optimizer, 1)
