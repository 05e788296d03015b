#!/usr/bin/env bash
# torch 2.13.0: Optimizer.load_state_dict casts every tensor of a state to the dtype of its parameter, integers and booleans too,
# unless its name is "step". For a bfloat16 parameter, a counter of 1001 in int64 comes back as 1000.0, codes in uint8 and a
# mask come back in bfloat16 (a mask then indexes as numbers do), and moments or a master copy in float32 are rounded.
# Nothing warns, and the state that was saved is right.
#
# One would guess that a state comes back as it was saved, or at most that floating-point states follow a parameter that has
# changed its dtype. Optimizers with states in 8 bits, or with a counter under another name, have to put their states back
# themselves after super().load_state_dict().
#
# Exits non-zero if the states keep their dtypes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn

param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
saved, loaded = (torch.optim.Optimizer([param], {}) for _ in range(2))
saved.state[param] = {
    "step": torch.tensor(1001),
    "updates": torch.tensor(1001),
    "codes": torch.tensor([1, 255], dtype=torch.uint8),
    "mask": torch.tensor([True, False]),
    "master": torch.tensor([1.0001, 2.0001]),
}
loaded.load_state_dict(saved.state_dict())
for name, before in saved.state[param].items():
    after = loaded.state[param][name]
    print(f"{name}: {before.tolist()} {before.dtype} -> {after.tolist()} {after.dtype}")
found = loaded.state[param]
assert found["step"].dtype == torch.int64 and found["step"] == 1001
assert all(found[n].dtype == torch.bfloat16 for n in ("updates", "codes", "mask", "master"))
assert found["updates"] == 1000 and found["master"].tolist() == [1.0, 2.0]
PYTHON
