#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mx.load of a safetensors file gives a tensor of F8_E4M3, and one of F8_E8M0, as uint8: 1.5 is 60, -2
# is 192 and 448 is 126. Nothing is raised and nothing warns. A layer computes with it: model.load_weights takes the
# tensor with strict=True, since its name and shape are right, and outputs of -0.5 and 448 become 252 and 166. F8_E5M2,
# F4 and F64 are errors.
#
# One would guess float values, as safetensors.torch reads them, or the error that F8_E5M2 gets. mlx has no float8 type,
# and mx.from_fp8 turns the bytes into numbers, but no part of the result says that it is needed.
#
# Exits non-zero if the numbers are right, or the file is refused.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' 'numpy==2.4.6' 'ml_dtypes==0.6.0' 'safetensors==0.8.0'
cd "$dir"
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import ml_dtypes
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from safetensors.numpy import save_file

warnings.simplefilter("error")
mx.set_default_device(mx.cpu)
numbers = np.array([[1.5, -2], [448, 0.25]], np.float32)
save_file({"weight": numbers.astype(ml_dtypes.float8_e4m3fn)}, "e4m3.safetensors")
save_file({"weight": numbers.astype(ml_dtypes.float8_e5m2)}, "e5m2.safetensors")
loaded = mx.load("e4m3.safetensors")["weight"]
print(f"saved {numbers.tolist()}, loaded {loaded.tolist()} as {loaded.dtype}")
assert loaded.dtype == mx.uint8 and loaded.tolist() == [[60, 192], [126, 40]]
assert mx.from_fp8(loaded).tolist() == numbers.tolist()

layer = nn.Linear(2, 2, bias=False)
layer.load_weights("e4m3.safetensors", strict=True)
output = layer(mx.ones((1, 2)))
print(f"a layer of these weights: {output.tolist()}, where {numbers.sum(1).tolist()} is right")
assert output.tolist() == [[252, 166]]
try:
    mx.load("e5m2.safetensors")
except RuntimeError as error:
    print(f"float8_e5m2: {error}")
else:
    raise SystemExit("float8_e5m2 loads")
PYTHON
