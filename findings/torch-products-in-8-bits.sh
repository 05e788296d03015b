#!/usr/bin/env bash
# torch 2.13.0 (CPU): x @ w of two float8_e4m3fn matrices gives a float8_e4m3fn matrix, whose values end at 448: the
# product of 64 threes with 64 threes is 448, not 576. Two int8 matrices give an int8 matrix, which keeps the low byte:
# it is 64. Nothing is raised. A sum of the same int8 elements is int64, and float8 has no other arithmetic: `x + x`, `x
# * 2`, `-x` and `x.sum()` raise "not implemented".
#
# One would guess an error, as for all other arithmetic of float8, or a wider result, as torch._int_mm and
# torch._scaled_mm have it. A test of a quantized product on small numbers passes.
#
# Exits non-zero if a product is refused, right, or of another dtype.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import operator

import torch

exact = 3 * 3 * 64
found = {}
for dtype in (torch.float8_e4m3fn, torch.int8):
    threes = torch.full((64, 64), 3.0).to(dtype)
    product = threes @ threes
    found[dtype] = product.dtype, product[0, 0].item()
    print(f"{dtype}: the product is {found[dtype][0]} {found[dtype][1]}, exactly {exact}")
assert found[torch.float8_e4m3fn] == (torch.float8_e4m3fn, 448.0)
assert found[torch.int8] == (torch.int8, exact % 256)

refused = []
x = torch.ones(4).to(torch.float8_e4m3fn)
for name, function in (("x + x", lambda: x + x), ("x * 2", lambda: x * 2), ("-x", lambda: operator.neg(x)), ("x.sum()", x.sum)):
    try:
        function()
    except RuntimeError as error:
        refused += [name] if "not implemented" in str(error) else []
print("refused for float8:", ", ".join(refused))
assert len(refused) == 4 and torch.ones(4, dtype=torch.int8).sum().dtype is torch.int64
PYTHON
