"""Convert a trained model without training: int4 in its layers, int8 in the output layer.

python examples/convert.py
"""

import copy

import torch
from torch import nn

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly


class Classifier(nn.Module):
    """Names that patterns can tell apart: "layers.0", "layers.2", "head"."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
        self.head = nn.Linear(512, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


torch.manual_seed(0)
model = Classifier().eval().requires_grad_(False)  # in place of a trained one
original = copy.deepcopy(model)
inputs = torch.randn(64, 256)
expected = original(inputs)

report = lowbit.quantize_(model, {"head": Int8WeightOnly(), "*": Int4WeightOnly(group_size=64)})
print(report)

error = (model(inputs) - expected).norm() / expected.norm()
print(f"outputs differ by {error:.1%}")
assert error < 0.2

# The search of scales takes longer, and loses less of each weight.
searched = copy.deepcopy(original)
schemes = {"head": Int8WeightOnly(), "*": Int4WeightOnly(group_size=64)}
lowbit.quantize_(searched, schemes, scales="searched")
print(f"with searched scales by {(searched(inputs) - expected).norm() / expected.norm():.1%}")

lowbit.dequantize_(model)  # plain weights again, with the values of the low-bit ones
assert type(model.head.weight) is nn.Parameter
