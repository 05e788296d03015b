"""Fine-tune with 2-bit weights, then convert: QAT beside rounding the trained model.

    python examples/qat.py

Both start from one trained model. Fine-tuning with fake quantization lets the weights move to where rounding hurts
least. Rounding after training leaves them where they were.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import lowbit
from lowbit import Int2WeightOnly

torch.manual_seed(0)
inputs = torch.randn(512, 64)
targets = torch.tanh(inputs @ torch.randn(64, 16) / 8)  # what the network is to compute


def train(model: nn.Module, steps: int, lr: float) -> None:
    optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=lr)
    for _ in range(steps):
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: nn.Module) -> float:
    with torch.no_grad():
        return F.mse_loss(model(inputs), targets).item()


model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 16))
train(model, steps=150, lr=3e-3)
high = loss_of(model)

scheme = Int2WeightOnly(group_size=32)
rounded = copy.deepcopy(model)
lowbit.quantize_(rounded, scheme)

lowbit.qat.prepare_(model, scheme, scales="learned")
train(model, steps=150, lr=3e-3)  # a new optimizer, because prepare_ replaces the parameters
prepared = model(inputs)
lowbit.qat.convert_(model)
assert torch.equal(model(inputs), prepared)  # exactly the weights that were trained

print(f"loss in high precision {high:.5f}")
print(f"rounded after training {loss_of(rounded):.5f}")
print(f"after QAT              {loss_of(model):.5f}")
assert loss_of(model) < loss_of(rounded)
