#!/usr/bin/env bash
# tensorflow 2.21.0 (CPU): tf.reduce_mean of float16 counts its elements in float16. Of 65,520 or more along the axis
# the mean is 0, whatever they are, and NaN where their sum is infinite: the mean of 70,000 numbers of -0.5 is 0, and
# that of 70,000 ones is NaN. The same function in tf.function(jit_compile=True) gives -0.5 and 1, and so does numpy.
#
# One would guess a wrong mean where the sum of the numbers is beyond 65,504, which is known of float16, and a right one
# where the sum is small. Here the number of elements alone decides, and a mean loss of 0 looks like a model that
# learned. tf.nn.moments, and means of bfloat16, have no such limit.
#
# Exits non-zero if that changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'tensorflow-cpu==2.21.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import numpy as np
import tensorflow as tf

compiled = tf.function(tf.reduce_mean, jit_compile=True)
for count in (65_000, 70_000):
    for value in (-0.5, 0.001, 1.0):
        numbers = tf.fill([count], tf.constant(value, tf.float16))
        mean = float(tf.reduce_mean(numbers))
        others = float(compiled(numbers)), float(np.mean(numbers.numpy()))
        print(f"{count} numbers of {value}: {mean:.4f}; compiled {others[0]:.4f}, numpy {others[1]:.4f}")
        np.testing.assert_allclose(others, value, rtol=0.01)
        expected = value if count < 65_520 else np.nan if value == 1 else 0
        np.testing.assert_allclose(mean, expected, rtol=0.01)
    columns = tf.fill([count, 2], tf.constant(-0.5, tf.float16))
    assert (tf.reduce_mean(columns, 0).numpy() == 0).all() == (count > 65_520)
    assert float(tf.nn.moments(numbers, 0)[0]) == 1 and float(tf.reduce_mean(tf.cast(numbers, tf.bfloat16))) == 1
PYTHON
