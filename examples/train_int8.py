"""Train with products in int8: each linear layer rounds what it multiplies, forward and backward.

    python examples/train_int8.py

Weights, gradients and optimizer states keep their dtype. On a GPU, leave out `always=True`: layers that are too small
to gain then stay in high precision, and the report names them.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lowbit
from lowbit import Int8MixedPrecision  # or Float8MixedPrecision

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
)
inputs = torch.randn(256, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)

print(lowbit.train.prepare_(model, Int8MixedPrecision(always=True)))
optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-3)  # after prepare_
losses = []
for _ in range(60):
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.3f} after {len(losses)} steps")
assert losses[-1] < 0.3 * losses[0]

print(lowbit.trace(model, inputs))  # which product ran in what

lowbit.train.restore_(model)  # an ordinary model again, with the trained weights
assert type(model[0].weight) is nn.Parameter
