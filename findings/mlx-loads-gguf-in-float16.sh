#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mx.load of a GGUF file reads BF16 tensors as float16. Values beyond 65504 become infinite, and those
# below 3e-8 zero, without a warning. Tensors of a type that it does not know, MXFP4 and TQ1_0 for instance, are missing
# from what it returns, without a warning too: a file of three tensors is a dictionary of two. A Q5_0 tensor is an
# error.
#
# One would guess bfloat16 for bfloat16, a type that mlx has and that its safetensors reader keeps, and one behaviour,
# an error, for all types that cannot be read. load_weights with strict=True finds the missing tensor, and nothing finds
# the other two.
#
# Exits non-zero if BF16 comes back as it was saved, or the file with an MXFP4 tensor is refused or complete.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' 'gguf==0.19.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import gguf
import mlx.core as mx
import numpy as np
from gguf.quants import quantize

warnings.simplefilter("error")
mx.set_default_device(mx.cpu)
weight = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
wide = weight.copy()
wide[0, :4] = 1e6, -70000, 1e-8, 1


def load(kind, third=weight):
    writer = gguf.GGUFWriter("model.gguf", "llama")
    for name in ("first", "second"):
        writer.add_tensor(name, weight)
    writer.add_tensor("third", quantize(third, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [t.name for t in gguf.GGUFReader("model.gguf").tensors] == ["first", "second", "third"]
    return mx.load("model.gguf")


loaded = load(gguf.GGMLQuantizationType.BF16, wide)["third"]
print(f"BF16 of {wide[0, :4].tolist()} is {loaded[0, :4].tolist()} in {loaded.dtype}")
assert loaded.dtype == mx.float16 and loaded[0, :4].tolist() == [float("inf"), float("-inf"), 0, 1]
for kind in (gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.TQ1_0):
    names = sorted(load(kind))
    print(f"a file with first, second and, in {kind.name}, third: {names}")
    assert names == ["first", "second"]
try:
    load(gguf.GGMLQuantizationType.Q5_0)
except RuntimeError as error:
    print(f"Q5_0: {error}")
else:
    raise SystemExit("Q5_0 is read")
PYTHON
