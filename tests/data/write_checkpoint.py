"""Write `checkpoint_v<N>.safetensors` in this folder, N being the present format version.

    python -m tests.data.write_checkpoint

Run once a format version, before its first release; the files are then kept as they are, and every later version
must load them (tests/test_checkpoint_versions.py). Beside each tensor lie the values it stood for, as plain float32.
"""

from __future__ import annotations

from pathlib import Path

import torch

import lowbit as lb
from lowbit.checkpoint import FORMAT_VERSION

FOLDER = Path(__file__).resolve().parent


def contents() -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    schemes = {
        "int4": lb.Int4WeightOnly(8),
        "int4_asymmetric": lb.Int4WeightOnly(16, "asymmetric"),
        "int4_float_zero": lb.Int4WeightOnly(8, "float_zero_point"),
        "int3": lb.IntxWeightOnly(3, 8),
        "int1": lb.IntxWeightOnly(1),
        "int8": lb.Int8WeightOnly(),
        "int8_int8": lb.Int8DynamicActivationInt8Weight(),
        "int8_int4": lb.Int8DynamicActivationInt4Weight(8),
        "float8": lb.Float8WeightOnly(),
        "float8_float8": lb.Float8DynamicActivationFloat8Weight(),
        "uint5_blocks": lb.Scheme(lb.Spec(lb.Int(5, signed=False), lb.PerBlock(2, 4))),
        "e5m2_tensor": lb.Scheme(lb.Spec(lb.Float8(torch.float8_e5m2), lb.PerTensor())),
    }
    state: dict[str, object] = {}
    for name, scheme in schemes.items():
        state[f"{name}.weight"] = lb.AffineTensor.from_float(values(3, 19), scheme)
    state["experts"] = lb.AffineTensor.from_float(values(2, 3, 8).bfloat16(), schemes["int4"])
    state["qat"] = lb.FakeQuantizedTensor(values(4, 8), schemes["int8_int4"])
    for form in ("4bit", "8bit", "float8"):
        for signed in (True, False):
            x = values(2, 70) if signed else values(2, 70).square()
            name = f"state.{form}.{'signed' if signed else 'unsigned'}"
            state[name] = lb.CodebookTensor.from_float(x, form, signed=signed, block_size=32)
    state["plain"] = values(3).half()
    expected = {}
    for name, t in state.items():
        if isinstance(t, lb.LowbitTensor):
            expected[f"expected.{name}"] = t.dequantize().float()
    state["tied"] = state["int4.weight"]
    return {**state, **expected, "step": 12, "lr": 1e-3, "betas": [0.9, 0.95], "note": None}


if __name__ == "__main__":
    path = FOLDER / f"checkpoint_v{FORMAT_VERSION}.safetensors"
    lb.save(contents(), path, metadata={"written by": f"lowbit {lb.__version__}"})
    print(f"{path.name}: {path.stat().st_size} bytes")
