#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6: -x and abs(x) of an int4 array hold numbers that int4 does not have. -(-8) is 8, and stays 8 in
# comparisons, in casts to int8 and float32, and in sorts. It is not equal to -8, which the same bits are once they are packed.
# -x of uint4 is negative: -15 for 15. In int2, -(-2) is 2.
#
# One would guess that the result wraps around as that of int8 does (-(-128) is -128), since x + x, x * x and 0 - x of int4 do:
# 0 - (-8) is -8. ml_dtypes keeps 4 bits in a byte, and negation does not cut the byte.
#
# Exits non-zero if -(-8) is -8, or raises.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

x = np.array([-8, -7, 7], ml_dtypes.int4)
zero = np.zeros(3, ml_dtypes.int4)
print("int4", x, "negated", -x, "abs", np.abs(x), "0 - x", zero - x, "as int8", (-x).astype(np.int8))
print("bytes of -x", (-x).view(np.uint8), "equal to -8:", bool((-x)[0] == ml_dtypes.int4(-8)))
unsigned, pair = np.array([1, 15], ml_dtypes.uint4), np.array([-2], ml_dtypes.int2)
print("uint4", unsigned, "negated", (-unsigned).astype(np.int32), "int2", pair, "negated", (-pair).astype(np.int32))
assert (-x).astype(np.int8)[0] == np.abs(x).astype(np.int8)[0] == 8 and (zero - x).astype(np.int8)[0] == -8
assert (-x)[0] != ml_dtypes.int4(-8) and (-x).astype(np.float32).max() == 8
assert (-unsigned).astype(np.int32).tolist() == [-1, -15] and (-pair).astype(np.int32)[0] == 2
assert (-np.array([-128], np.int8))[0] == -128
PYTHON
