#!/usr/bin/env bash
# numpy 2.4.6 with ml_dtypes 0.6.0: np.histogram of an array in ml_dtypes.float8_e4m3fn rounds the edges of its bins to
# float8. Of 20 bins from -4 to 3.5 the widths are 0.25 to 0.5 instead of 0.375, so bins in the tail count 6 and 40 where
# 20 and 26 are right. 100 bins end in "Too many bins for data range". The same values in float32 are counted right.
#
# One would guess edges in float64, which numpy takes for integers of any width, or float32. The histogram of a quantized
# weight is made to see its shape, and bins of two widths give a normal distribution dents.
#
# Exits non-zero if the bins have one width.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import ml_dtypes
import numpy as np

values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
counts, edges = np.histogram(values, 20)
right, right_edges = np.histogram(values.astype(np.float32), 20)
widths = np.diff(edges.astype(np.float64))
print(f"20 bins: edges {edges.dtype}, widths {widths.min():.3f} to {widths.max():.3f}")
print("counts", counts, "\nright ", right)
assert edges.dtype == ml_dtypes.float8_e4m3fn and widths.max() > 1.5 * widths.min() and (counts != right).sum() > 4
assert right_edges.dtype == np.float32 and np.allclose(np.diff(right_edges), 0.375)
try:
    np.histogram(values, 100)
except ValueError as error:
    print("100 bins:", error)
else:
    raise AssertionError("100 bins are counted")
codes, edges = np.histogram(np.arange(-128, 128, dtype=np.int8), 20)
print("int8: edges", edges.dtype, "widths", np.unique(np.diff(edges).round(9)))
assert edges.dtype == np.float64
PYTHON
