#!/usr/bin/env bash
# torch 2.13.0: autograd raises an error when a tensor that it saved is changed in place before backward. Under
# torch.autograd.graph.saved_tensors_hooks it does not look any more, not even with hooks that return what they get: a
# changed tensor gives wrong gradients without a word. h * h with h = [2, 3] has the gradient [4, 6], and [0, 0] once h is
# set to zeros after the product. torch.autograd.graph.save_on_cpu does the same with tensors that are on the CPU
# already, since it copies none of them.
#
# One would guess that hooks that change nothing change nothing. Whoever keeps saved activations in fewer bits, and leaves
# some of them as they are, has to compare versions by himself.
#
# Exits non-zero if the values change.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import contextlib

import torch


def gradient(context):
    w = torch.tensor([2.0, 3.0], requires_grad=True)
    h = w * 1
    with context:
        y = (h * h).sum()
    with torch.no_grad():
        h.zero_()
    y.backward()
    return w.grad.tolist()


try:
    gradient(contextlib.nullcontext())
    plain = "no error"
except RuntimeError as error:
    plain = f"RuntimeError: {str(error)[:70]} …"
identity = gradient(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
on_cpu = gradient(torch.autograd.graph.save_on_cpu())
print("plain:   ", plain)
print("identity:", identity, " save_on_cpu:", on_cpu)
assert plain.startswith("RuntimeError") and identity == on_cpu == [0.0, 0.0]
PYTHON
