#!/usr/bin/env bash
# jax 0.10.2 (CPU): the sum of a float8_e4m3fn array is added up in float8_e4m3fn. 64 threes are 128, not 192, and the mean, by
# the same sum, is 2 of the threes. jit does the same. Partial sums of lanes decide how far the sum comes, so that other
# lengths and machines give other wrong numbers. Of bfloat16, 1,000 ones are 1000.
#
# One would guess what jax does for bfloat16 and float16: partial sums in float32, and one rounding at the end. 192 is a float8
# number.
#
# Exits non-zero if the sums are right.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import jax
import jax.numpy as jnp

threes, ones = jnp.full(64, 3, jnp.float8_e4m3fn), jnp.ones(1000, jnp.bfloat16)
for name, total in (("eager", jnp.sum), ("jit", jax.jit(jnp.sum))):
    print(f"{name}: 64 threes in float8 {total(threes)}, 1,000 ones in bfloat16 {total(ones)}")
    assert float(total(threes)) < 192 and float(total(ones)) == 1000
wide = threes.astype(jnp.float32)
print(f"mean of the threes {threes.mean()}, in float32 {wide.mean()}; 192 in float8", wide.sum().astype(jnp.float8_e4m3fn))
assert float(threes.mean()) < 3 and float(wide.mean()) == 3 and float(wide.sum().astype(jnp.float8_e4m3fn)) == 192
PYTHON
