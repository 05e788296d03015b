#!/usr/bin/env bash
# bitsandbytes 0.50.2 (CPU): quantize_4bit(..., compress_statistics=True) stores the scales of blocks in 8 bits, less their
# mean. Where one weight is far larger than the others, the scales of ordinary blocks lie below the rounding of that
# difference, and come back negative: all weights of such a block change their sign. Here one weight of 16,384 is 100 and
# the others are about 0.001; nine tenths of all signs are wrong. Without double quantization none is.
#
# One would guess that scales, which are largest magnitudes, are never negative, and that the cost of compressing them is a
# rounding error of the size.
#
# Exits non-zero if no sign flips.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'bitsandbytes==0.50.2' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import bitsandbytes.functional as F
import torch

torch.manual_seed(0)
x = torch.randn(256, 64) * 1e-3
x[0, 0] = 100.0
flipped = {}
for double in (False, True):
    codes, state = F.quantize_4bit(x, quant_type="nf4", compress_statistics=double)
    flipped[double] = int((F.dequantize_4bit(codes, state) * x < 0).sum())
print(f"signs that flip, of {x.numel()}: {flipped[False]} plain, {flipped[True]} with double quantization")
assert flipped[False] == 0 and flipped[True] > x.numel() // 2
PYTHON
