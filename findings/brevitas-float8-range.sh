#!/usr/bin/env bash
# brevitas 0.13.4: Fp8e4m3WeightPerTensorFloat has numbers up to 480, and Fp8e5m2WeightPerTensorFloat up to 114,688. The
# types of torch, ONNX and GPUs end at 448 and 57,344. The scale is the largest weight over 480, so the largest weight
# of each layer is one that float8_e4m3fn does not have: stored in it, it is 448, 6.7% less. In float8_e5m2 half of the
# range is missing: 114,688 is infinite.
#
# One would guess that a quantizer named float8 e4m3 rounds to what hardware stores, so that values / scale are in the
# type. Here NaN and infinity have no codes, and their codes are numbers. Only the quantizers named "...OCP..." end at
# 448 and 57,344. In training nothing shows: the error of the weights is the same.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'brevitas==0.13.4'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from brevitas.nn import QuantLinear
from brevitas.quant.experimental.float import Fp8e4m3WeightPerTensorFloat, Fp8e5m2WeightPerTensorFloat
from brevitas.quant.experimental.float_quant_ocp import Fp8e4m3OCPWeightPerTensorFloat, Fp8e5m2OCPWeightPerTensorFloat

torch.manual_seed(0)
for kind, dtype, largest in (
    (Fp8e4m3WeightPerTensorFloat, torch.float8_e4m3fn, 480),
    (Fp8e4m3OCPWeightPerTensorFloat, torch.float8_e4m3fn, 448),
    (Fp8e5m2WeightPerTensorFloat, torch.float8_e5m2, 114_688),
    (Fp8e5m2OCPWeightPerTensorFloat, torch.float8_e5m2, 57_344),
):
    layer = QuantLinear(64, 64, bias=False, weight_quant=kind)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64))
        weight = layer.quant_weight()
        codes = (weight.value / weight.scale).abs()
    top = codes.max()
    print(f"{kind.__name__}: up to {float(top):,.0f}, in {dtype} {float(top.to(dtype)):,.0f}")
    assert abs(float(top) - largest) < 0.01 * largest, "the behaviour changed"
    assert (largest > torch.finfo(dtype).max) == ("OCP" not in kind.__name__)
PYTHON
