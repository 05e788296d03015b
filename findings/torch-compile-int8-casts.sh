#!/usr/bin/env bash
# torch 2.13.0 (CPU with AVX2 or later): x.to(torch.int8) of float32 values beyond the range keeps the low byte in eager
# mode (200 is -56, 1e9 is 0) and saturates under torch.compile (127). NaN is 0 and -128. To uint8 both keep the low byte.
#
# One would guess that the same program gives the same codes, or that uint8 differs as int8 does. A quantizer that forgets
# its clamp passes its compiled tests and fails in eager mode, or the other way round.
#
# Exits non-zero if eager and compiled agree.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' setuptools
"$dir/venv/bin/python" - <<'PYTHON'
import torch


@torch.compile
def cast(x, dtype):
    return x.to(dtype)


x = torch.tensor([100.0, 200.0, -200.0, 1e9, float("nan")])
found = {}
for dtype in (torch.int8, torch.uint8):
    eager, compiled = x.to(dtype).tolist(), cast(x.repeat(16), dtype)[:5].tolist()
    found[dtype] = eager, compiled
    print(f"{x.tolist()} to {dtype}: eager {eager}, compiled {compiled}")
assert found[torch.int8][0][:4] == [100, -56, 56, 0]
assert found[torch.int8][1][:4] == [100, 127, -128, 127]
assert found[torch.uint8][0][:2] == found[torch.uint8][1][:2] == [100, 200]
assert found[torch.uint8][0][2] == found[torch.uint8][1][2] == 56
PYTHON
