"""Train with AdamW4bit in place of torch's AdamW: the same loss, and a fraction of the bytes for its states.

python examples/optimizer.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowbit


def build() -> nn.Module:
    """A small network, with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 8)
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor
) -> float:
    """The loss after 60 steps."""
    for _ in range(60):
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return F.cross_entropy(model(inputs), labels).item()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states; a low-bit tensor counts what it stores."""
    tensors = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)
    ]
    return sum(
        t.nbytes_stored() if isinstance(t, lowbit.LowbitTensor) else t.nbytes for t in tensors
    )


inputs = torch.randn(256, 64)
labels = (inputs @ torch.randn(64, 8)).argmax(dim=1)  # what the network is to find

for name in ("torch AdamW", "AdamW8bit", "AdamW4bit"):
    model = build()
    make = torch.optim.AdamW if name.startswith("torch") else getattr(lowbit.optim, name)
    optimizer = make(model.parameters(), lr=1e-3)
    loss = train(model, optimizer, inputs, labels)
    count = sum(p.numel() for p in model.parameters())
    size = state_bytes(optimizer) / count
    print(f"{name:<12} loss {loss:.4f}   states {size:.2f} bytes a parameter")
    assert loss < 0.1
