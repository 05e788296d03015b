#!/usr/bin/env bash
# onnxruntime 1.32.0: MatMulNBitsQuantizer, its tool for 4-bit weights, leaves Gemm alone, the node that exporters make
# of a linear layer with a bias. The model that comes back computes the same as before and has its old size. With
# bits=8, with quant_format=QDQ and with the k-quant and RTN methods it is alike. One MatMul beside it is quantized.
#
# One would guess that a weight-only tool takes every product with a constant weight: quantize_dynamic of the same
# package takes Gemm. torch.onnx.export makes Gemm of nn.Linear with inputs of two dimensions, and MatMul and Add with
# three, so the same layer is quantized in a transformer and not in a classifier's head.
#
# Exits non-zero if the Gemm's weight is quantized, or the call raises or warns.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnxruntime==1.32.0' 'onnx==1.23.2' 'onnx-ir==1.1.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat, quantize_dynamic
from onnxruntime.quantization import matmul_nbits_quantizer as tool

rng = np.random.default_rng(0)


def model(kind):
    weights = [numpy_helper.from_array(rng.standard_normal((256, 256)).astype(np.float32), "w")]
    if kind == "Gemm":
        weights.append(numpy_helper.from_array(np.zeros(256, np.float32), "b"))
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *(w.name for w in weights)], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 256])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 256])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


ways = {
    "4 bits": lambda: tool.DefaultWeightOnlyQuantConfig(block_size=32),
    "8 bits": lambda: tool.DefaultWeightOnlyQuantConfig(block_size=32, bits=8),
    "4 bits, QDQ": lambda: tool.DefaultWeightOnlyQuantConfig(block_size=32, quant_format=QuantFormat.QDQ),
    "k-quant": lambda: tool.KQuantWeightOnlyQuantConfig(),
    "RTN": lambda: tool.RTNWeightOnlyQuantConfig(),
}
for name, config in ways.items():
    for kind in ("MatMul", "Gemm"):
        quantizer = tool.MatMulNBitsQuantizer(model(kind), algo_config=config())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            quantizer.process()
        said = [str(w.message) for w in caught if "quanti" in str(w.message).lower()]
        after = quantizer.model.model
        ops = [n.op_type for n in after.graph.node]
        weights = {w.name: TensorProto.DataType.Name(w.data_type) for w in after.graph.initializer}
        print(f"{name}: {kind} becomes {ops} with {weights}, warnings {said}")
        assert (weights.get("w") == "FLOAT" and ops == ["Gemm"]) == (kind == "Gemm"), "the behaviour changed"
quantize_dynamic(model("Gemm"), "dynamic.onnx")
ops = [n.op_type for n in onnx.load("dynamic.onnx").graph.node]
print(f"quantize_dynamic: Gemm becomes {ops}")
assert "MatMulInteger" in ops
PYTHON
