#!/usr/bin/env bash
# galore-torch 1.0, apollo-torch 1.0.3, torch 2.13.0 (CPU): the state dict of GaLoreAdamW and of APOLLOAdamW holds an
# object of the package for each weight, the projector, beside tensors and numbers. torch.save writes it, and torch.load
# of that file raises an UnpicklingError that names the projector's class, so a run does not resume as it stands. With
# weights_only=False both packages resume to the bit.
#
# One would guess that the state dict of a torch optimizer is made of tensors and numbers, which torch.load reads by
# default since 2.6. The fault shows at the first resume and not when the file is written.
#
# Exits non-zero if the default loads, or the states are refused by weights_only=False.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.23.0' 'bitsandbytes==0.50.2' \
    'galore-torch==1.0' 'apollo-torch==1.0.3'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import io
import pickle

import torch
from apollo_torch import APOLLOAdamW
from galore_torch import GaLoreAdamW

shared = {"rank": 8, "update_proj_gap": 5, "proj_type": "std"}
kinds = {
    GaLoreAdamW: shared | {"scale": 0.25},
    APOLLOAdamW: shared | {"scale": 1, "scale_type": "channel", "proj": "random"},
}


def trained(kind, options, resume):
    """A weight after 20 steps, with a checkpoint after ten if `resume`."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 48))
    optimizer = kind([{"params": [weight], **options}], lr=1e-3)
    for step, gradient in enumerate(torch.randn(20, 64, 48)):
        if step == 10 and resume:
            file = io.BytesIO()
            torch.save({"weight": weight.detach(), "optimizer": optimizer.state_dict()}, file)
            types = {name: type(value).__name__ for name, value in optimizer.state[weight].items()}
            print(f"{kind.__module__}: {types}")
            file.seek(0)
            try:
                torch.load(file)
            except pickle.UnpicklingError as error:
                print(next(line for line in str(error).splitlines() if "projector" in line.lower()).strip()[:110])
            else:
                raise SystemExit("the default loads")
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            weight = torch.nn.Parameter(saved["weight"])
            optimizer = kind([{"params": [weight], **options}], lr=1e-3)
            optimizer.load_state_dict(saved["optimizer"])
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


for kind, options in kinds.items():
    assert torch.equal(trained(kind, options, resume=True), trained(kind, options, resume=False))
PYTHON
