#!/usr/bin/env bash
# hqq 0.2.8.post1, torch 2.13.0 (CPU): Quantizer.quantize stops at a range of 7.5e-4 in 4 bits. Groups of 64 weights of size 1
# or 1e-3 come back with an error of 9% of their norm, those of 1e-4 with 14%, and those of 1e-5 with 250%: each group is one
# number then, which is further away than zero is. In 8 bits it stops at a range of 0.013, so that weights of 1e-3 have the
# error of 7 bits, and those of 1e-4 that of 4 bits. `optimize=True`, the default, makes 99% of the 250%.
#
# One would guess that the relative error does not depend on the size of the weights, since each group has a scale of its own
# in float32. The inverse of the scale is limited to 2e4, which is meant for float16, whatever `compute_dtype` is. Weights
# under 1e-4 are common in adapters, in gates that start near zero, and in models with a multiplier behind a layer.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'tqdm==4.70.1' 'termcolor==3.3.0' 'einops==0.8.2' 'transformers==5.23.0' 'accelerate==1.15.0'
"$dir/venv/bin/pip" install -q --no-deps 'hqq==0.2.8.post1'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from hqq.core.quantize import Quantizer

torch.manual_seed(0)
plain = torch.randn(64, 64)
options = dict(group_size=64, device="cpu", compute_dtype=torch.float32)


def error(size: float, bits: int, optimize: bool = False) -> float:
    weight = plain * size
    codes, meta = Quantizer.quantize(weight, nbits=bits, optimize=optimize, **options)
    return float((Quantizer.dequantize(codes, meta) - weight).norm() / weight.norm())


for bits in (4, 8):
    print(f"{bits} bits:", {size: round(error(size, bits), 3) for size in (1.0, 1e-3, 1e-4, 1e-5)})
print("4 bits, 1e-5, zero point optimized:", round(error(1e-5, 4, True), 3))
assert error(1.0, 4) < 0.1 and error(1e-3, 4) < 0.1 and 0.12 < error(1e-4, 4) < 0.17 and error(1e-5, 4) > 1
assert error(1.0, 8) < 0.006 and error(1e-3, 8) > 0.01 and error(1e-4, 8) > 0.1 and error(1e-5, 4, True) > 0.9
PYTHON
