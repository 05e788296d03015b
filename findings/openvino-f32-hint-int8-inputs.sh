#!/usr/bin/env bash
# openvino 2026.4.1 (CPU with VNNI): with INFERENCE_PRECISION_HINT = "f32", a product of float32 inputs with a weight of
# int8 codes and one scale a row still rounds the inputs to int8, in groups. It is off by 1.2% here. With the same
# weight as float32 numbers it is off by 3e-7, and so it is with the codes and DYNAMIC_QUANTIZATION_GROUP_SIZE = 0.
#
# One would guess that a hint of "f32" decides in which precision a product is computed: it is the setting for a
# comparison of a compressed model with the original, in which the processor's bfloat16 shall play no part. The graph
# rounds weights alone, and asks for nothing else.
#
# Exits non-zero if the hint alone gives the product of float32. On a processor without VNNI nothing is rounded.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'openvino==2026.4.1' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
import openvino as ov
from openvino import opset13 as ops

INPUTS, OUTPUTS = 256, 64
rng = np.random.default_rng(0)
weight = rng.standard_normal((OUTPUTS, INPUTS)) * 0.05
scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
codes = (weight / scale).round().astype(np.int8)
x = rng.standard_normal((5, INPUTS)).astype(np.float32)
x[:, 0] = 100  # one large input, as language models have them
exact = x.astype(np.float64) @ (codes * scale.astype(np.float64)).T


def error(as_codes, **options):
    inputs = ops.parameter([-1, INPUTS], np.float32)
    if as_codes:
        values = ops.multiply(ops.convert(ops.constant(codes), "f32"), ops.constant(scale))
    else:
        values = ops.constant(codes * scale)
    model = ov.Model([ops.result(ops.matmul(inputs, values, False, True))], [inputs])
    y = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **options})(x)[0]
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


plain, hint, off = error(False), error(True), error(True, DYNAMIC_QUANTIZATION_GROUP_SIZE="0")
print(f"relative error with f32: float32 weight {plain:.1e}, int8 codes {hint:.1e}, without dynamic quantization {off:.1e}")
assert plain < 1e-5 and off < 1e-5 and hint > 1e-3
PYTHON
