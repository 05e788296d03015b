#!/usr/bin/env bash
# gguf 0.19.0: TQ1_0 and TQ2_0 of ordinary (normal) weights make zeros of 87% of them, and lose 81% of the norm. The best
# scales that the same bytes can hold lose 44%. The writer takes the largest magnitude of 256 weights for the scale, so
# only weights above half of the largest get a code. The formats are llama.cpp's, and its quantizer gives the same bytes.
#
# One would guess that a format of 1.7 or 2.1 bits uses its three codes about equally, as ternary methods do with the mean
# magnitude for the scale, and that it loses a bit more than a two-bit format. It is exact for weights that are ternary
# already, which it is meant for. A model that is not comes out as noise, without a warning.
#
# Exits non-zero if fewer weights become zero.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'gguf==0.19.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import quants

x = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
ternary = np.sign(x) * (np.abs(x) > 0.6) * np.float32(0.25)


def loss(found, wanted):
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


for kind in (Kind.TQ1_0, Kind.TQ2_0):
    through = lambda weight: quants.dequantize(quants.quantize(weight, kind), kind)  # noqa: E731
    found = through(x)
    # with the scale 1.22 and codes of these weights, which the format holds as well
    better = through(np.sign(x) * (np.abs(x) > 0.612) * np.float32(1.22))
    print(f"{kind.name}: zeros {np.mean(found == 0):.2f}, error {loss(found, x):.2f}; better scales {loss(better, x):.2f}")
    assert np.mean(found == 0) > 0.8 and loss(found, x) > 0.75 and loss(better, x) < 0.46
    assert loss(through(ternary), ternary) < 1e-3
q4 = quants.dequantize(quants.quantize(x, Kind.Q4_0), Kind.Q4_0)
print(f"Q4_0: {loss(q4, x):.2f}")
PYTHON
