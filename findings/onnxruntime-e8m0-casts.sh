#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU), onnx 1.23.2: Cast to FLOAT8E8M0, the type of MXFP4's and MXFP8's scales, makes the smallest
# scale, 2**-127, of every negative number in onnxruntime, and drops the sign in onnx's own reference: -500 is 5.9e-39
# in one and 512 in the other. Infinity is 2**127 in onnxruntime and NaN in the reference. Positive finite numbers are
# the same.
#
# One would guess NaN for a number that the type cannot hold, which it has a code for and ml_dtypes returns, or at least
# that runtime and reference agree. Formats with signed scales exist for integers, so that a negative scale is met in
# practice: it turns a block into zeros here, and into its negative there.
#
# Exits non-zero if both give the same for -500 or infinity, or one gives NaN for -500.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnxruntime==1.32.0' 'onnx==1.23.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

x = np.array([1.25, 3, 7, 500, -7, -500, np.inf, -np.inf, np.nan], np.float32)
count = [len(x)]
graph = helper.make_graph(
    [
        helper.make_node("Cast", ["x"], ["scale"], to=TensorProto.FLOAT8E8M0),
        helper.make_node("Cast", ["scale"], ["y"], to=TensorProto.FLOAT),
    ],
    "g",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, count)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, count)],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=12)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    found = {
        "onnxruntime": session.run(None, {"x": x})[0],
        "reference": ReferenceEvaluator(model).run(None, {"x": x})[0],
        "ml_dtypes": x.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
    }
for name, values in found.items():
    print(f"{name}: " + ", ".join(f"{a:g} -> {b:g}" for a, b in zip(x, values)))
run, reference, numpy = found.values()
assert (run[:4] == reference[:4]).all() and np.isnan([run[-1], reference[-1]]).all()
assert (run[4:6] == 2.0**-127).all() and reference[4:6].tolist() == [8, 512] and np.isnan(numpy[4:6]).all()
assert run[6] == 2.0**127 and np.isnan(reference[6])
PYTHON
