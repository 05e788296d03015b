#!/usr/bin/env bash
# openvino 2026.4.1: openvino.save_model(model, path) stores weights in float16 unless it is told not to, and a weight beyond
# 65504 comes back as 65504, without a warning: 1e6 in a matrix of 64 x 256 loses 93% of its value. With half of the matrix
# beyond 65504, or with all of it near 1e-6 or 1e-9, the same call keeps the matrix in float32 and loses nothing.
#
# One would guess that a saved model is the model, as in every other framework's save; or, knowing of the default, that a
# matrix with a number that float16 does not hold stays in float32. The share of such numbers decides. The odd one in
# thousands, as a mask or a sentinel in a table has, is the case that is clamped.
#
# Exits non-zero if the large weight comes back, or the other matrices change.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'openvino==2026.4.1' 'numpy==2.4.6'
"$dir/venv/bin/python" - "$dir" <<'PYTHON'
import sys

import numpy as np
import openvino as ov
from openvino import opset13 as op

plain = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)


def saved(weight, **options):
    """The weight as the saved model multiplies with it."""
    x = op.parameter([256, 256], np.float32)
    path = f"{sys.argv[1]}/model.xml"
    ov.save_model(ov.Model([op.matmul(x, op.constant(weight), False, True)], [x]), path, **options)
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled([np.eye(256, dtype=np.float32)])[0].T


one = plain.copy()
one[3, 5] = 1e6
half = plain.copy()
half[:32] *= 1e6
found = saved(one)
print("one weight of 1e6 comes back as", found[3, 5], "and with compress_to_fp16=False as", saved(one, compress_to_fp16=False)[3, 5])
assert found[3, 5] == 65504 and saved(one, compress_to_fp16=False)[3, 5] == 1e6
for name, weight in (("half of it times 1e6", half), ("all times 1e-6", plain * 1e-6), ("all times 1e-9", plain * 1e-9)):
    weight = weight.astype(np.float32)
    error = np.linalg.norm(saved(weight) - weight) / np.linalg.norm(weight)
    print(f"{name}: relative error {error:.1e}")
    assert error < 1e-6
PYTHON
