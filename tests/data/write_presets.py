"""Write `presets_<NAME>.safetensors` in this folder: weights as the presets of the present code make them.

    python -m tests.data.write_presets NAME

Run before a preset's default changes; the file is then kept as it is, and loads as it was for ever after
(tests/test_checkpoint_versions.py). Beside each tensor lie the values it stands for, as plain float32.

`presets_symmetric.safetensors`: every preset of integers had the mapping "symmetric".
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import lowbit as lb

FOLDER = Path(__file__).resolve().parent
SCHEMES = {
    "int8": lb.Int8WeightOnly(),
    "int8_group": lb.Int8WeightOnly(16),
    "int8_int8": lb.Int8DynamicActivationInt8Weight(),
    "int8_int4": lb.Int8DynamicActivationInt4Weight(16),
    "int6": lb.IntxWeightOnly(6),
    "int4": lb.Int4WeightOnly(16),
}


def contents() -> dict[str, object]:
    generator = torch.Generator().manual_seed(2)
    state: dict[str, lb.LowbitTensor] = {}
    for name, scheme in SCHEMES.items():
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(4, 32, generator=generator).to(dtype)
            named = f"{name}.{str(dtype).removeprefix('torch.')}"
            state[named] = lb.AffineTensor.from_float(values, scheme)
            state[f"qat.{named}"] = lb.FakeQuantizedTensor(values, scheme)
    expected = {f"expected.{name}": t.dequantize().float() for name, t in state.items()}
    return {**state, **expected}


if __name__ == "__main__":
    path = FOLDER / f"presets_{sys.argv[1]}.safetensors"
    lb.save(contents(), path, metadata={"written by": f"lowbit {lb.__version__}"})
    print(f"{path.name}: {path.stat().st_size} bytes")
