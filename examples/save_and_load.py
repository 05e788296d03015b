"""Save a low-bit model and load it: the file holds plain tensors and a small JSON.

python examples/save_and_load.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import lowbit
from lowbit import Int4WeightOnly, quantize_


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))


torch.manual_seed(0)
model = build()
quantize_(model, Int4WeightOnly(group_size=64))
inputs = torch.randn(8, 256)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.safetensors"
    lowbit.save(model, path, metadata={"trained on": "nothing"})
    plain = sum(p.numel() for p in build().parameters()) * 4
    print(f"{path.stat().st_size:,} bytes; float32 weights would take {plain:,}")

    fresh = build()
    fresh.load_state_dict(lowbit.load(path), assign=True)
    assert torch.equal(fresh(inputs), model(inputs))
    print("loaded:", type(fresh[0].weight).__name__, lowbit.load_metadata(path))

    # A damaged file is refused, and the error names the tensor.
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    try:
        lowbit.load(path)
        raise AssertionError("the damage was not found")
    except lowbit.CheckpointError as error:
        print("damaged:", error)
