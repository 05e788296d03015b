#!/usr/bin/env bash
# faiss-cpu 1.15.1: the scalar quantizer QT_bf16 makes -0.0 of the NaN 0x7FFFFFFF, the one that NVIDIA GPUs compute, 0.0
# of the NaN 0xFFFFFFFF and infinity of 0x7F800001. So does an index over it: a vector with such a NaN is stored as one
# with a zero there, and is found. NaNs as CPUs make them, 0x7FC00000, stay, and so do all NaNs in QT_fp16.
#
# One would guess that a cast to bfloat16, which keeps the upper 16 bits of a float32, keeps NaN in any case, as that of
# torch and ml_dtypes does, which look for NaN first. Rounding by adding half of the last bit carries into the sign.
#
# Exits non-zero if NaN stays NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'faiss-cpu==1.15.1' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - <<'PYTHON'
import faiss
import ml_dtypes
import numpy as np

bits = np.uint32([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000])
vectors = np.zeros((1, 16), np.float32)
vectors[0, : len(bits)] = bits.view(np.float32)
vectors[0, 4] = 1
found = {}
for name in ("QT_bf16", "QT_fp16"):
    quantizer = faiss.ScalarQuantizer(16, getattr(faiss.ScalarQuantizer, name))
    found[name] = quantizer.decode(quantizer.compute_codes(vectors))[0, :4]
    print(name, dict(zip(map(hex, bits.tolist()), found[name].tolist())))
print("ml_dtypes", vectors[0, :4].astype(ml_dtypes.bfloat16))
assert np.isnan(vectors[0, :4].astype(ml_dtypes.bfloat16).astype(np.float32)).all()
assert np.isnan(found["QT_fp16"]).all()
assert found["QT_bf16"][:2].tolist() == [0, 0] and np.isinf(found["QT_bf16"][2]), "the behaviour changed"
assert np.signbit(found["QT_bf16"][0]) and np.isnan(found["QT_bf16"][3])

index = faiss.IndexScalarQuantizer(16, faiss.ScalarQuantizer.QT_bf16)
index.add(vectors[:, [4, *range(5, 16), 0, 4, 5, 6]].copy())  # 1, zeros, one NaN of 0x7FFFFFFF, 1, zeros
distance, _ = index.search(np.float32([[1] + [0] * 12 + [1, 0, 0]]), 1)
print(f"distance of the vector without the NaN from the one with it: {distance[0, 0]}")
assert distance[0, 0] == 0
PYTHON
