#!/usr/bin/env bash
# diffusers 0.42.1: model.save_pretrained(folder) after model.add_adapter(…) writes the layers with adapters under PEFT's
# names (to_q.base_layer.weight, to_q.lora_A.default.weight), and nothing is said. from_pretrained looks for to_q.weight.
# It logs that these weights "are newly initialized", returns the model, and they are on the device "meta": not
# initialized at all.
#
# One would guess that the folder has the base weights under their own names, as transformers' save_pretrained leaves
# them to the adapter's file, or that one of the two calls raises; and that newly initialized weights have values.
#
# Exits non-zero if the weights are there.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'diffusers==0.42.1' 'peft==0.21.2' 'accelerate==1.15.0' 'transformers==5.23.0' \
    'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - "$dir/model" <<'PYTHON'
import sys

from diffusers import FluxTransformer2DModel
from peft import LoraConfig

sizes = dict(num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2, in_channels=16)
sizes |= dict(joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(8, 12, 12))
model = FluxTransformer2DModel(**sizes)
model.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
model.save_pretrained(sys.argv[1])
loaded = FluxTransformer2DModel.from_pretrained(sys.argv[1])
devices = {name: str(p.device) for name, p in loaded.named_parameters()}
print("to_q:", {name: device for name, device in devices.items() if "to_q." in name})
print("others:", {device for name, device in devices.items() if "to_q." not in name})
assert {device for name, device in devices.items() if "to_q." in name} == {"meta"}, "the behaviour changed"
PYTHON
