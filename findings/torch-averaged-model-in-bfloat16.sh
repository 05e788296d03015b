#!/usr/bin/env bash
# torch 2.13.0: torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)) of a bfloat16 model
# keeps the average in bfloat16, where a step of a thousandth of the way is rounded away. Weights start at 1 and are 1.5
# for 10,000 updates: the average is still 1.0, and 1.49994 in float32. Nothing warns.
#
# One would guess that the average is a little rough, or kept in more bits than the weights, since it is there to
# collect small steps. It does not move at all: who evaluates or saves the EMA of a model in 16 bits gets the model of
# the first call.
#
# Exits non-zero if the bfloat16 average moves.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

found = {}
for dtype in (torch.float32, torch.bfloat16):
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(model)  # the first one copies
    nn.init.constant_(model.weight, 1.5)
    for _ in range(10_000):
        average.update_parameters(model)
    found[dtype] = average.module.weight[0, 0].item()
    print(f"{dtype}: the average of 10,000 weights of 1.5 is {found[dtype]:.5f}")
assert found[torch.float32] > 1.49 and found[torch.bfloat16] == 1.0
PYTHON
