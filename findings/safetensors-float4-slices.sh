#!/usr/bin/env bash
# safetensors 0.8.0, torch 2.13.0: a tensor of torch.float4_e2m1fn_x2 comes back from get_tensor as it was saved, and
# every slice of it raises, the slice of the whole too. The header counts values (16 a row here), torch counts bytes
# (8 a row), and only get_tensor turns one into the other: get_slice(...).get_shape() says 16 columns.
#
# One would guess that a slice of rows reads what get_tensor reads: packed pairs lie along the last dimension, so rows are
# whole. Loaders that read a shard of each tensor by get_slice, as those for tensor parallelism do, cannot load the file.
#
# Exits non-zero if a slice of rows is read.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'safetensors==0.8.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from safetensors import safe_open
from safetensors.torch import save_file

codes = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float4_e2m1fn_x2)
save_file({"codes": codes}, "model.safetensors")
with safe_open("model.safetensors", "pt") as file:
    whole = file.get_tensor("codes")
    assert whole.shape == (4, 8) and whole.view(torch.uint8).equal(codes.view(torch.uint8))
    part = file.get_slice("codes")
    print(f"get_tensor: {tuple(whole.shape)}; get_slice says {part.get_shape()}")
    assert part.get_shape() == [4, 16]
    for name, index in {"[0:2]": slice(0, 2), "[:]": slice(None)}.items():
        try:
            part[index]
        except RuntimeError as error:
            print(f"{name}: {error}")
            assert "is invalid for input of size" in str(error)
        else:
            raise SystemExit(f"the slice {name} is read now")
PYTHON
