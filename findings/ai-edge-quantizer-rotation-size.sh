#!/usr/bin/env bash
# ai-edge-quantizer 0.10.0: the recipes with Hadamard rotations, dynamic_wi8c_hr_afp32 and dynamic_wi4c_hr_afp32, store
# the rotation of a layer's inputs as a dense float32 matrix of inputs x inputs. A layer of 512 x 512 in int4 takes 1.13
# times the bytes of its float32 model, and in int8 1.25 times. Without rotations int4 takes 0.13. A layer of 128
# outputs and 512 inputs takes 4.1 times.
#
# One would guess that a rotation costs a sign a channel: a Hadamard matrix is a butterfly of additions, and the package
# exists to make models smaller (it prints the size of both, and "0.9x smaller" here).
#
# Exits non-zero if the int4 model with rotations is smaller than the float32 one.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'ai-edge-quantizer==0.10.0' 'ai-edge-litert==2.3.0' \
    'flatbuffers==25.12.19' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import contextlib
import io

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_quantizer import quantizer, recipe

INPUTS = 512


def tensor(name, shape, buffer):
    made = schema.TensorT()
    made.name, made.shape, made.type, made.buffer = name, np.int32(shape), schema.TensorType.FLOAT32, buffer
    return made


def model(outputs):
    """A model of one fully connected layer, in float32."""
    weight = np.random.default_rng(0).standard_normal((outputs, INPUTS)).astype(np.float32)
    code, layer, graph, whole = schema.OperatorCodeT(), schema.OperatorT(), schema.SubGraphT(), schema.ModelT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
    layer.inputs, layer.outputs = np.int32([0, 1, -1]), np.int32([2])
    layer.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    layer.builtinOptions = schema.FullyConnectedOptionsT()
    graph.tensors = [tensor("x", (4, INPUTS), 0), tensor("w", weight.shape, 1), tensor("y", (4, outputs), 2)]
    graph.inputs, graph.outputs, graph.operators = np.int32([0]), np.int32([2]), [layer]
    whole.version, whole.operatorCodes, whole.subgraphs = 3, [code], [graph]
    whole.buffers = [schema.BufferT() for _ in range(3)]
    whole.buffers[1].data = np.frombuffer(weight.tobytes(), np.uint8)
    builder = flatbuffers.Builder(1024)
    builder.Finish(whole.Pack(builder), b"TFL3")
    return bytearray(builder.Output())


found = {}
for outputs in (512, 128):
    plain = model(outputs)
    for name in ("dynamic_wi8c_afp32", "dynamic_wi4c_afp32", "dynamic_wi8c_hr_afp32", "dynamic_wi4c_hr_afp32"):
        with contextlib.redirect_stdout(io.StringIO()):
            work = quantizer.Quantizer(bytes(plain))
            work.load_quantization_recipe(getattr(recipe, name)())
            packed = work.quantize().quantized_model
        found[outputs, name] = len(packed) / len(plain)
        print(f"{outputs} x {INPUTS}, {name}: {found[outputs, name]:.2f} of the size")
tensors = schema.ModelT.InitFromObj(schema.Model.GetRootAs(packed, 0)).subgraphs[0].tensors
dense = [one for one in tensors if list(one.shape) == [INPUTS, INPUTS] and one.type == schema.TensorType.FLOAT32]
assert len(dense) == 1, "the rotation is not a dense float32 matrix"
assert found[512, "dynamic_wi4c_afp32"] < 0.15 and found[512, "dynamic_wi8c_afp32"] < 0.27
assert found[512, "dynamic_wi4c_hr_afp32"] > 1 and found[128, "dynamic_wi4c_hr_afp32"] > 4
PYTHON
