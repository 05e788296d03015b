#!/usr/bin/env bash
# bitsandbytes 0.50.2 (CPU): Lion8bit moves parameters whose gradients are zero by the full learning rate, in every step from
# the second on, and all of them in the same direction: after 100 steps they are at -99 times the learning rate. It takes no
# more than a gradient that is not zero in the same block of 256. Lion (32 bits) leaves them at 0. Adam8bit does it too, but
# slowly (0.1 of the learning rate in all).
#
# One would guess that 8-bit momentum of zero is zero: the code table has a 0, and the state starts at it. The CPU's
# quantizer writes the code beside it instead, 2.1e-5 of the block's largest value. An error of this size is harmless for
# most uses, but Lion takes the sign. Rows of an embedding whose tokens did not occur, and masked weights, drift away.
#
# Exits non-zero if parameters without gradients stay.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'bitsandbytes==0.50.2' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import torch
from bitsandbytes import functional, optim

lr = 1e-3


def moved(optimizer_class):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = optimizer_class([parameter], lr=lr, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.randn(64, 256)
        parameter.grad[:, ::2] = 0
        optimizer.step()
    still = parameter.detach()[:, ::2] / lr
    return still.min().item(), still.max().item()


for optimizer in (optim.Lion, optim.Lion8bit, optim.Adam, optim.Adam8bit):
    least, most = moved(optimizer)
    print(f"{optimizer.__name__}: parameters without gradients are at {least:.3f} ... {most:.3f} learning rates")
    if optimizer is optim.Lion8bit:
        assert -100 < least <= most < -98
    elif optimizer is optim.Lion:
        assert least == most == 0
values = torch.zeros(256)
values[0] = 1.0
codes, state = functional.quantize_blockwise(values, blocksize=256)
print(f"zeros beside a one come back as {functional.dequantize_blockwise(codes, state)[1].item():.3g},", end=" ")
print(f"and the table has {state.code.abs().min().item()}")
assert functional.dequantize_blockwise(codes, state)[1] != 0 and state.code.abs().min() == 0
PYTHON
