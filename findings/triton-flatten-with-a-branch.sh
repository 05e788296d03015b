#!/usr/bin/env bash
# triton 3.7.1, compiled for compute capability 9.0 on a machine without a GPU: tl.range(..., flatten=True) around a loop of
# products does not compile if an `if` on the tile's number stands after the inner loop. The error is
# "RuntimeError: PassManager::run failed", and the text on stderr names a pass (TritonGPUFuseNestedLoops), not the `if`.
# Without flatten, or with tl.where in place of the `if`, the same kernel compiles. So it is in 3.6.0.
#
# One would guess that a branch is allowed: the documentation of `flatten` names no limit, and a persistent kernel that
# treats tiles on a diagonal apart is the usual place for both. Masks and tl.where do the same work.
#
# Exits non-zero if the branch compiles with flatten, or one of the other three does not.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'triton==3.7.1'
cat >"$dir/program.py" <<'PYTHON'
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(x, out, tiles, k, BRANCH: tl.constexpr, FLATTEN: tl.constexpr):
    i = tl.arange(0, 64)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        sums = tl.zeros((64, 64), tl.float32)
        for start in tl.range(0, k, 64):
            block = tl.load(x + i[:, None] * k + start + i[None, :])
            sums = tl.dot(block, tl.trans(block), sums)
        at = out + tile * 4096 + i[:, None] * 64 + i[None, :]
        if BRANCH:
            if tile > 3:
                tl.store(at, sums)
            else:
                tl.store(at, -sums)
        else:
            tl.store(at, tl.where(tile > 3, sums, -sums))


def compiled(branch, flatten):
    types = ("*fp16", "*fp32", "i32", "i32", "constexpr", "constexpr")
    signature = dict(zip(kernel.arg_names, types))
    source = ASTSource(kernel, signature, constexprs={(4,): branch, (5,): flatten})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "compiles"


found = {(b, f): compiled(b, f) for b in (False, True) for f in (False, True)}
for (branch, flatten), outcome in found.items():
    print(f"{'if' if branch else 'tl.where'}, flatten={flatten}: {outcome}")
failed = found.pop((True, True))
sys.exit(not (failed.startswith("RuntimeError") and set(found.values()) == {"compiles"}))
PYTHON
TRITON_CACHE_DIR="$dir/cache" "$dir/venv/bin/python" "$dir/program.py" 2>"$dir/log"
