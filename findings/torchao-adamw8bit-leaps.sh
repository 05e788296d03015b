#!/usr/bin/env bash
# torchao 0.18.0 (CPU, with g++): one step of AdamW8bit moves a parameter by thousands of learning rates where small gradients stand
# beside large ones in a block of 256. With gradients of size 1 and 1e-4 in turn, the largest step of 20 is above 1,000
# learning rates; torch's AdamW stays below 3, and AdamW4bit, whose second moment has no zero, too.
#
# One would guess that Adam's step is about the learning rate at any size of the gradients, and that 8-bit moments add some
# noise to it. The second moment of a gradient of 1e-4 is 1e-8 of the block's largest, which becomes the code 0, and the
# first moment is 1e-4 of its largest, which does not: the step is then the first moment divided by eps.
#
# Exits non-zero if no step is above 100 learning rates.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'torchao==0.18.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from torchao.optim import AdamW4bit, AdamW8bit

lr = 1e-3


def largest_step(optimizer_class):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = optimizer_class([parameter], lr=lr, weight_decay=0.0)
    size = torch.ones(64, 256)
    size[:, 1::2] = 1e-4
    largest = 0.0
    for _ in range(20):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(64, 256) * size
        optimizer.step()
        largest = max(largest, ((parameter.detach() - before).abs().max() / lr).item())
    return largest


for optimizer in (torch.optim.AdamW, AdamW4bit, AdamW8bit):
    step = largest_step(optimizer)
    print(f"{optimizer.__name__}: the largest of 20 steps is {step:.1f} learning rates")
    assert (step > 100) if optimizer is AdamW8bit else (step < 3)
PYTHON
