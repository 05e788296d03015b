#!/usr/bin/env bash
# came-pytorch 0.1.3, torch 2.13.0 (CPU): one step of CAME, an AdamW that keeps sums of rows and columns in place of the
# second moment, moves a weight by up to 50 learning rates. Where a gradient is 1 in every step, the 100th step is 49
# learning rates long, with noise of 10% it is 44, and with noise as large as the gradient 11. AdamW's are 1 long.
#
# One would guess a step of about one learning rate, as of AdamW, Adafactor and Lion: the README advises a third of
# AdamW's learning rate up to all of it. The update is divided by its distance from its own average, the "confidence",
# without an upper bound, so the steadier the gradients, the longer the step.
#
# Exits non-zero if the steps are shorter than ten learning rates.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'came-pytorch==0.1.3'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from came_pytorch import CAME

LR = 1e-4
found = {}
for kind in (torch.optim.AdamW, CAME):
    for noise in (0.0, 0.1, 1.0):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(64, 64))
        optimizer = kind([weight], lr=LR, weight_decay=0.0)
        for _ in range(100):
            weight.grad = 1 + noise * torch.randn(64, 64)
            before = weight.detach().clone()
            optimizer.step()
        found[kind, noise] = ((before - weight.detach()).mean() / LR).item()
        print(f"{kind.__name__}, noise {noise}: the 100th step is {found[kind, noise]:.1f} learning rates long")
assert all(found[CAME, noise] > 10 for noise in (0.0, 0.1, 1.0)), "the behaviour changed"
assert all(0.5 < found[torch.optim.AdamW, noise] < 1.5 for noise in (0.0, 0.1, 1.0))
PYTHON
