#!/usr/bin/env bash
# onnxruntime 1.32.0 (CPU): Cast from float32 to INT8 drops the fraction, and Cast to INT4 and UINT4 rounds to the
# nearest number, halves away from zero: 2.6 is 2 in INT8 and 3 in INT4, and -0.5 is 0 and -1. onnx's own reference
# drops the fraction for all three. QuantizeLinear rounds halves to even, so neither cast is a substitute for it.
#
# One would guess that a cast has one rule for integers of all widths. Codes that are computed as floor(x / scale + 0.5)
# are whole, so that either rule is right. Those of x / scale + 0.5 with x >= 0, whose fraction the cast shall drop, are
# right in INT8 and UINT8 and up to one too large in UINT4.
#
# Exits non-zero if the casts agree.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnx==1.23.2' 'onnxruntime==1.32.0' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, checker, helper
from onnx.reference import ReferenceEvaluator

x = np.array([2.4, 2.5, 2.6, 0.5, -0.5, -2.6], np.float32)
found = {}
for kind in ("INT8", "INT4", "UINT4"):
    nodes = [
        helper.make_node("Cast", ["x"], ["codes"], to=getattr(TensorProto, kind)),
        helper.make_node("Cast", ["codes"], ["y"], to=TensorProto.FLOAT),
    ]
    x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(x)])
    y_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(x)])
    values = x if kind != "UINT4" else np.abs(x)
    graph = helper.make_graph(nodes, "casts", [x_info], [y_info])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found[kind] = session.run(None, {"x": values})[0]
    reference = ReferenceEvaluator(model).run(None, {"x": values})[0]
    print(f"{kind:5} of {values.tolist()}: onnxruntime {found[kind].tolist()}, onnx's reference {reference.tolist()}")
    assert np.array_equal(reference, np.trunc(values))
assert np.array_equal(found["INT8"], np.trunc(x))
assert found["INT4"].tolist() == [2, 3, 3, 1, -1, -3] and found["UINT4"].tolist() == [2, 3, 3, 1, 1, 3]
PYTHON
