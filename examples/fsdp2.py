"""Train under FSDP2, with a 4-bit optimizer, products in int8 and compiled blocks.

python examples/fsdp2.py
torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowbit
from lowbit import Int8MixedPrecision

if "RANK" in os.environ:  # torchrun sets it
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
device = torch.device("cpu")
if dist.get_backend() == "nccl":
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(2)]
model = nn.Sequential(*blocks).to(device)
lowbit.train.prepare_(model, Int8MixedPrecision(always=True))  # before FSDP2
for block in model:
    fully_shard(block)  # gathers one byte an element
fully_shard(model)
optimizer = lowbit.optim.AdamW4bit(model.parameters(), lr=1e-3)  # after it
compiled = torch.compile(model, backend="aot_eager")  # without a backend: inductor

inputs = torch.randn(64, 128, device=device)
losses = []
for _ in range(8):
    loss = (compiled(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} processes: loss {losses[0]:.3f}, then {losses[-1]:.3f}")
assert losses[-1] < losses[0]
dist.destroy_process_group()
