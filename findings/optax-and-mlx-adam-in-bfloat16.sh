#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2, mlx 0.32.4 (CPU): the second moment of Adam and AdamW of bfloat16 parameters never gets
# smaller. 1,000 gradients of 1 and then 2,000 of zero leave it at 0.5, where float32 has 0.085 and float16 0.10. It
# does not reach the 0.63 of float32 in the first 1,000 steps either. optax.rmsprop with decay=0.999 is the same; mlx's
# RMSprop, with 0.99, forgets. After a spike of gradients, steps stay short for the rest of the run: gradients of 0.01 after
# those of 1 take steps of 0.014 learning rates in bfloat16, for ever, and of 0.57 in float32 after 8,000 steps.
#
# One would guess that moments of such a type are coarse, off by the 0.4% of its last bit, and follow the gradients. But
# the decay of a step, 0.1%, is less than half of the last bit: 0.999 times a moment rounds to the moment, and the
# number 0.999 itself, which both libraries turn into the array's type, is 1. optax's mu_dtype concerns the first
# moment.
#
# Exits non-zero if the second moment in bfloat16 falls.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' 'jax==0.10.2' 'optax==0.2.8' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import functools

import jax
import jax.numpy as jnp
import mlx.core as mx
import mlx.optimizers
import optax

mx.set_default_device(mx.cpu)
phases = ((1.0, 1000), (0.0, 2000))


def by_optax(transformation, dtype, phases=phases):
    """The second moment after each phase, and the last update."""
    parameter, found, update = jnp.ones(4, dtype), [], None
    state = transformation.init(parameter)

    def step(state, gradient):
        update, state = transformation.update(jnp.full(4, gradient, dtype), state, parameter)
        return state, update[0]

    for gradient, steps in phases:
        state, updates = jax.jit(functools.partial(jax.lax.scan, step))(state, jnp.full(steps, gradient))
        found.append(round(float(state[0].nu[0]), 3))
    return found, abs(float(updates[-1]))


def by_mlx(optimizer, dtype):
    parameters, found = {"w": mx.ones((4,), dtype=dtype)}, []
    for gradient, steps in phases:
        for _ in range(steps):
            parameters = optimizer.apply_gradients({"w": mx.full((4,), gradient, dtype=dtype)}, parameters)
            mx.eval(parameters, optimizer.state)
        found.append(round(optimizer.state["w"]["v"].astype(mx.float32)[0].item(), 3))
    return found


for name in ("float32", "float16", "bfloat16"):
    found = {
        "optax.adam": by_optax(optax.adam(1e-3), getattr(jnp, name))[0],
        "optax.adamw": by_optax(optax.adamw(1e-3), getattr(jnp, name))[0],
        "optax.rmsprop": by_optax(optax.rmsprop(1e-3, decay=0.999), getattr(jnp, name))[0],
        "mlx Adam": by_mlx(mlx.optimizers.Adam(1e-3), getattr(mx, name)),
        "mlx AdamW": by_mlx(mlx.optimizers.AdamW(1e-3), getattr(mx, name)),
    }
    print(name, found)
    for peak, end in found.values():
        assert (peak == end == 0.5) if name == "bfloat16" else (0.6 < peak < 0.65 and end < 0.11)
spike = ((1.0, 1000), (0.01, 8000))
low, high = (by_optax(optax.adam(1.0), dtype, spike)[1] for dtype in (jnp.bfloat16, jnp.float32))
print(f"steps in learning rates, 8,000 gradients of 0.01 after 1,000 of 1: bfloat16 {low:.3f}, float32 {high:.3f}")
assert low < 0.02 and high > 0.3
PYTHON
