#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU): a config.json whose "quantization_config" names a method that this process does
# not know (a plug-in that was not imported, a newer release) loads without an error. The loader logs a warning, and every
# weight that the folder stores in parts (here "….weight_codes") starts from random values.
#
# One would guess an error: the config says that the weights are stored in a way that this process cannot read, and
# `AutoHfQuantizer.from_config` does raise ValueError for the same name.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.23.0' 'safetensors==0.8.0' 'numpy==2.4.6'
cd "$work"
"$work/venv/bin/python" - <<'PY'
import json

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers.auto import AutoHfQuantizer

torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
model.save_pretrained("folder")
tensors = load_file("folder/model.safetensors")
name = "model.layers.0.mlp.up_proj.weight"
tensors[f"{name}_codes"] = tensors.pop(name).mul(127).round().to(torch.int8)
save_file(tensors, "folder/model.safetensors", metadata={"format": "pt"})
config = json.load(open("folder/config.json"))
config["quantization_config"] = {"quant_method": "some_method"}
json.dump(config, open("folder/config.json", "w"))

tokens = torch.arange(8)[None]
outputs = []
for seed in (1, 2):
    torch.manual_seed(seed)
    loaded, info = AutoModelForCausalLM.from_pretrained("folder", output_loading_info=True)
    outputs.append(loaded.eval()(tokens).logits)
    print("loaded without an error; missing:", sorted(info["missing_keys"]))
distance = float((outputs[0] - outputs[1]).abs().max())
print("two loads differ by", distance)
try:
    AutoHfQuantizer.from_config({"quant_method": "some_method"})
    raised = False
except ValueError as error:
    raised = True
    print("from_config:", str(error)[:60])
assert info["missing_keys"] == {name} and distance > 0 and raised, "the behaviour changed"
PY
