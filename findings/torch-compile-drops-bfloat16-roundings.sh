#!/usr/bin/env bash
# torch 2.13.0 (CPU, torch.compile's default backend, with g++): x - x.to(torch.bfloat16).to(torch.float32) is 0 for every x
# under torch.compile, and the rounding error in eager mode. float16 is alike. Through float8 the error stays. A function
# that returns both halves, the bfloat16 one and the rest, returns a rounded first half and a rest of 0, which do not add
# up to x.
#
# One would guess that a cast rounds. The compiler removes casts to a 16-bit type and back, since it takes them for
# artefacts of mixed precision. Split master weights, error feedback, compensated sums
# and fake quantization to bfloat16 are written so, and lose what they are there for.
# torch._inductor.config.emulate_precision_casts = True keeps the casts.
#
# Exits non-zero if the compiled rest is right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
cat > "$dir/case.py" <<'PYTHON'
import torch


def split(x, dtype):
    high = x.to(dtype)
    return high, x - high.to(torch.float32)


torch.manual_seed(0)
x = torch.randn(1000)
for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
    high, rest = split(x, dtype)
    compiled_high, compiled_rest = torch.compile(split)(x, dtype)
    lost = (compiled_high.float() + compiled_rest - x).abs().max().item()
    print(f"{dtype}: largest rest {rest.abs().max():.2g}, compiled {compiled_rest.abs().max():.2g}, lost {lost:.2g}")
    assert torch.equal(high.float(), compiled_high.float())
    if dtype == torch.float8_e4m3fn:
        assert torch.equal(rest, compiled_rest)
    else:
        assert rest.abs().max() > 1e-4 and not compiled_rest.any() and lost == rest.abs().max().item()
torch._dynamo.reset()
torch._inductor.config.emulate_precision_casts = True
rest = torch.compile(split)(x, torch.bfloat16)[1]
print(f"bfloat16 with emulate_precision_casts: largest rest {rest.abs().max():.2g}")
assert torch.equal(rest, split(x, torch.bfloat16)[1])
PYTHON
"$dir/venv/bin/python" "$dir/case.py"
