#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6: the sum of an int4 array is int4. 7 + 7 + 7 is 5, the mean of three sevens is 1, and cumsum
# turns negative. Products of matrices are int8, whose low byte is kept: [7, 7, 7] @ [7, 7, 7] is -109. Nothing warns.
#
# One would guess int64, which is what numpy's sum makes of int8 (and of every integer below 64 bits), 21 and 147. Sums of
# codes, and of products of codes with a zero point, are what a quantized product is checked with. `sum(dtype=np.int64)` and
# codes that are cast to int8 or int32 first are right.
#
# Exits non-zero if a sum is right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'ml_dtypes==0.6.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

for kind in (ml_dtypes.int4, np.int8):
    codes = np.array([7, 7, 7], kind)
    total, mean, product = codes.sum(), codes.mean(), codes @ codes
    print(f"{np.dtype(kind)}: sum {total} ({total.dtype}), mean {mean}, cumsum {codes.cumsum().tolist()}, dot {product}")
    if kind is ml_dtypes.int4:
        assert (int(total), int(mean), int(product)) == (5, 1, -109)
        assert np.dtype(total.dtype) == ml_dtypes.int4 and product.dtype == np.int8
    else:
        assert (int(total), float(mean)) == (21, 7.0)
assert np.array([7, 7, 7], ml_dtypes.int4).sum(dtype=np.int64) == 21
PYTHON
