#!/usr/bin/env bash
# torch 2.13.0 (2.11.0 too): `torch.autograd.graph.saved_tensors_hooks` whose two hooks are fx graphs are compiled with the code
# that they surround. If that code calls `torch.utils.checkpoint` and the checkpoint holds `scaled_dot_product_attention`,
# the compiler raises "could not find saved tensor getitem_2 in bw_g_inputs". Eager code runs, a checkpoint
# without attention compiles, and so does attention without a checkpoint.
#
# One would guess that hooks work with every function that compiles without them, or that a checkpoint, which saves its
# inputs alone, leaves hooks nothing to fail at: compiling a block together with its checkpoint is the usual form.
# Compiled code within the checkpoint works too.
#
# Exits non-zero if the first form compiles, or another one does not.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat >"$dir/program.py" <<'PYTHON'
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pack = torch.fx.symbolic_trace(lambda t: t.to(torch.float16))
unpack = torch.fx.symbolic_trace(lambda t: t.to(torch.float32))
linear = torch.nn.Linear(16, 16)


def attention(x):
    q = linear(x).view(2, 4, 4, 4)
    return x + F.scaled_dot_product_attention(q, q, q).reshape(2, 4, 16)


def gate(x):
    return x + F.silu(linear(x)) * linear(x)


def kept(f):
    return lambda x: checkpoint(f, x, use_reentrant=False)


def compiled(f):
    torch.compiler.reset()
    return torch.compile(f, backend="aot_eager")


def outcome(f):
    x = torch.randn(2, 4, 16, requires_grad=True)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = f(x)
        y.sum().backward()
        return "runs"
    except torch._dynamo.exc.BackendCompilerFailed as error:
        return str(error).splitlines()[1]


found = {
    "attention in a checkpoint, eager": outcome(kept(attention)),
    "gate in a checkpoint, compiled": outcome(compiled(kept(gate))),
    "attention without a checkpoint, compiled": outcome(compiled(attention)),
    "compiled attention within a checkpoint": outcome(kept(compiled(attention))),
}
last = outcome(compiled(kept(attention)))
for name, result in found.items():
    print(f"{name}: {result}")
print(f"attention in a checkpoint, compiled: {last}")
assert set(found.values()) == {"runs"} and "could not find saved tensor" in last
PYTHON
"$dir/venv/bin/python" "$dir/program.py"
