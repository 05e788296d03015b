#!/usr/bin/env bash
# gguf 0.19.0: of a weight whose elements are about 1e-6, Q8_0 keeps nothing (relative error 1.00) and Q4_0 all that 4 bits can hold
# (0.10). Both store a float16 scale a block of 32. Q8_0's is the largest magnitude / 127, which is 0 in float16 below
# 3.8e-6; Q4_0's is the largest / 8. The formats are llama.cpp's, so any writer of Q8_0 has this limit.
#
# One would guess that the format of 8 bits is never worse than that of 4: it has sixteen times as many levels, and
# neither has an offset.
#
# Exits non-zero if Q8_0 is as exact as Q4_0.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'gguf==0.19.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
errors = {}
for size in (1.0, 1e-4, 1e-6):
    for kind in (Kind.Q8_0, Kind.Q4_0):
        weight = x * np.float32(size)
        back = quants.dequantize(quants.quantize(weight, kind), kind)
        errors[kind, size] = np.linalg.norm(back - weight) / np.linalg.norm(weight)
    print(f"weights of {size:g}: Q8_0 {errors[Kind.Q8_0, size]:.4f}, Q4_0 {errors[Kind.Q4_0, size]:.4f}")
assert errors[Kind.Q8_0, 1.0] < 0.01 and errors[Kind.Q8_0, 1e-6] > 0.9
assert max(errors[Kind.Q4_0, size] for size in (1.0, 1e-4, 1e-6)) < 0.12
PYTHON
