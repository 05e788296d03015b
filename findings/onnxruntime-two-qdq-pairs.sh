#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU): the optimizer, as it is by default, makes one pair of two pairs QuantizeLinear,
# DequantizeLinear in a row. Where the first has the step 0.01 and the second 0.3, the one has the step 0.01: the second
# rounding is gone, and the output, by the graph a multiple of 0.3, is off by up to a third of that. Without
# optimizations, and in onnx's own reference, it is a multiple.
#
# One would guess that a pass which removes a pair keeps the coarser of the two, or at least the last one, whose codes
# the next layer was calibrated for. Two pairs stand in a row wherever the output of one quantized layer is the input of
# another that has a scale of its own.
#
# Exits non-zero if the default gives the values of the graph.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnx==1.23.2' 'onnxruntime==1.32.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, checker, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

x = np.linspace(-1, 1, 11, dtype=np.float32)
names = ["x", "codes", "fine", "coarse codes", "y"]
nodes = [
    helper.make_node("QuantizeLinear", [names[0], "step", "zero"], [names[1]]),
    helper.make_node("DequantizeLinear", [names[1], "step", "zero"], [names[2]]),
    helper.make_node("QuantizeLinear", [names[2], "coarse step", "zero"], [names[3]]),
    helper.make_node("DequantizeLinear", [names[3], "coarse step", "zero"], [names[4]]),
]
stored = [
    numpy_helper.from_array(np.float32(0.01), "step"),
    numpy_helper.from_array(np.float32(0.3), "coarse step"),
    numpy_helper.from_array(np.int8(0), "zero"),
]
x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(x)])
y_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(x)])
graph = helper.make_graph(nodes, "two pairs", [x_info], [y_info], stored)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
checker.check_model(model, full_check=True)


def run(level):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


default = run(ort.SessionOptions().graph_optimization_level)
plain = run(ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
reference = ReferenceEvaluator(model).run(None, {"x": x})[0]
for name, y in (("default", default), ("no optimization", plain), ("onnx's reference", reference)):
    print(f"{name:17}", [f"{value:.1f}" for value in y])
off = np.abs(default / 0.3 - np.round(default / 0.3)).max()
print(f"the default is up to {off:.2f} steps of 0.3 off a multiple of 0.3")
assert np.allclose(plain, reference) and np.allclose(plain, np.round(plain / 0.3) * 0.3, atol=1e-6)
assert off > 0.3
PYTHON
