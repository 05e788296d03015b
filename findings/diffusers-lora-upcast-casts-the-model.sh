#!/usr/bin/env bash
# diffusers 0.42.1: model.save_lora_adapter(folder, upcast_before_saving=True) casts the model itself. The whole model in
# memory, base weights included, is float32 afterwards and stays so: twice the memory in the middle of a training that
# saves checkpoints.
#
# One would guess that the tensors are cast which are saved: the docstring says "Whether to cast the underlying model to
# `torch.float32` before serialization", and a function that saves returns the model as it was.
#
# Exits non-zero if the model keeps its dtype.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'diffusers==0.42.1' 'peft==0.21.2' 'accelerate==1.15.0' 'transformers==5.23.0' \
    'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - "$dir/adapter" <<'PYTHON'
import sys

import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

sizes = dict(num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2, in_channels=16)
sizes |= dict(joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12))
model = FluxTransformer2DModel(**sizes).bfloat16()
model.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
found = []
for upcast in (False, True):
    model.save_lora_adapter(sys.argv[1], upcast_before_saving=upcast)
    found.append({p.dtype for p in model.parameters()})
    print("upcast_before_saving:", upcast, "-> the model in memory:", found[-1])
assert found == [{torch.bfloat16}, {torch.float32}], "the behaviour changed"
PYTHON
