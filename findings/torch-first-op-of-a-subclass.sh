#!/usr/bin/env bash
# torch 2.13.0: the first operation of any tensor subclass with __torch_dispatch__ imports torch.distributed.tensor, sympy
# and some 500 modules more, which takes half a second and 40 MB. The subclass need not know of DTensor or of processes.
#
# One would guess that an operation imports nothing, and that `import torch` is what a program waits for. So the time
# shows up in the first forward pass, and in peak memory where somebody measures how much a model takes to load.
#
# Exits non-zero if the operation imports it no longer.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import sys
import time

import torch


class Doubled(torch.Tensor):
    """Holds a plain tensor, and shows it at twice its value."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half_of_it = half

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(args[0].half_of_it, *args[1:], **(kwargs or {})))


tensor = Doubled(torch.ones(2, 2))
before = set(sys.modules)
start = time.process_time()
tensor.detach()
seconds = time.process_time() - start
new = set(sys.modules) - before
print(f"torch {torch.__version__}: detach() imported {len(new)} modules in {seconds:.2f} s of CPU time")
print("torch.distributed.tensor among them:", "torch.distributed.tensor" in new)
sys.exit(0 if "torch.distributed.tensor" in new and "sympy" in new else 1)
PYTHON
