#!/usr/bin/env bash
# paddlepaddle 3.3.1 (CPU): a cast to float8_e4m3fn saturates, except between 464 and 480: 463 is 448, 470 is NaN, and
# 480, 10,000 and infinity are 448 again. float8_e5m2 is alike: from 61,440 up to 65,536 numbers become infinite, and
# 65,536, 1e9 and infinity become 57,344, the largest finite number. NaN becomes 448 in float8_e4m3fn, and stays in
# float8_e5m2.
#
# One would guess one rule for what is out of range: NaN or infinity, as in numpy (ml_dtypes), jax and tensorflow, or
# the largest number, as in onnx's operators. A scale that is a bit too small (from a running maximum, or rounded down
# to a power of two) then costs one rounding or shows at once. Here it makes NaN of the numbers just out of range and
# hides those far out, and NaN.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'paddlepaddle==3.3.1' 'numpy==2.4.6' 'setuptools==82.0.1'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import numpy as np
import paddle


def cast(numbers, dtype):
    return paddle.to_tensor(numbers, dtype="float32", place=paddle.CPUPlace()).astype(dtype).astype("float32").numpy()


numbers = [448.0, 463.0, 464.5, 470.0, 479.0, 480.0, 481.0, 10_000.0, np.inf, -470.0, -480.0, np.nan]
found = cast(numbers, "float8_e4m3fn")
for pair in zip(numbers, found, strict=True):
    print("float8_e4m3fn: %g -> %g" % pair)
expected = [448, 448, np.nan, np.nan, np.nan, 448, 448, 448, 448, np.nan, -448, 448]
np.testing.assert_array_equal(found, np.array(expected, np.float32))

numbers = [57_344.0, 61_000.0, 61_441.0, 65_535.0, 65_536.0, 1e9, np.inf, -65_000.0, -70_000.0, np.nan]
found = cast(numbers, "float8_e5m2")
for pair in zip(numbers, found, strict=True):
    print("float8_e5m2: %g -> %g" % pair)
expected = [57_344, 57_344, np.inf, np.inf, 57_344, 57_344, 57_344, -np.inf, -57_344, np.nan]
np.testing.assert_array_equal(found, np.array(expected, np.float32))
PYTHON
