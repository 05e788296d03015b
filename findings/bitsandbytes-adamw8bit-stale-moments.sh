#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0 (CPU): AdamW8bit stops following gradients that get small beside large ones of the
# same block. 500 steps with gradients of 0.5, then 500 with 0.001, beside one gradient of 1 in each row: AdamW takes
# steps of 0.0033 learning rates by then, and AdamW8bit steps of 0.026, eight times as long. After 500 more they are
# still over three times as long.
#
# One would guess that moments in 8 bits are off by a percent or two, as weights are. A step moves a moment by a tenth
# of its distance to the gradient, and the first moment stops where this is less than half of the distance to the next
# code: at 0.014 for gradients of 0.001. Every 8-bit optimizer that rounds these codes to nearest has it.
#
# Exits non-zero if the steps of AdamW8bit come within three times those of AdamW.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'bitsandbytes==0.50.2'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import bitsandbytes as bnb
import torch


def steps(make, at=(500, 1000, 1500)):
    """The mean step of all elements but the first of each row, in learning rates; the first has gradients of 1."""
    weight, found = torch.nn.Parameter(torch.zeros(20, 256)), []
    optimizer = make([weight], lr=1e-3, weight_decay=0)
    for step in range(1, max(at) + 1):
        weight.grad = torch.full((20, 256), 0.5 if step <= 500 else 1e-3)
        weight.grad[:, 0] = 1
        before = weight.detach().clone()
        optimizer.step()
        if step in at:
            found.append(((before - weight.detach())[:, 1:].mean() / 1e-3).item())
    first = optimizer.state[weight]
    if "absmax1" in first:
        values = bnb.functional.dequantize_blockwise(
            first["state1"].flatten(), absmax=first["absmax1"], code=first["qmap1"], blocksize=256
        )
        print(f"the first moment for gradients of 0.001: {values[1].item():.4f}")
    return found


exact, low = steps(torch.optim.AdamW), steps(bnb.optim.AdamW8bit)
for name, found in (("AdamW", exact), ("AdamW8bit", low)):
    print(f"{name}: steps of {[round(f, 4) for f in found]} learning rates after 500, 1,000 and 1,500")
assert abs(low[0] - exact[0]) < 0.01 and low[1] > 5 * exact[1] and low[2] > 3 * exact[2]
PYTHON
