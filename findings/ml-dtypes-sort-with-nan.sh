#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6: np.sort of an array of bfloat16 or float8 with a NaN in it does not sort the numbers.
# [3, NaN, 1, 2, NaN, -1] comes back as it was, and np.unique of [1, NaN, 1, NaN, 1] too. Of 1,000 numbers with 100 NaNs
# among them the largest is not the last one, and the number in the middle is 0.09, where the median is -0.06. Nothing
# warns.
#
# One would guess what numpy documents and does for its own types, float16 among them: NaNs go to the end, and the rest
# is sorted. torch does so for bfloat16, too. numpy's order for types of other packages asks "less than" alone, which is
# false for NaN on both sides.
#
# Exits non-zero if the numbers are sorted.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

values = np.array([3, np.nan, 1, 2, np.nan, -1], np.float32)
many = np.random.default_rng(0).normal(size=1000).astype(np.float32)
many[::10] = np.nan
for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16):
    found = np.sort(values.astype(kind)).astype(np.float32)
    rest = np.sort(many.astype(kind)).astype(np.float32)
    rest = rest[~np.isnan(rest)]
    wrong = (np.diff(rest) < 0).sum()
    again = np.unique(np.float32([1, np.nan, 1, np.nan, 1]).astype(kind))
    print(f"{kind.__name__}: {found}, unique of 1, nan, 1, nan, 1: {again}")
    middle = f"the middle one is {rest[len(rest) // 2]:.3f}, the median {np.median(rest):.3f}"
    print(f"    of 1,000 {wrong} are below the one before; the last is {rest[-1]} of at most {rest.max()}, {middle}")
    if kind is np.float16:
        assert found[:4].tolist() == [-1, 1, 2, 3] and wrong == 0 and len(again) == 2
    else:
        assert found[:4].tolist() != [-1, 1, 2, 3] and wrong > 10 and len(again) > 2, "the behaviour changed"
PYTHON
