#!/usr/bin/env bash
# numcodecs 0.16.6, numpy 2.4.6: Quantize(digits=3, dtype="f2"), the filter that keeps three decimal digits, makes
# infinity of every float16 value from 64 on, and digits=4 from 4 on. With digits=6 nothing finite is left: zeros are
# NaN. It multiplies by a power of two (1,024 for three digits) in float16. numpy's RuntimeWarning "overflow" is all
# that says so, once. float32 and float64 are right.
#
# One would guess that a filter whose parameter is an absolute precision leaves values alone that have no finer digits:
# float16's step from 64 on is 1/16. Stores of 16-bit activations and weights go through such filters to compress
# better.
#
# Exits non-zero if the large values come back.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numcodecs==0.16.6' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import numpy as np
from numcodecs import Quantize

values = np.array([0, 0.1234, 3.5, 4.5, 63, 64, 100, 1000])
found = {}
for dtype in ("f2", "f4"):
    for digits in (2, 3, 4, 6):
        codec = Quantize(digits=digits, dtype=dtype)
        found[dtype, digits] = codec.decode(codec.encode(values.astype(dtype)))
        print(f"{digits} digits, {dtype}: {found[dtype, digits].tolist()}")
        assert dtype == "f2" or np.allclose(found[dtype, digits], values, atol=0.5 * 10.0**-digits)
assert np.isinf(found["f2", 3]).tolist() == [False] * 5 + [True] * 3
assert np.isinf(found["f2", 4]).tolist() == [False] * 3 + [True] * 5
assert not np.isfinite(found["f2", 6]).any() and np.isnan(found["f2", 6][0])
PYTHON
