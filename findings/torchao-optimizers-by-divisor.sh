#!/usr/bin/env bash
# torchao 0.18.0 (CPU, with g++): AdamW8bit, AdamW4bit and AdamWFp8 keep the moments of a parameter in the parameter's own dtype if its
# number of elements is not a multiple of the block size (256, or 128 for 4 bits). GPT-2 XL's embedding, 50,257 x 1,600, is
# one: an odd number of rows and 64 x 25 columns. Its moments in bfloat16 take 322 MB, and would take 163 MB in 8 bits.
# With 504 rows of 1,600 the moments are in low bits, and with 503 they are not. Nothing warns.
#
# One would guess that the last block is padded, as in bitsandbytes, or that rows or channels decide. The odd vocabulary is in
# the largest parameter of the model, so the one that matters most is left out.
#
# Exits non-zero if such moments are in 8 bits.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'torchao==0.18.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8


def moment(optimizer_class, rows):
    parameter = torch.nn.Parameter(torch.zeros(rows, 1600, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = optimizer_class([parameter])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return optimizer.state[parameter]["exp_avg"], [str(w.message) for w in caught if "block" in str(w.message)]


assert 503 * 1600 % 128 == 50257 * 1600 % 128 == 64
for optimizer in (AdamW8bit, AdamW4bit, AdamWFp8):
    for rows in (503, 504):
        state, told = moment(optimizer, rows)
        print(f"{optimizer.__name__}: {rows} x 1600 elements, moments are a {type(state).__name__}, warnings {told}")
        assert (type(state) is torch.Tensor) == (rows == 503) and not told
PYTHON
