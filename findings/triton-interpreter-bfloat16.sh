#!/usr/bin/env bash
# triton 3.7.1, TRITON_INTERPRET=1: arithmetic on bfloat16 values works on their bit patterns, as 16-bit integers. A kernel
# that loads 1.0 and adds it to itself gives 1.7e38 (0x3f80 + 0x3f80 = 0x7f00), and tl.sum of 1, 2, 3, 4 gives 0.
# Nothing is raised and nothing warns. After `.to(tl.float32)` all results are right, and so are those of float16.
#
# One would guess that a type without arithmetic is refused or computed in float32: the interpreter loads, stores and
# converts bfloat16, and is there to find errors of a kernel without a GPU, where these kernels are right.
#
# Exits non-zero if the sum of bfloat16 numbers is right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'triton==3.7.1' 'numpy==2.4.6'
cat >"$dir/program.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def double_and_sum(x, y, WIDE: tl.constexpr):
    i = tl.arange(0, 4)
    values = tl.load(x + i)
    if WIDE:
        values = values.to(tl.float32)
    tl.store(y + i, (values + values).to(tl.float32))
    tl.store(y + 4, tl.sum(values).to(tl.float32))


def run(dtype, wide=False):
    y = torch.empty(5)
    double_and_sum[(1,)](torch.tensor([1.0, 2, 3, 4], dtype=dtype), y, wide)
    return y.tolist()


right = [2.0, 4.0, 6.0, 8.0, 10.0]
narrow, wide, half = run(torch.bfloat16), run(torch.bfloat16, wide=True), run(torch.float16)
print("doubles and sum of 1, 2, 3, 4")
print("bfloat16:", [f"{value:.4g}" for value in narrow])
print("bfloat16 as float32:", wide, "float16:", half)
assert wide == half == right
assert narrow[0] > 1e38 and narrow[4] == 0
PYTHON
TRITON_INTERPRET=1 "$dir/venv/bin/python" "$dir/program.py"
