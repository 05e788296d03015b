#!/usr/bin/env bash
# onnxconverter-common 1.16.0: float16.convert_float_to_float16(model), the tool that makes a float16 model of an ONNX
# one, stores weights of 20,000 and 60,000 as 10,000, which float16 could hold as they are (it ends at 65,504), and
# weights below 1e-7 as 1e-7: 1e-12 becomes 100,000 times as large. Zero stays. Of each tensor
# a warning names the largest and the smallest of these numbers alone, and not how many there are.
#
# One would guess the nearest float16, or infinity, where a number is too large, and zero or a subnormal number where it
# is too small. The defaults are max_finite_val=1e4 and min_positive_val=1e-7, float16's own are 65504 and 6e-8. An
# embedding table, a mask of -30000 for attention or a bias in units of a pixel are changed without need.
#
# Exits non-zero if 20,000 is kept.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnx==1.23.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0' 'onnxconverter-common==1.16.0' \
    'onnxruntime==1.32.0'
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, checker, helper, numpy_helper
from onnxconverter_common import float16

weights = np.float32([20_000, 60_000, -30_000, 1, 8e-8, 1e-9, -1e-12, 0])
shape = [len(weights)]
graph = helper.make_graph(
    [helper.make_node("Mul", ["x", "w"], ["y"])],
    "scale",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    [numpy_helper.from_array(weights, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
checker.check_model(model, full_check=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    low = float16.convert_float_to_float16(model, keep_io_types=True)
stored = numpy_helper.to_array(low.graph.initializer[0])
session = ort.InferenceSession(low.SerializeToString(), providers=["CPUExecutionProvider"])
y = session.run(None, {"x": np.ones_like(weights)})[0]
print("weights       ", weights)
print("stored        ", stored)
print("numpy's float16", weights.astype(np.float16))
assert np.array_equal(y, stored.astype(np.float32))
assert stored[:3].tolist() == [10_000, 10_000, -10_000], "the behaviour changed"
assert (np.abs(stored[4:7].astype(np.float32)) > 0.9e-7).all() and stored[7] == 0
PYTHON
