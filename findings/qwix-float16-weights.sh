#!/usr/bin/env bash
# qwix 0.1.8, jax 0.10.2 (CPU): qwix.quantize of a float16 weight gives zeros wherever a channel's scale is below
# 0.0078, the square root of float16's smallest normal number: qwix takes such a scale for 0 and puts 1 in its place.
# That is every channel whose largest weight is below 1 in int8, or below 0.06 in int4. Weights of size 0.02 come back
# as zeros from int8, also with scale_dtype=float32, and most of them from int4. In bfloat16 and float32 the error of
# int8 is 0.7%. Nothing warns.
#
# One would guess that the limit for "zero" lies below any weight of a model, as it does in bfloat16 (1e-19), and that
# float16, whose rounding is finer, is no worse than bfloat16. Scales of 1e-4 are usual, and float16 holds them.
#
# Exits non-zero if the float16 weights come back.
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

plain = jax.random.normal(jax.random.key(0), (64, 64))


def error(size, dtype, kind, **options):
    weight = (plain * size).astype(dtype)
    back = qwix.dequantize(qwix.quantize(weight, kind, channelwise_axes=(1,), **options))
    weight, back = np.float64(weight), np.float64(back)
    return np.linalg.norm(back - weight) / np.linalg.norm(weight)


for kind in (jnp.int8, jnp.int4):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        found = {size: round(float(error(size, dtype, kind)), 3) for size in (1, 0.02)}
        print(f"{kind.__name__} of {dtype.__name__} weights, relative error by their size: {found}")
wide = error(0.02, jnp.float16, jnp.int8, scale_dtype=jnp.float32)
print(f"int8 of float16 weights of 0.02 with scale_dtype=float32: {wide:.3f}")
assert error(1, jnp.float16, jnp.int8) < 0.01 and error(0.02, jnp.bfloat16, jnp.int8) < 0.01
assert error(0.02, jnp.float16, jnp.int8) > 0.99 and error(0.02, jnp.float16, jnp.int4) > 0.7 and wide > 0.99
PYTHON
