#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) of an optimizer that
# has not stepped yet makes its states by optimizer.step() with zero gradients and a learning rate of 0. Adam then counts
# that step: the run's first update is its second, with the bias correction of step 2 and moments that hold half of what
# they should. It is 0.74 of the learning rate instead of 1.0.
#
# One would guess that a function named "get" leaves the optimizer as it is. A program that calls it at its start, to have
# a template into which dcp.load writes when there is a checkpoint, trains otherwise if there is none.
#
# Exits non-zero if the first update is that of an optimizer that was not asked.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(asked: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    if asked:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    moved = (model.weight - before).abs().mean().item()
    return moved / 1e-3, optimizer.state[model.weight]["step"].item()


plain, asked = first_update(False), first_update(True)
print(f"first update / lr, step count: {plain[0]:.3f}, {plain[1]:.0f}; after the getter: {asked[0]:.3f}, {asked[1]:.0f}")
assert abs(plain[0] - 1.0) < 0.01 and plain[1] == 1
assert abs(asked[0] - 0.744) < 0.01 and asked[1] == 2
PYTHON
