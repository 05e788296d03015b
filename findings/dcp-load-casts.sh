#!/usr/bin/env bash
# torch 2.13.0: torch.distributed.checkpoint.load copies what was saved into the dtype of the tensor it is given, without a word.
# A weight saved in float32 and loaded into an int8 tensor comes back truncated (0.9 is 0), and int8 codes loaded into a
# bfloat16 weight come back as that many ones. A tensor of another shape is an error.
#
# One would guess that a dtype that cannot hold the values is refused as a shape is: both stand in the checkpoint's
# metadata, and a model in 8 bits has int8 tensors under the names that the model in high precision has.
#
# Exits non-zero if a load into another dtype raises or warns.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - "$dir" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp


def through(saved, target, name):
    folder = f"{sys.argv[1]}/{name}"
    dcp.save({"weight": saved}, checkpoint_id=folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load({"weight": target}, checkpoint_id=folder)
    return target, [str(w.message) for w in caught if "dtype" in str(w.message)]


codes, about_codes = through(torch.tensor([0.9, -1.9, 3.0]), torch.zeros(3, dtype=torch.int8), "a")
values, about_values = through(torch.tensor([100, -7], dtype=torch.int8), torch.zeros(2).bfloat16(), "b")
try:
    through(torch.zeros(3), torch.zeros(4), "c")
    shape = "loaded"
except dcp.api.CheckpointException as error:
    shape = "refused: " + next(line for line in str(error).splitlines() if "ValueError" in line)
print("float32 [0.9, -1.9, 3.0] into int8:", codes.tolist(), about_codes)
print("int8 [100, -7] into bfloat16:", values.tolist(), about_values)
print("another shape:", shape)
assert codes.tolist() == [0, -1, 3] and values.tolist() == [100, -7]
assert not about_codes and not about_values and shape.startswith("refused")
PYTHON
