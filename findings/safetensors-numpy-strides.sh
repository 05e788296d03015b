#!/usr/bin/env bash
# safetensors 0.8.0, numpy 2.4.6: safetensors.numpy.save and save_file write the memory of an array, whatever its
# strides. The transpose of a matrix comes back with the right shape and its values in the order of the original, and
# every second element of an array comes back as its first half. Nothing is raised. 0.6.2 and 0.7.0 write both right.
#
# One would guess what earlier releases do, a copy in row-major order, or what safetensors.torch does, an error that
# says "call .contiguous()". Converters between frameworks transpose weights: such a file has the right names, shapes
# and sizes.
#
# Exits non-zero if the values are right, or the arrays are refused.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'numpy==2.4.6' 'safetensors==0.8.0'
"$dir/venv/bin/pip" install -q --no-deps --target "$dir/old" 'safetensors==0.7.0'
cat > "$dir/case.py" <<'PYTHON'
import sys

import numpy as np
from safetensors import __version__
from safetensors.numpy import load, save

matrix, row = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(8, dtype=np.int8)
back = load(save({"transpose": matrix.T, "every second": row[::2]}))
same = [np.array_equal(back["transpose"], matrix.T), np.array_equal(back["every second"], row[::2])]
print(f"{__version__}: {matrix.T.tolist()} comes back as {back['transpose'].tolist()}")
print(f"{__version__}: {row[::2].tolist()} comes back as {back['every second'].tolist()}")
assert same == [sys.argv[1] == "right"] * 2, "the behaviour changed"
PYTHON
PYTHONPATH="$dir/old" "$dir/venv/bin/python" "$dir/case.py" right
"$dir/venv/bin/python" "$dir/case.py" wrong
