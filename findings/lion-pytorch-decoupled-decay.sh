#!/usr/bin/env bash
# lion-pytorch 0.2.5, torch 2.13.0 (CPU): Lion(decoupled_weight_decay=True) does not multiply the weight decay by the
# learning rate. With weight_decay=0.1 a weight loses 10% in every step, whatever the learning rate: after 50 steps with
# gradients of zero, 0.5% of it is left. Without the flag the same call leaves 99.95% at a learning rate of 1e-4.
#
# One would guess that the flag chooses AdamW's kind of decay, which the field calls decoupled: weights are multiplied
# by 1 - lr * weight_decay, apart from the gradient. Lion has that without the flag. With it, the decay is divided by
# the first learning rate and only follows a schedule's factor, so that it has to be set 10,000 times as small.
#
# Exits non-zero if the flag keeps more than 1% of the weights.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'lion-pytorch==0.2.5'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from lion_pytorch import Lion


def left(make, steps=50):
    """The share of a weight that is left after steps with gradients of zero."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = make([weight])
    for _ in range(steps):
        weight.grad = torch.zeros(4)
        optimizer.step()
    return weight.mean().item()


for lr in (1e-4, 1e-3):
    adam = left(lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.1))
    plain = left(lambda p: Lion(p, lr=lr, weight_decay=0.1))
    flag = left(lambda p: Lion(p, lr=lr, weight_decay=0.1, decoupled_weight_decay=True))
    small = left(lambda p: Lion(p, lr=lr, weight_decay=0.1 * lr, decoupled_weight_decay=True))
    print(f"lr {lr}: AdamW {adam:.4f}, Lion {plain:.4f}, with the flag {flag:.4f}, flag and 0.1 * lr {small:.4f}")
    assert abs(plain - adam) < 1e-4 and abs(small - adam) < 1e-4
    assert flag < 0.01
PYTHON
