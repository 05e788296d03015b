#!/usr/bin/env bash
# torch 2.13.0 (CPU): torch.fake_quantize_per_channel_affine makes the smallest code of +infinity and of 1e20, so that
# the largest weight becomes the most negative one (-0.8 with int4 codes and a scale of 0.1).
# fake_quantize_per_tensor_affine with the same numbers gives the largest code, 0.7. Both make the smallest code of NaN.
# All results are finite.
#
# One would guess that both saturate, as their formula says (clamp of the rounded quotient), and that NaN stays NaN, as
# it does in round and clamp. A weight that has diverged in QAT is an ordinary one after this function.
#
# Exits non-zero if the sign of infinity is kept, or NaN.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch

x = torch.tensor([1.0, -1.0, 1e20, -1e20, torch.inf, torch.nan])
scale, zero = torch.tensor([0.1]), torch.zeros(1, dtype=torch.int32)
tensor = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
channel = torch.fake_quantize_per_channel_affine(x[None], scale, zero, 0, -8, 7)[0]
formula = (x / scale).round().clamp(-8, 7) * scale


def shown(values):
    return [round(value, 4) for value in values.tolist()]


print("input:      ", x.tolist())
print("per tensor: ", shown(tensor))
print("per channel:", shown(channel))
print("formula:    ", shown(formula))
torch.testing.assert_close(tensor[:5], formula[:5])
torch.testing.assert_close(channel[:2], formula[:2])
assert (channel[2:] < -0.7).all() and tensor[5] < -0.7 and formula[5].isnan()
PYTHON
