"""One scheme for QAT, conversion and the file: nothing is set twice, and nothing changes on the way.

python examples/one_scheme.py
"""

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import lowbit
from lowbit import Int4WeightOnly

torch.manual_seed(0)
scheme = Int4WeightOnly(group_size=64)  # the only place that says bits and groups
inputs = torch.randn(32, 256)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))


model = build()
lowbit.qat.prepare_(model, scheme)
optimizer = lowbit.optim.AdamW4bit(model.parameters(), lr=1e-3)
for _ in range(10):
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
trained = model(inputs)

# The high-precision weights behind the rounded ones, quantized without QAT by the same scheme.
plain = copy.deepcopy(model)
lowbit.qat.undo_(plain)
lowbit.quantize_(plain, scheme)

lowbit.qat.convert_(model)
with tempfile.TemporaryDirectory() as folder:
    lowbit.save(model, Path(folder) / "model.safetensors")
    loaded = build()
    loaded.load_state_dict(lowbit.load(Path(folder) / "model.safetensors"), assign=True)

assert torch.equal(model(inputs), trained)
assert torch.equal(loaded(inputs), trained)
assert torch.equal(plain(inputs), trained)
print("QAT, conversion, the file and quantize_ compute the same, to the last bit")
print(loaded[0].weight)
