#!/usr/bin/env bash
# executorch 1.5.1, torchao 0.18.0, torch 2.13.0 (CPU): XNNPACKQuantizer with one scale a channel rounds small weights to zero.
# int8 weights of size 1 have an error of 1% in the output, those of 1e-3 7%, those of 1e-4 70%, and a layer of 1e-5 gives
# zeros. No scale is below 2**-12 (its observers have eps=2**-12), so weights of less than 0.031 do not use all codes.
#
# One would guess that scales of channels, in float32, take the error out of the size of a channel: it is what they are for.
# Weights of 1e-3 and less are usual where a channel is nearly pruned, or where a normalization follows.
#
# Exits non-zero if the error stays the same.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'executorch==1.5.1' 'torchao==0.18.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torch import nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

torch.manual_seed(0)
weight, x = torch.randn(64, 64), torch.randn(32, 64)


def error(size: float) -> float:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.copy_(weight * size)
    config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    program = torch.export.export(model, (x,)).module()
    prepared = prepare_pt2e(program, XNNPACKQuantizer().set_global(config))
    prepared(x)
    converted = convert_pt2e(prepared)
    expected = model(x)
    return float((converted(x) - expected).norm() / expected.norm())


found = {size: round(error(size), 3) for size in (1.0, 1e-2, 1e-3, 1e-4, 1e-5)}
print("relative error of the output, by the size of the weights:", found)
assert found[1.0] < 0.02 and found[1e-2] < 0.02
assert found[1e-3] > 0.05 and found[1e-4] > 0.5 and found[1e-5] == 1.0
PYTHON
