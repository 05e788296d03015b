#!/usr/bin/env bash
# tensorflow 2.21.0: tf.quantization.fake_quant_with_min_max_vars moves a range that does not contain zero until it
# does, and then clips to it. From 1 to 2 it rounds to steps between 0 and 1, so that each number from 1 on is 1. From
# -2 to -1 each number up to -1 is -1. The gradient is 0 within the range that was asked for. Nothing warns.
# fake_quant_with_min_max_args and fake_quant_with_min_max_vars_per_channel do the same.
#
# One would guess that such a range is widened to contain zero, from 0 to 2, with steps twice as large: TensorFlow's own
# quantize_and_dequantize and quantize do so, and torch's observers. Positions, variances and pixel values with an
# offset have ranges of this kind, and a running minimum finds them.
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

x = tf.constant([1.0, 1.25, 1.5, 1.75, 2.0])
for sign in (1, -1):
    ends = sorted((sign * 1.0, sign * 2.0))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.quantization.fake_quant_with_min_max_vars(sign * x, *ends)
    slopes = tape.gradient(y, x).numpy()
    other = tf.quantization.quantize_and_dequantize_v2(sign * x, *ends, signed_input=sign < 0, range_given=True)
    print(f"range {ends}: {(sign * x).numpy()} -> {y.numpy()}, gradients {slopes}")
    print("  quantize_and_dequantize_v2:", other.numpy().round(3))
    np.testing.assert_array_equal(y, np.full(5, float(sign), np.float32))
    assert not slopes[1:].any(), "the behaviour changed"
    np.testing.assert_allclose(other, sign * x, atol=0.02)
each = tf.quantization.fake_quant_with_min_max_vars_per_channel(x[:, None], [1.0], [2.0])
args = tf.quantization.fake_quant_with_min_max_args(x, 1.0, 2.0)
assert (each.numpy() == 1).all() and (args.numpy() == 1).all()
PYTHON
