#!/usr/bin/env bash
# torchao 0.18.0: quantize_(model, NVFP4WeightOnlyConfig()) turns a weight of zeros into NaN, and the layer's output with
# it: the scale of the whole tensor is 0 then, and blocks are divided by it. With use_dynamic_per_tensor_scale=False the
# weight stays zero.
#
# One would guess that zeros are the easiest weight to quantize. Zero-initialised layers are common: LoRA's B, the last
# layer of a residual branch, adaLN's modulation.
#
# Exits non-zero if the weight is not NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'torchao==0.18.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from torch import nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import quantize_


def output(config) -> torch.Tensor:
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    nn.init.zeros_(model[0].weight)
    quantize_(model, config)
    return model(torch.ones(1, 64, dtype=torch.bfloat16))


default, single = output(NVFP4WeightOnlyConfig()), output(NVFP4WeightOnlyConfig(False))
print(f"output of a weight of zeros: {default.unique().tolist()[:1]} by default, {single.unique().tolist()} without a scale a tensor")
assert default.isnan().all() and not single.any()
PYTHON
