#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mx.to_fp8, float8 e4m3, makes 448 of NaN, a number as good as any other, and the same of infinity. The
# format has a code for NaN, and mx.from_fp8 reads it: the byte 0x7f comes back as NaN, but no input writes it.
#
# One would guess that NaN stays NaN, as in torch, ml_dtypes and every cast of mlx itself between floating types, or that
# the library has a variant of e4m3 without NaN. A check for NaN behind the cast finds nothing, and a broken activation
# becomes the largest one of its tensor.
#
# Exits non-zero if NaN stays NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4
"$dir/venv/bin/python" - <<'PYTHON'
import math

import mlx.core as mx

x = mx.array([1.0, 500.0, math.inf, math.nan, -math.nan])
codes = mx.to_fp8(x)
back = mx.from_fp8(codes, mx.float32).tolist()
read = mx.from_fp8(mx.array([0x7F, 0xFF], dtype=mx.uint8), mx.float32).tolist()
half = x.astype(mx.bfloat16).astype(mx.float32).tolist()
print("1, 500, infinity, NaN, -NaN through float8:", back, "as bytes", [hex(code) for code in codes.tolist()])
print("bytes 0x7f and 0xff:", read, "through bfloat16:", half)
assert back[:3] == [1.0, 448.0, 448.0] and abs(back[3]) == abs(back[4]) == 448.0
assert all(map(math.isnan, read)) and math.isnan(half[3])
PYTHON
