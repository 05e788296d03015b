#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6, torch 2.13.0 (CPU): zero as float8_e8m0fnu, the type of the scales of MXFP4 and MXFP8, is NaN in
# ml_dtypes and 2**-127 in torch. So a block of zeros (padding, a dead channel) that numpy quantizes by its largest value over 6
# has a scale of NaN and comes back as NaN. In torch it comes back as zeros. Positive numbers are the same in both.
#
# One would guess that a cast to a type without zero takes the nearest number that it has, as a cast of 1e9 to float4_e2m1fn
# takes 6. Positive numbers below 2**-127 do become 2**-127, the smallest of them too.
#
# Exits non-zero if both give one value.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np
import torch

e8m0, e2m1 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn
numbers = np.array([0.0, 1e-45, 2.0**-127, 2.0**-126, 1.0, 2.5, 6.0, 2.0**127], np.float32)
by_numpy = numbers.astype(e8m0).astype(np.float32)
by_torch = torch.from_numpy(numbers).to(torch.float8_e8m0fnu).float().numpy()
for number, one, other in zip(numbers, by_numpy, by_torch):
    print(f"{number:.3g}: ml_dtypes {one:.3g}, torch {other:.3g}")

x = np.zeros((2, 32), np.float32)
x[1] = np.linspace(-3, 3, 32)
scale = (np.abs(x).max(1, keepdims=True) / 6).astype(e8m0).astype(np.float32)
with np.errstate(invalid="ignore"):
    back = (x / scale).astype(e2m1).astype(np.float32) * scale
print("a block of zeros comes back as", back[0, :3], "and another as", back[1, :3])
assert np.isnan(by_numpy[0]) and by_torch[0] == 2.0**-127 and np.array_equal(by_numpy[2:5], by_torch[2:5])
assert np.isnan(back[0]).all() and np.isfinite(back[1]).all()
PYTHON
