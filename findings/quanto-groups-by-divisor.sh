#!/usr/bin/env bash
# optimum-quanto 0.2.7: the size of the groups of qint4 and qint2 weights follows from the number of inputs. 1,024 inputs get
# groups of 128 and lose 10% of the weight in 4 bits. 992 get groups of 32, lose 8% and take four times the scales. 1,000
# and 1,016 get no groups at all, one scale and shift a row: they lose 12.5% in 4 bits and 63% in 2 (39% with 992). All
# are quantized without a word, and `quantize` has no argument for the size of a group.
#
# One would guess one group size for a model with a remainder or padding at the end, or an error where it does not divide:
# so do GPTQ, AWQ, torchao and llama.cpp. A few channels more or less, as after pruning, decide about a third of the error.
#
# Exits non-zero if 1,000 inputs get groups, or 992 the groups of 1,024.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'optimum-quanto==0.2.7'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import torch
from optimum.quanto import freeze, qint2, qint4, quantize
from torch import nn


def quantized(inputs, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 64, bias=False))
    weight = torch.randn(64, inputs)
    model[0].weight.data = weight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(model, weights=kind)
        freeze(model)
    low = model[0].weight
    error = ((low.dequantize() - weight).norm() / weight.norm()).item()
    return error, low.numel() // low._scale.numel(), [str(w.message) for w in caught if "group" in str(w.message)]


found = {}
for inputs in (1024, 992, 1000, 1016):
    for kind in (qint4, qint2):
        error, group, said = found[inputs, kind] = quantized(inputs, kind)
        print(f"{inputs} inputs, {kind.name}: a scale for {group} weights, error {error:.3f}, warnings {said}")
        assert not said
assert found[1024, qint4][1] == 128 and found[992, qint4][1] == 32
assert found[1000, qint4][1] == 1000 and found[1016, qint4][1] == 1016
assert found[1000, qint4][0] > 1.2 * found[1024, qint4][0] > 1.4 * found[992, qint4][0]
PYTHON
