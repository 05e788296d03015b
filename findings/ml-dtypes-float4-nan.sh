#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6, jax 0.10.2 (CPU): NaN as float4_e2m1fn, float6_e2m3fn or float6_e3m2fn is zero, in numpy
# and in jax, and nothing warns. Infinity and everything else beyond the range is the largest number, 6 in float4. So
# isnan after the cast finds nothing, and a tensor full of NaN is a tensor of zeros.
#
# One would guess that what has no code saturates, as infinity does, or that the cast warns, as numpy does for NaN in
# int8 ("invalid value encountered in cast"). float8_e4m3fn of the same package keeps NaN. Checks belong before the
# cast.
#
# Exits non-zero if NaN becomes anything but zero in these types, or a cast warns.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'ml_dtypes==0.6.0' 'numpy==2.4.6' 'jax==0.10.2'
"$dir/venv/bin/python" - <<'PYTHON'
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np

x = np.array([np.nan, -np.nan, np.inf, -np.inf, 100, 1], np.float32)
for name, largest in (("float4_e2m1fn", 6), ("float6_e2m3fn", 7.5), ("float6_e3m2fn", 28)):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low = x.astype(getattr(ml_dtypes, name))
    print(f"{name}: {x.tolist()} is {low.astype(np.float32).tolist()}, isnan {np.isnan(low).any()}")
    assert not np.isnan(low).any() and low.astype(np.float32).tolist()[2:] == [largest, -largest, largest, 1]
    assert low[:2].astype(np.float32).tolist() == [0, 0]
by_jax = jnp.asarray(x).astype(jnp.float4_e2m1fn).astype(jnp.float32)
print(f"jax: {by_jax.tolist()}")
assert by_jax.tolist() == [0, 0, 6, -6, 6, 1]
assert np.isnan(x.astype(ml_dtypes.float8_e4m3fn)[0])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    x.astype(np.int8)
print(f"int8: {[str(w.message) for w in caught]}")
assert caught
PYTHON
