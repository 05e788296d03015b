#!/usr/bin/env bash
# jax 0.10.2 and ml_dtypes 0.6.0: x.astype(int4) of the same float32 numbers, to the same dtype (jax's int4 is
# ml_dtypes'), saturates if x is an array of jax, and keeps the low four bits if it is one of numpy. 9 is 7 in jax and
# -7 in numpy, 100 is 7 and 4, -20 is -8 and -4, and 1e6 is 7 and 0. uint4 and int2 are alike. Nothing warns.
#
# One would guess that one dtype has one cast. float4_e2m1fn, of the same package, saturates in both, and for int8 a
# number a little out of range is rare: quantizers clamp to -127 or use the whole range. With four bits it is common: a
# scale of the largest weight over 7.5 makes 8 of it after rounding. Weights that are made in numpy and tested in jax
# change their sign without a clamp, and look right in the test.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'jax==0.10.2' 'ml_dtypes==0.6.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

numbers = np.array([6.0, 8.0, 9.0, 100.0, -9.0, -20.0, 1e6], np.float32)
for name, first, second in (
    ("int4", [6, 7, 7, 7, -8, -8, 7], [6, -8, -7, 4, 7, -4, 0]),
    ("uint4", [6, 8, 9, 15, 0, 0, 15], [6, 8, 9, 4, 7, 12, 0]),
    ("float4_e2m1fn", [6, 6, 6, 6, -6, -6, 6], [6, 6, 6, 6, -6, -6, 6]),
):
    dtype = getattr(ml_dtypes, name)
    assert getattr(jnp, name).dtype == np.dtype(dtype)
    array = jnp.asarray(numbers)
    casts = array.astype(dtype), jax.jit(lambda x, dtype=dtype: x.astype(dtype))(array)
    found = [np.asarray(cast).astype(np.float32) for cast in casts]
    own = numbers.astype(dtype).astype(np.float32)
    print(f"{name}: jax {found[0]}, numpy {own}")
    np.testing.assert_array_equal(found[0], first)
    np.testing.assert_array_equal(found[1], first)
    np.testing.assert_array_equal(own, second)
PYTHON
