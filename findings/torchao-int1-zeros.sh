#!/usr/bin/env bash
# torchao 0.18.0 (CPU): IntxWeightOnlyConfig(weight_dtype=torch.int1) makes zeros of every weight: each code is 0, and
# the layer's output is 0. Nothing warns. int1 holds -1 and 0; the symmetric scale, the default, is the group's largest
# magnitude over half a step, so that the largest weight is half a step from zero and rounds to it.
# SYMMETRIC_NO_CLIPPING_ERR gives NaN, since the largest code is 0, and ASYMMETRIC an error of 96%.
#
# One would guess the sign and a size for each group, as binary networks have it, which keeps 64% of the power of normal
# weights (an error of 0.60), or an error for a type that the rule of the scales cannot serve. int2 has an error of
# 0.47.
#
# Exits non-zero if a code other than 0 is stored, or the type is refused.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'torchao==0.18.0'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.quant_primitives import MappingType


def quantized(dtype, mapping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False))
    weight = model[0].weight.data.normal_().clone()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=dtype, granularity=PerGroup(32), mapping_type=mapping))
    low = model[0].weight
    error = ((low.dequantize() - weight).norm() / weight.norm()).item()
    print(f"{dtype} {mapping.name}: codes {low.qdata.unique().tolist()}, error {error:.2f}")
    return low.qdata.unique().tolist(), error, model(torch.randn(4, 256)).abs().max().item()


codes, error, output = quantized(torch.int1, MappingType.SYMMETRIC)
assert codes == [0] and error == 1 and output == 0
assert quantized(torch.int1, MappingType.SYMMETRIC_NO_CLIPPING_ERR)[1] != error  # NaN
assert quantized(torch.int1, MappingType.ASYMMETRIC)[1] > 0.9
assert quantized(torch.int2, MappingType.SYMMETRIC)[1] < 0.5
weight = torch.randn(64, 8, 32)
signs = weight.sign() * weight.abs().mean(-1, keepdim=True)
print(f"the sign and a size for each group: error {(signs - weight).norm() / weight.norm():.2f}")
PYTHON
