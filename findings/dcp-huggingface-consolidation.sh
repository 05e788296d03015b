#!/usr/bin/env bash
# torch 2.13.0, safetensors 0.8.0: HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True) of
# torch.distributed.checkpoint writes the shards right, and then a consolidated file in which a tensor without dimensions
# is 0.0 (here 3.0 was saved), without a warning. A tensor of integers, such as int8 codes, ends in
# "torch.finfo() requires a floating point input type".
#
# One would guess that a consolidated file holds what the shards hold, or that the call fails; safetensors has both kinds
# of tensors, and the shards beside the file are right.
#
# Exits non-zero if the consolidated values are right, or integers are taken.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'safetensors==0.8.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - <<'PYTHON'
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter


def saved(tensor: torch.Tensor, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save({"w": tensor}, storage_writer=writer)
    name = "model-00001-of-00001.safetensors"
    return load_file(f"{folder}/sharded/shard-00001-{name}")["w"], load_file(f"{folder}/{name}")["w"]


shard, whole = saved(torch.tensor([3.0]), "one")
assert shard.item() == whole.item() == 3.0
shard, whole = saved(torch.tensor(3.0), "none")
print(f"a tensor without dimensions, 3.0: {shard.item()} in the shard, {whole.item()} consolidated")
assert shard.item() == 3.0 and whole.item() == 0.0
try:
    saved(torch.ones(8, 8, dtype=torch.int8), "int8")
except BaseException as error:  # dcp's CheckpointException is not an Exception
    text = str(error).strip().splitlines()[-1]
    print("int8:", text)
    assert "torch.finfo() requires a floating point input type" in text
else:
    raise SystemExit("int8 tensors are consolidated now")
PYTHON
