#!/usr/bin/env bash
# torch 2.13.0 (CPU, torch.compile's default backend, with g++): in a compiled function, the first 100 columns of
# scale.repeat_interleave(32, -1), multiplied by 1, are the 96 columns of three whole groups. The last four are never
# written: they hold what was in that memory before, without an error or a warning. Eager mode computes all 100, and so does
# a compiled slice at a whole number of groups.
#
# One would guess that torch.compile gives eager's values, up to rounding. Scales of groups are spread over a row like this
# wherever the row is not a multiple of the group. Multiplying a padded row as [groups, 32] and slicing the product is
# computed whole.
#
# Exits non-zero if the values change.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
TORCHINDUCTOR_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" - <<'PYTHON'
import torch


def spread(scale):
    return scale.repeat_interleave(32, -1)[:, :100] * 1


scale = torch.ones(24, 4)
compiled = torch.compile(spread)
compiled(scale)
wrong = torch.zeros(24, 100, dtype=torch.bool)
for _ in range(20):
    torch.full((24, 100), 7.0)  # freed at once: the next tensor of this size takes its memory
    wrong |= compiled(scale) != spread(scale)
print("columns that differ from eager mode:", wrong.any(0).nonzero().flatten().tolist())
assert wrong.any(0).nonzero().flatten().tolist() == [96, 97, 98, 99]
PYTHON
