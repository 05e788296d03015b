#!/usr/bin/env bash
# onnxruntime 1.32.0 (x86 CPU): a graph Cast to FLOAT16, Relu, Cast to FLOAT rounds nothing, also with all optimizations
# disabled: 70,000 stays 70,000, 1 + 2**-12 stays, and 300 * 300 in float16 is 90,000. The CPU has no float16 kernel of
# these ops, so the session puts casts to float32 around them, and then removes them together with those of the graph.
# Two casts with nothing between them do round, to infinity and 1, and so does onnx's reference in each case.
#
# One would guess that a cast to float16 rounds wherever it stands, at least with ORT_DISABLE_ALL, or that an op without
# a kernel is refused, as the same graph in bfloat16 is. A float16 model that overflows on a GPU passes its check on a
# CPU.
#
# Exits non-zero if the casts around an op round.
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

values = np.float32([70000, 1 + 2**-12, 300])


def run(op):
    between = {"": [], "Relu": ["narrow"], "Mul": ["narrow", "narrow"]}[op]
    nodes = [helper.make_node("Cast", ["x"], ["narrow"], to=TensorProto.FLOAT16)]
    nodes += [helper.make_node(op, between, ["result"])] if op else []
    nodes.append(helper.make_node("Cast", ["result" if op else "narrow"], ["y"], to=TensorProto.FLOAT))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(values)]) for name in "xy")
    made = helper.make_graph(nodes, "casts", [x], [y])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y = session.run(None, {"x": values})[0].tolist()
    reference = ReferenceEvaluator(model).run(None, {"x": values})[0].tolist()
    print(f"Cast, {op + ', ' if op else ''}Cast of {values.tolist()}: onnxruntime {y}, onnx's reference {reference}")
    assert reference[:2] == [np.inf, 1]
    return y


assert run("")[:2] == [np.inf, 1]
assert run("Relu") == values.tolist()
assert run("Mul")[2] == 90000
PYTHON
