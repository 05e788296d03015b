#!/usr/bin/env bash
# optax 0.2.8, jax 0.10.2 (CPU): optax.global_norm of float16 gradients holds the squares and their sum in float16. A
# norm above 256 is infinite, and clip_by_global_norm then divides by infinity: it returns zeros for gradients of 200,
# without a warning. Gradients of 1e-5 have the norm 0, and those of 1e-4 72% of their norm, so a limit is not applied.
# float32 and bfloat16 are right.
#
# One would guess that a norm of 400, which float16 holds, comes out as 400 and is clipped to the limit; jax adds
# float16 in float32, and torch.nn.utils.clip_grad_norm_ clips the same gradients to norm 1. Gradients of a scaled loss
# are large by design.
#
# Exits non-zero if the clipped gradient is not zero.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'optax==0.2.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6' 'ml_dtypes==0.6.0'
"$dir/venv/bin/python" - 2>/dev/null <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import optax

clip = optax.clip_by_global_norm(1.0)
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    large = {"weight": jnp.full((2, 2), 200, dtype)}
    clipped = clip.update(large, clip.init(large))[0]["weight"]
    norm, after = float(optax.global_norm(large)), np.linalg.norm(np.float64(clipped))
    normal = jax.random.normal(jax.random.key(0), (1000, 1000))
    small = {}
    for size in (1e-4, 1e-5):
        tiny = (normal * size).astype(dtype)
        norm_of_tiny = float(optax.global_norm({"weight": tiny}))
        small[size] = round(norm_of_tiny / float(np.linalg.norm(np.float64(tiny))), 2)
    print(f"{dtype.__name__}: four of 200 have norm {norm}, clipped {after:.3f}; small ones have {small} of their norm")
    if dtype == jnp.float16:
        assert np.isinf(norm) and after == 0 and small[1e-5] == 0 and small[1e-4] < 0.9
    else:
        assert norm == 400 and abs(after - 1) < 0.01 and all(abs(ratio - 1) < 0.02 for ratio in small.values())
PYTHON
