#!/usr/bin/env bash
# coremltools 9.0: convert() of an ML program stores weights in float16 by default, and what becomes of those below float16's
# smallest number, 6e-8, depends on the size of their tensor. In one of fewer than 400 elements they become 6e-8 with their
# sign: a row of weights of 1e-10 comes back about a thousand times as large, all of it alike. In a tensor of 400 they
# become 0. One weight of 7e4 keeps its whole tensor in float32. Nothing warns.
#
# One would guess that small numbers round to the nearest that there is, 0, as casts do, or keep their tensor in float32 as
# large ones do; and that a rule does not change between 19 and 20 rows. The exception is meant for the epsilon of a norm,
# and also takes scales, gates and adapters that begin near zero.
#
# Exits non-zero if small weights of a small tensor become 0 or stay as they are.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'coremltools==9.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb


def stored(weight):
    """The weight in the converted program, and the warnings that name it or its precision."""

    @mb.program(input_specs=[mb.TensorSpec(shape=(1, weight.shape[1]))])
    def program(x):
        return mb.linear(x=x, weight=weight)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ct.convert(program, convert_to="mlprogram")
    operations = model._mil_program.functions["main"].operations
    found = next(o for o in operations if o.op_type == "linear").weight.val
    return found, [str(w.message) for w in caught if "weight" in str(w.message) or "fp16" in str(w.message)]


rng = np.random.default_rng(0)
for rows in (19, 20):
    weight = rng.standard_normal((rows, 20)).astype(np.float32)
    weight[0] *= 1e-10
    found, said = stored(weight)
    ratio = np.abs(found[0].astype(np.float64)) / np.abs(weight[0])
    print(f"{weight.size} elements, {found.dtype}: row of 1e-10 comes back {np.median(ratio):.0f} times as large; warnings {said}")
    assert found.dtype == np.float16 and not said
    if weight.size < 400:
        assert np.median(ratio) > 100 and np.array_equal(np.sign(found[0]), np.sign(weight[0]))
        assert len(np.unique(np.abs(found[0]))) == 1
    else:
        assert not found[0].any()
weight[1, 1] = 7e4
print("with one weight of 7e4:", stored(weight)[0].dtype)
assert np.array_equal(stored(weight)[0], weight)
PYTHON
