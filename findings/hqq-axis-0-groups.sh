#!/usr/bin/env bash
# hqq 0.2.8.post1, torch 2.13.0 (CPU): with axis=0, the default of Quantizer.quantize, a group of 64 weights is a
# column's weights in rows that lie far apart. Of a weight with 256 rows the first group has rows 0, 4, 8 and so on up
# to 252; of 4,096 rows each 64th. Rows next to each other share no scale. Here 64 rows of a hundred times the others'
# size, such as one head's, spoil all others: their error is 680%. With axis=1 it is 9%.
#
# One would guess that a group is 64 neighbours, along the axis that is named: rows 0 to 63 of a column, as it is the
# first 64 columns of a row with axis=1. Then one such head would be a group of its own. The order of rows, which a
# model's outputs do not depend on, decides how well a layer is quantized, and two layers stacked are not quantized as
# each alone.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'tqdm==4.70.1' 'termcolor==3.3.0' 'einops==0.8.2' \
    'transformers==5.23.0' 'accelerate==1.15.0'
"$dir/venv/bin/pip" install -q --no-deps 'hqq==0.2.8.post1'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import inspect

import torch
from hqq.core.quantize import Quantizer

torch.manual_seed(0)
assert inspect.signature(Quantizer.quantize).parameters["axis"].default == 0, "the behaviour changed"


def rounded(weight, axis):
    options = dict(nbits=4, group_size=64, optimize=False, device="cpu", compute_dtype=torch.float32)
    return Quantizer.dequantize(*Quantizer.quantize(weight, axis=axis, **options))


weight = torch.randn(256, 128)
other = weight.clone()
other[0, 0] = 50
changed = (rounded(other, 0) != rounded(weight, 0)).any(1).nonzero().flatten()
print("rows that share a scale with row 0:", changed.tolist())
assert not (changed % 4).any() and int(changed.max()) > 200 and len(changed) > 32, "the behaviour changed"

large = weight.clone()
large[:64] *= 100
errors = [float((rounded(large, axis) - large)[64:].norm() / large[64:].norm()) for axis in (0, 1)]
print("error of the rows beside 64 large ones: axis=0 {:.2f}, axis=1 {:.2f}".format(*errors))
assert errors[0] > 5 and errors[1] < 0.1, "the behaviour changed"
PYTHON
