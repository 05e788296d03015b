"""Train a network whose weights are ternary in every product (BitNet b1.58), and store them in 2 bits.

    python examples/train_ternary.py

With `Int8Weight()` in place of `BitNet()`, the weights are int8 themselves, with no high-precision copy.
"""

import torch
import torch.nn.functional as F
from torch import nn

import lowbit
from lowbit import BitNet  # or Int8Weight

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
)
inputs = torch.randn(256, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)


def weight_bytes(model: nn.Module) -> int:
    weights = [p for p in model.parameters() if p.dim() == 2]
    return sum(
        w.nbytes_stored() if isinstance(w, lowbit.LowbitTensor) else w.nbytes for w in weights
    )


plain = weight_bytes(model)
lowbit.train.prepare_(model, BitNet())
optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=2e-3)
for step in range(80):
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(f"step {step:2}  loss {loss.item():.4f}")

trained = model(inputs)
lowbit.train.convert_(model)
assert torch.equal(model(inputs), trained)
accuracy = (trained.argmax(dim=1) == labels).float().mean().item()
print(f"accuracy {accuracy:.1%}; weights {plain:,} bytes in float32, {weight_bytes(model):,} now")
assert accuracy > 0.9
