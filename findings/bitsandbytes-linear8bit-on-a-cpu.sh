#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0 (CPU): Linear8bitLt rounds no inputs on a CPU. Its outputs are those of the int8
# weight as float numbers, to 1e-7, and `threshold`, the size from which inputs stay in high precision, changes no bit.
# With one input of fifty times the others' size, int8 inputs would be off by 3.9% here, and the layer is off by 0.8%.
#
# One would guess LLM.int8(): the method is int8 inputs times int8 weights, with a threshold for outliers, and a GPU
# computes that. An evaluation on a CPU therefore says nothing about the accuracy on a GPU, nor about the threshold.
#
# Exits non-zero if the inputs are rounded, or the threshold changes the outputs.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'bitsandbytes==0.50.2'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import bitsandbytes as bnb
import torch

torch.manual_seed(0)
weight, x = torch.randn(128, 256) * 0.05, torch.randn(16, 256)
x[:, 3] *= 50


def error(found, true):
    return ((found - true).norm() / true.norm()).item()


outputs = []
for threshold in (0.0, 6.0):
    layer = bnb.nn.Linear8bitLt(256, 128, bias=False, has_fp16_weights=False, threshold=threshold)
    layer.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    outputs.append(layer(x))
    stored = layer.state.CB.float() * layer.state.SCB.float()[:, None] / 127
    step = x.abs().amax(1, keepdim=True) / 127
    exact, rounded = x @ stored.T, (x / step).round() * step @ stored.T
    print(
        f"threshold {threshold}: off by {error(outputs[-1], x @ weight.T):.4f}, from float inputs by "
        f"{error(outputs[-1], exact):.1e}, from int8 inputs by {error(outputs[-1], rounded):.4f}"
    )
    assert error(outputs[-1], exact) < 1e-6 and error(rounded, exact) > 0.03
assert torch.equal(*outputs)
PYTHON
