"""The paths by PyTorch alone: what CI runs on macOS, Windows and Arm, and `tests/test_platforms.py` as if on Windows.

python -m tests.on_platform
"""

from __future__ import annotations

import copy
import platform
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lowbit
from lowbit import qat, train

SCHEMES = {
    "int4": lowbit.Int4WeightOnly(32),
    "int8 x int8": lowbit.Int8DynamicActivationInt8Weight(),
    "float8": lowbit.Float8WeightOnly(),
    "nf4": lowbit.NF4WeightOnly(),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "mxfp8": lowbit.MXFP8DynamicActivationMXFP8Weight(),
    "nvfp4": lowbit.NVFP4WeightOnly(),
}
TRAINED = {
    "int8 products": lowbit.Int8MixedPrecision(always=True),
    "mxfp8 products": lowbit.MXFP8MixedPrecision(always=True),
    "int8 weights": lowbit.Int8Weight(),
    "bitnet": lowbit.BitNet(),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def quantized() -> None:
    x, plain = torch.randn(5, 64), model()
    for name, scheme in SCHEMES.items():
        low = copy.deepcopy(plain)
        lowbit.quantize_(low, scheme)
        with torch.no_grad():
            assert error(low(x), plain(x)) < 0.3, name
        with tempfile.TemporaryDirectory() as folder:
            lowbit.save(low.state_dict(), Path(folder) / "model.safetensors")
            again = model()
            again.load_state_dict(lowbit.load(Path(folder) / "model.safetensors"), assign=True)
        with torch.no_grad():
            assert torch.equal(again(x), low(x)), name


def trained() -> None:
    x = torch.randn(48, 64)
    target = x.roll(1, 1)
    for name, scheme in TRAINED.items():
        low = model()
        train.prepare_(low, scheme)
        losses = steps(low, x, target)
        assert losses[-1] < 0.9 * losses[0], name
    low = model()
    qat.prepare_(low, lowbit.Int4WeightOnly(32))
    losses = steps(low, x, target)
    with torch.no_grad():
        before = low(x)
        qat.convert_(low)
        assert losses[-1] < 0.9 * losses[0] and error(low(x), before) < 1e-6


def steps(low: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[float]:
    optimizer, losses = lowbit.optim.AdamW8bit(low.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = F.mse_loss(low(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    warnings.simplefilter("ignore")  # that a machine without a compiler runs PyTorch operations
    quantized()
    trained()
    print(f"ran on {platform.system()} {platform.machine()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
