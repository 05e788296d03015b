#!/usr/bin/env bash
# openvino 2026.4.1 (CPU): a conversion to int4 or uint4 that runs (not one of a constant) is a conversion to int8 or
# uint8. Of an ONNX graph Cast to INT4, Cast to FLOAT, the values 9, 100 and -20 come out as 9, 100 and -20, and as
# UINT4 9, 100 and 236. The same casts of a constant keep four bits: -7, 4 and -4. onnx's reference and onnxruntime give
# numbers of four bits in both places.
#
# One would guess that a number of type int4 lies in -8 ... 7, whichever way a runtime treats those beyond it, and that
# folding a constant gives what the graph computes. A graph that relies on the type to cut codes off does so nowhere.
#
# Exits non-zero if the values at run time fit into four bits.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'openvino==2026.4.1' 'onnx==1.23.2' 'onnxruntime==1.32.0' \
    'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
import onnxruntime as ort
import openvino as ov
from onnx import TensorProto, checker, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

values = np.float32([7, 9, 100, -20])


def graph(kind, constant):
    nodes = [
        helper.make_node("Cast", ["x"], ["codes"], to=getattr(TensorProto, kind)),
        helper.make_node("Cast", ["codes"], ["whole"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["whole", "zeros"], ["y"]),
    ]
    name, fixed = ("zeros", numpy_helper.from_array(values, "x")) if constant else ("x", None)
    fixed = fixed or numpy_helper.from_array(np.zeros_like(values), "zeros")
    made = helper.make_graph(
        nodes,
        "casts",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(values)])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(values)])],
        [fixed],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    checker.check_model(model, full_check=True)
    return model, {name: np.zeros_like(values) if constant else values}


found = {}
for kind in ("INT4", "UINT4"):
    for constant in (False, True):
        model, inputs = graph(kind, constant)
        compiled = ov.Core().compile_model(ov.Core().read_model(model.SerializeToString()), "CPU")
        found[kind, constant] = compiled(inputs)[0].tolist()
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        others = session.run(None, inputs)[0].tolist(), ReferenceEvaluator(model).run(None, inputs)[0].tolist()
        print(f"{kind}, constant {constant}: openvino {found[kind, constant]}, onnxruntime and reference {others}")
        assert all(-8 <= value <= 15 for one in others for value in one)
assert found["INT4", False] == [7, 9, 100, -20] and found["UINT4", False] == [7, 9, 100, 236]
assert all(-8 <= value <= 15 for kind in ("INT4", "UINT4") for value in found[kind, True])
PYTHON
