#!/usr/bin/env bash
# apytypes 0.5.1: fx(x, int_bits, frac_bits) and array.cast(int_bits, frac_bits) round in two ways. The constructor goes
# to the nearest number, and cast drops the low bits, towards minus infinity: with one fraction bit 0.9 is 1.0 by the
# first, and 0.5 by the second, and -0.1 is 0 and -0.5. Normal numbers in steps of 1/16 have a mean error of 0 and of
# -1/32.
#
# One would guess one rule, or that the two steps "quantize at once" and "quantize finely, then cast" agree but for
# double rounding. The mean error adds up: a product over 1,024 inputs that were cast and are all multiplied by 1 is off
# by 32. Both keep the low bits of what is out of range: 9 is -7 with four integer bits.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'apytypes==0.5.1' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import apytypes
import numpy as np

numbers = np.array([0.9, -0.1, -0.6, 3.3, 9.0])
fine = apytypes.fx(numbers, int_bits=8, frac_bits=20)
at_once = apytypes.fx(numbers, int_bits=4, frac_bits=1).to_numpy()
cast = fine.cast(int_bits=4, frac_bits=1).to_numpy()
print("constructor:", at_once, "cast:", cast)
np.testing.assert_array_equal(at_once, [1.0, 0.0, -0.5, 3.5, -7.0])
np.testing.assert_array_equal(cast, [0.5, -0.5, -1.0, 3.0, -7.0])

normal = np.random.default_rng(0).standard_normal(100_000)
errors = [
    float(np.mean(found.to_numpy() - normal))
    for found in (
        apytypes.fx(normal, int_bits=8, frac_bits=4),
        apytypes.fx(normal, int_bits=8, frac_bits=20).cast(int_bits=8, frac_bits=4),
    )
]
print("mean error of normal numbers: constructor {:.5f}, cast {:.5f}".format(*errors))
assert abs(errors[0]) < 0.001 and abs(errors[1] + 1 / 32) < 0.001
PYTHON
