#!/usr/bin/env bash
# onnxruntime 1.32.0: quantize_static with weights in float8 (QuantType.QFLOAT8E4M3FN) takes the scale from the standard
# deviation of a weight, not from its largest number. What lies beyond 4.5 standard deviations is clipped to that,
# without a warning: a weight with long tails (Student's t, three degrees of freedom) loses 27% of its norm. Its largest
# number over 448 for the scale loses 3%, and int8 by the same call 7%.
#
# One would guess the rule of every other type of the same function (int4, int8, int16, uint8): the range holds the
# largest number. A float format gains nothing by a smaller range, since its steps are relative: normal weights have an
# error of 2.6% with both scales. Distribution has to be chosen for the activations' calibration, and the weights' rule
# is not said.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnxruntime==1.32.0' 'onnx==1.23.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0' 'sympy==1.14.0'
cd "$dir"
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantFormat, QuantType, quantize_static

rng = np.random.default_rng(0)


class Inputs(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": rng.standard_normal((32, 256)).astype(np.float32)} for _ in range(4)])

    def get_next(self):
        return next(self.left, None)


def values(weight, kind):
    """The weight as the quantized model holds it, in float32."""
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 256])  # noqa: E731
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "graph", [value("x")], [value("y")], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, "model.onnx")
    quantize_static(
        "model.onnx", "out.onnx", Inputs(), QuantFormat.QDQ, activation_type=kind, weight_type=kind,
        calibrate_method=CalibrationMethod.MinMax if kind == QuantType.QInt8 else CalibrationMethod.Distribution,
    )  # fmt: skip
    found = {part.name: part for part in onnx.load("out.onnx").graph.initializer}
    codes = numpy_helper.to_array(found["w_quantized"])
    if kind == QuantType.QFLOAT8E4M3FN:
        codes = codes.view(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float32) * numpy_helper.to_array(found["w_scale"])


def loss(found, weight):
    return np.linalg.norm(found - weight) / np.linalg.norm(weight)


results = {}
for name, weight in (("normal", rng.standard_normal((256, 256))), ("long tails", rng.standard_t(3, (256, 256)))):
    weight = weight.astype(np.float32)
    stored = values(weight, QuantType.QFLOAT8E4M3FN)
    scale = np.abs(weight).max() / 448
    largest = (weight / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    results[name] = [loss(stored, weight), loss(largest, weight), loss(values(weight, QuantType.QInt8), weight)]
    print(f"{name}: largest number stored / real {np.abs(stored).max() / np.abs(weight).max():.2f}, ", end="")
    print(f"over the standard deviation {np.abs(stored).max() / weight.std():.2f}; errors ", end="")
    print("float8 {:.3f}, float8 by the largest {:.3f}, int8 {:.3f}".format(*results[name]))
    assert np.abs(stored).max() < 4.6 * weight.std(), "the behaviour changed"
assert results["normal"][0] < 0.03 and results["long tails"][0] > 0.2
assert results["long tails"][1] < 0.04 and results["long tails"][2] < 0.1
PYTHON
