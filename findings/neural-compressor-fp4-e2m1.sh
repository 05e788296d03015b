#!/usr/bin/env bash
# neural-compressor-pt 3.10: dtype "fp4_e2m1" of weights is not the E2M1 of MXFP4 and NVFP4. Where that has 0.5, the
# smallest number beside 0, it has 0.0625: times 6 over the largest weight, its numbers are 0, 0.0625, 1, 1.5, 2, 3, 4
# and 6. A weight that is a twelfth of its group's largest becomes an eighth of itself. Of the weights below a sixth of
# the largest 47% of the norm is lost, and 25% with 0.5, the same scales and as many bits.
#
# One would guess that a name of exponent and mantissa bits says which numbers there are: two bits, one bit and a bias
# of one make 0.5 of the code 1, in OCP's specification and in other packages. bitsandbytes' "fp4" has a small number of
# this kind, by intent and under a name of its own, which is "fp4" or "fp4_e2m1_bnb" here as well.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'packaging==26.4' 'dill==0.4.1' 'psutil==7.2.2' \
    'py-cpuinfo==9.0.0' 'pydantic==2.11.10' \
    'prettytable==3.17.0' 'pyyaml==6.0.3' 'tqdm==4.70.1'
"$dir/venv/bin/pip" install -q --no-deps 'neural-compressor-pt==3.10'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from neural_compressor.torch.algorithms.weight_only.utility import quant_tensor

every = torch.linspace(-6, 6, 12_001)[None]
found = quant_tensor(every.clone(), dtype="fp4_e2m1", bits=4, group_size=-1).unique()
print("fp4_e2m1:", sorted({round(abs(float(number)), 4) for number in found}))
wanted = torch.tensor([0, 0.0625, 1, 1.5, 2, 3, 4, 6])
torch.testing.assert_close(found[found >= 0].abs().unique(), wanted)

torch.manual_seed(0)
weight = torch.randn(256, 32)
ocp = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
scale = weight.abs().amax(1, keepdim=True) / 6
nearest = ocp[(weight.abs() / scale).unsqueeze(-1).sub(ocp).abs().argmin(-1)] * weight.sign() * scale
own = quant_tensor(weight.clone(), dtype="fp4_e2m1", bits=4, group_size=32)
for name, chosen in (("all weights", weight.abs() >= 0), ("those below a sixth", weight.abs() < scale)):
    errors = [float((rounded - weight)[chosen].norm() / weight[chosen].norm()) for rounded in (own, nearest)]
    print(name, "- error of fp4_e2m1: {:.3f}; of E2M1 with 0.5: {:.3f}".format(*errors))
    assert errors[0] > 1.08 * errors[1], "the behaviour changed"
assert errors[0] > 0.4 and errors[1] < 0.3
PYTHON
