#!/usr/bin/env bash
# torch 2.13.0 (CPU): x.to(torch.float8_e8m0fnu) drops the sign: -3 becomes 4, where the type has no negative values and
# has a NaN. It rounds to the nearest power of two with ties to the larger one (1.5 and 3 become 2 and 4), where other casts
# of torch take the even mantissa; and 0 becomes 2**-127, since the type has no zero.
#
# One would guess NaN for a negative number, as float8_e4m3fnuz gives for what it cannot hold, or an error. Scales of
# blocks that were computed with a sign (from the largest value by magnitude, as GGUF's formats do) change it without a
# word.
#
# Exits non-zero if the values change.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch

x = torch.tensor([-3.0, -0.25, 1.49, 1.5, 3.0, 0.0])
scales = x.to(torch.float8_e8m0fnu).float().tolist()
print(dict(zip(x.tolist(), scales, strict=True)))
assert scales == [4.0, 0.25, 1.0, 2.0, 4.0, 2.0**-127]
PYTHON
