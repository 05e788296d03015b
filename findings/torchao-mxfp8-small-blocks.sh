#!/usr/bin/env bash
# torchao 0.18.0 (CPU): MXTensor.to_mx gives blocks whose largest value is below 2**-118 back as half of their values, by
# the default rule of the scales (FLOOR), and as zeros by RCEIL. It divides by 2**-126, or by 1, and stores the byte 0,
# which it decodes as 2**-127. Nothing is subnormal yet: 2**-118 is 256 times the smallest normal float32 number.
#
# One would guess that such a block keeps the precision of any other, since a float8 code needs 2**-9 of its scale at
# least, and bfloat16 and float32 hold the values; or that it underflows to zero as a whole.
#
# Exits non-zero if the values change.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'torchao==0.18.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

for largest, share in ((2.0**-117, {1.0}), (2.0**-119, {0.5})):
    x = torch.full((1, 32), largest, dtype=torch.bfloat16)
    found = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, Mode.FLOOR).dequantize()
    print(f"{largest} comes back as {found[0, 0].item()} by FLOOR")
    assert set((found / x).unique().tolist()) == share
x = torch.full((1, 32), 2.0**-119, dtype=torch.bfloat16)
assert not MXTensor.to_mx(x, torch.float8_e4m3fn, 32, Mode.RCEIL).dequantize().any()
PYTHON
