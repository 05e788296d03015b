#!/usr/bin/env bash
# bitsandbytes 0.50.2, torch 2.13.0 (CPU): Linear4bit, made without a compute_dtype, takes the dtype of the first input that it
# ever sees, and keeps it. Two equal layers get the same float32 inputs. The one that was called with bfloat16 once before, for a
# warm-up or a test of shapes, computes them in bfloat16: it is off by 0.3%. The result is float32 in both, the state dict
# is the same, and nothing warns.
#
# One would guess that "None" takes the dtype from each input, as nn.Linear and autocast do, or that the quantized weight
# fixes it. A call in inference has no effect on later ones in any other linear layer.
#
# Exits non-zero if the first call does not matter.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'bitsandbytes==0.50.2' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import torch
from bitsandbytes.nn import Linear4bit

torch.manual_seed(0)
weight, x = torch.randn(64, 256), torch.randn(4, 256)


def layer():
    made = Linear4bit(256, 64, bias=False, quant_type="nf4")
    made.load_state_dict({"weight": weight})
    return made.to("cpu")


fresh, warm = layer(), layer()
with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warm(x[:1].bfloat16())
    expected, found = fresh(x), warm(x)
error = ((found - expected).norm() / expected.norm()).item()
told = [str(w.message) for w in caught if "dtype" in str(w.message)]
print(f"fresh layer computes in {fresh.compute_dtype}, warm one in {warm.compute_dtype}; outputs {found.dtype}", told)
print(f"same input, same weights: the outputs differ by {error:.4f}")
assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), warm.state_dict().values()))
assert expected.dtype == found.dtype == torch.float32 and error > 1e-3 and not told
PYTHON
