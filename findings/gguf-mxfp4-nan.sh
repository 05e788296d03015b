#!/usr/bin/env bash
# gguf 0.19.0: gguf.quants.quantize(x, MXFP4) of a block of 32 numbers with one NaN or infinity in it gives 32 zeros,
# and the other numbers of the block are gone with it. For NaN nothing is raised and nothing warns. Q4_0, Q4_1, Q5_0,
# Q5_1 and Q8_0 of the same block give NaN, and BF16 and F16 keep the one number as it is.
#
# One would guess what the other types do: a weight that is broken stays broken, so that the model's first output shows
# it. The block's exponent is taken where the largest magnitude is above 0, which NaN is not, and is otherwise the
# smallest there is, 2**-127. A diverged tensor becomes a file of zeros, whose model computes finite numbers.
#
# Exits non-zero if a block with NaN comes back as anything but zeros, or quantize warns of it.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'gguf==0.19.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

weight = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
for bad in (np.nan, np.inf):
    broken = weight.copy()
    broken[0, 3] = bad
    for kind in (Type.MXFP4, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.BF16):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            stored = quantize(broken, kind)
        said = [str(w.message) for w in caught]
        with np.errstate(invalid="ignore"):
            back = dequantize(stored, kind)
        first, second = back[0, :32], back[0, 32:]
        print(f"{bad} in {kind.name}: {first[:5]}, the next block {second[:3]}, warnings {said}")
        assert np.isfinite(second).all() and np.abs(second).max() > 0.5
        if kind == Type.MXFP4:
            assert np.abs(first).max() < 1e-37 and (bad == np.inf or not said)
        else:
            assert not np.isfinite(first[3])
PYTHON
