#!/usr/bin/env bash
# qwix 0.1.8, jax 0.10.2 (CPU): qwix.dot_general of two int8 arrays that were quantized from float16 is infinite where
# the sum of the codes' products exceeds 65504: the int32 sum is cast to float16 before the scales bring it down. With
# 1,024 inputs of size 1, a seventh of the outputs is infinite, and the largest true one is 130. From bfloat16 and
# float32 the error is 1%.
#
# One would guess that the scales are applied to the int32 sum, or in float32, and that the output overflows only where
# the true output does. Codes are up to 127, so that five products of the largest codes are enough.
#
# Exits non-zero if no output is infinite.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'qwix==0.1.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'flax==0.12.8' \
    'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import qwix

infinite = {}
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    x = jax.random.normal(jax.random.key(0), (64, 1024)).astype(dtype)
    weight = jax.random.normal(jax.random.key(1), (1024, 64)).astype(dtype)
    codes = qwix.quantize(x, jnp.int8, channelwise_axes=(0,)), qwix.quantize(weight, jnp.int8, channelwise_axes=(1,))
    y = np.float64(qwix.dot_general(*codes, (((1,), (0,)), ((), ()))))
    exact = np.float64(x) @ np.float64(weight)
    infinite[dtype] = np.isinf(y).mean()
    finite = np.isfinite(y)
    error = np.linalg.norm((y - exact)[finite]) / np.linalg.norm(exact[finite])
    largest = abs(exact).max()
    print(f"{dtype.__name__}: infinite {infinite[dtype]:.3f}, others off by {error:.3f}, largest {largest:.0f}")
    assert error < 0.02 and largest < 200
assert infinite[jnp.float32] == infinite[jnp.bfloat16] == 0 and infinite[jnp.float16] > 0.05
PYTHON
