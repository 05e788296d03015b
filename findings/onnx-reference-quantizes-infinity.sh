#!/usr/bin/env bash
# onnx 1.23.2: QuantizeLinear of onnx's own reference makes the smallest code of +infinity, -128 in int8, -8 in int4 and 0 in
# uint8. onnxruntime 1.32.0 makes the largest, 127, 7 and 255, as the operator's formula says (saturate(x / scale + zero)). With a
# scale of 0, the reference makes -128 of 1, and onnxruntime 127.
#
# One would guess that the reference saturates: it does for 1e6, and for -infinity. Comparing a runtime with it on activations
# that overflow in float16 blames the runtime.
#
# Exits non-zero if the two agree.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnx==1.23.2' 'onnxruntime==1.32.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, checker, helper
from onnx.reference import ReferenceEvaluator

x = np.array([np.inf, -np.inf, 1e6, -1e6], np.float32)


def codes(kind: str, x: np.ndarray, scale: float) -> tuple[list[float], list[float]]:
    """Of the reference and of onnxruntime."""
    zero = helper.make_tensor("zero", getattr(TensorProto, kind), [], [0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("Cast", ["codes"], ["y"], to=TensorProto.FLOAT),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)]
    constants = [helper.make_tensor("scale", TensorProto.FLOAT, [], [scale]), zero]
    graph = helper.make_graph(nodes, "codes", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ReferenceEvaluator(model).run(None, {"x": x})[0].tolist(), session.run(None, {"x": x})[0].tolist()


for kind, low, high in (("INT8", -128, 127), ("UINT8", 0, 255), ("INT4", -8, 7)):
    reference, runtime = codes(kind, x, 1.0)
    print(f"{kind} of {x.tolist()}: reference {reference}, onnxruntime {runtime}")
    assert reference == [low, low, high, low] and runtime == [high, low, high, low]
reference, runtime = codes("INT8", np.ones(1, np.float32), 0.0)
print(f"INT8 of 1 with a scale of 0: reference {reference}, onnxruntime {runtime}")
assert reference == [-128] and runtime == [127]
PYTHON
