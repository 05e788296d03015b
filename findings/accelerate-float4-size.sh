#!/usr/bin/env bash
# accelerate 1.15.0: a parameter of torch.float4_e2m1fn_x2, PyTorch's type for two 4-bit floats in a byte (weights in
# NVFP4 and MXFP4), counts as 0 bytes. compute_module_sizes gives 0 for eight weights of 1 MiB each, and
# infer_auto_device_map puts all of them on a device with room for three. As uint8 the same bytes are counted and spread.
#
# One would guess that a size is numel() * element_size(), which is right for every dtype, this one included, or that an
# unknown dtype is refused.
#
# Exits non-zero if the bytes are counted.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'accelerate==1.15.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import compute_module_sizes

MIB = 2**20


class Packed(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        codes = torch.empty(1024, 1024, dtype=dtype, device="meta")
        self.codes = torch.nn.Parameter(codes, requires_grad=False)


found = {}
for dtype in (torch.uint8, torch.float4_e2m1fn_x2):
    model = torch.nn.Sequential(*(Packed(dtype) for _ in range(8)))
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    places = infer_auto_device_map(model, max_memory={"cpu": 3 * MIB, "disk": 1024 * MIB})
    found[dtype] = compute_module_sizes(model)[""], sorted({*places.values()})
    print(f"{dtype}: {stored / MIB:.0f} MiB, counted as {found[dtype][0] / MIB:.0f}; placed on {found[dtype][1]}")
assert found[torch.uint8] == (8 * MIB, ["cpu", "disk"])
assert found[torch.float4_e2m1fn_x2] == (0, ["cpu"])
PYTHON
