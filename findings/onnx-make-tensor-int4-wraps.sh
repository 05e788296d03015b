#!/usr/bin/env bash
# onnx 1.23.2: helper.make_tensor keeps the low bits of integers that are out of the range of INT4, UINT4, INT2 and UINT2: 9 is
# stored as -7, -9 as 7, and 17 in UINT4 as 1. Beside it, FLOAT4E2M1 and FLOAT8E4M3FN saturate: 7 is 6, and 500 is 448. The
# checker passes all of them.
#
# One would guess that sub-byte integers saturate, as QuantizeLinear does, as the float types of the same function do, and as
# this function did in onnx 1.16, where 9 is 7 in INT4; or that it raises an error. A symmetric weight whose largest value
# rounds to 8 changes its sign.
#
# Exits non-zero if the values saturate, or the old release does not.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'onnx==1.23.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0' 'protobuf==6.33.5'
python3 -m venv "$dir/old"
"$dir/old/bin/pip" install -q 'onnx==1.16.2' 'numpy==1.26.4' 'protobuf==4.25.8'
cat > "$dir/case.py" <<'PYTHON'
import sys

import numpy as np
import onnx
from onnx import TensorProto, checker, helper, numpy_helper

cases = {"INT4": [9, -9, 7], "UINT4": [17, -1, 15], "FLOAT8E4M3FN": [500.0, -500.0, 3.0]}
if sys.argv[1] == "new":
    cases |= {"INT2": [2, -3, 1], "FLOAT4E2M1": [7.0, -7.0, 3.0]}
found = {}
for kind, values in cases.items():
    tensor = helper.make_tensor("t", getattr(TensorProto, kind), [len(values)], values)
    checker.check_tensor(tensor)
    found[kind] = numpy_helper.to_array(tensor).astype(np.float32).tolist()
    print(f"onnx {onnx.__version__}, {kind}: {values} -> {found[kind]}")
assert found["FLOAT8E4M3FN"] == [448.0, -448.0, 3.0]
if sys.argv[1] == "new":
    assert found["INT4"] == [-7, 7, 7] and found["UINT4"] == [1, 15, 15] and found["INT2"] == [-2, 1, 1]
    assert found["FLOAT4E2M1"] == [6.0, -6.0, 3.0]
else:
    assert found["INT4"] == [7, -8, 7] and found["UINT4"] == [15, 0, 15]
PYTHON
"$dir/old/bin/python" "$dir/case.py" old
"$dir/venv/bin/python" "$dir/case.py" new
