#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: the mean of 1,000 ones in ml_dtypes.bfloat16 is 0.256, and their sum is 256. numpy adds
# one element after another in bfloat16, where 256 + 1 = 256. The same ones in numpy's own float16 have the mean 1, since numpy
# adds float16 in pairs and a mean in float32. Matrix products of bfloat16 sum in more bits: ones @ ones = 1,000.
#
# One would guess that a mean of equal numbers is that number up to a rounding step, as it is for float16 and for torch's
# bfloat16: checks of a checkpoint's weights (their mean, their norm) are written so.
#
# Exits non-zero if the mean is within 10% of 1.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

means = {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    ones = np.ones(1000, dtype)
    means[dtype] = float(ones.mean())
    norm, product = float(np.sqrt((ones * ones).sum())), float((ones[None] @ ones[:, None])[0, 0])
    print(f"{np.dtype(dtype)}: mean {means[dtype]:.3f}, sum {float(ones.sum()):.0f}, norm {norm:.2f}, ones @ ones {product:.0f}")
assert abs(means[np.float16] - 1) < 1e-3
assert means[ml_dtypes.bfloat16] < 0.9
PYTHON
