#!/usr/bin/env bash
# torch 2.13.0 (x86 CPU): torch.ao.quantization.quantize_dynamic(model, {nn.Linear}) rounds inputs to 7 bits. A layer that
# multiplies by 1 gives 129 different outputs for inputs from -1 to 1, and the error from rounding the inputs of an ordinary
# layer is 1.8%. So it is with the engines x86 (the default), fbgemm and onednn; qnnpack has 256 outputs and 0.8%.
#
# One would guess 8 bits: the layer's name is DynamicQuantizedLinear, its printed form says qint8, and neither it nor
# quantize_dynamic has an argument for the range of inputs. The bit is kept free for instructions that add products in 16
# bits, and processors with VNNI, which add them in 32, pay for it too.
#
# Exits non-zero if a default engine uses more than 130 codes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch import nn


def quantized(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8)


print("engine by default:", torch.backends.quantized.engine)
for engine in ("x86", "fbgemm", "onednn", "qnnpack"):
    if engine not in torch.backends.quantized.supported_engines:
        continue
    torch.backends.quantized.engine = engine
    # One batch of 10,001 rows with one input each: one scale for all.
    outputs = quantized(torch.ones(1, 1))(torch.linspace(-1, 1, 10001).unsqueeze(1)).unique().numel()
    torch.manual_seed(0)
    model, x = quantized(torch.randn(64, 256)), torch.randn(32, 256)
    exact = x @ model[0].weight().dequantize().T
    error = ((model(x) - exact).norm() / exact.norm()).item()
    print(f"{engine}: {outputs} different outputs, error from rounding the inputs {error:.4f}")
    assert (outputs <= 130 and error > 0.014) if engine != "qnnpack" else (outputs > 250 and error < 0.012)
PYTHON
