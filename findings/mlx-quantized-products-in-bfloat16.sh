#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mx.quantized_matmul, the product of every quantized layer, adds up in the type of its inputs. In
# bfloat16, 4,096 ones times 4,096 ones are 256. Normal numbers are off by 1.8% at 256 inputs, 7% at 4,096 and 14% at
# 16,384, in 4 bits and in 8: twice the width of a weight wins nothing. float16 is off by 1% at 4,096. The same product
# of the dequantized weight, x @ w.T in bfloat16, is off by 0.17% at every size.
#
# One would guess a float32 sum, as in mlx's own plain product, where bfloat16 costs the last bit of an output. The
# error is larger than that of the 8-bit weight (0.5%), so a comparison of formats on a CPU compares sums.
#
# Exits non-zero if the quantized product in bfloat16 is as exact as the plain one.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'mlx[cpu]==0.32.4' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)


def normal(*shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


for inputs in (256, 4096, 16384):
    weight, x = normal(64, inputs), normal(8, inputs)
    for bits in (4, 8):
        for dtype in (mx.float32, mx.float16, mx.bfloat16):
            given, options = x.astype(dtype), {"group_size": 64, "bits": bits}
            stored = mx.quantize(weight.astype(dtype), **options)
            values = mx.dequantize(*stored, **options)
            right = given.astype(mx.float32) @ values.astype(mx.float32).T
            products = mx.quantized_matmul(given, *stored, **options), given @ values.T
            low, plain = (
                (mx.linalg.norm(p.astype(mx.float32) - right) / mx.linalg.norm(right)).item() for p in products
            )
            print(f"{inputs} inputs, {bits} bits, {dtype}: quantized off by {low:.4f}, plain by {plain:.4f}")
            assert plain < 0.003
            if dtype == mx.bfloat16:
                assert low > {256: 0.01, 4096: 0.05, 16384: 0.1}[inputs]
            if dtype == mx.float32:
                assert low < 1e-4
ones = mx.ones((1, 4096), dtype=mx.bfloat16)
stored = mx.quantize(mx.ones((64, 4096), dtype=mx.bfloat16), group_size=64, bits=8)
total = mx.quantized_matmul(ones, *stored, group_size=64, bits=8)[0, 0].item()
print(f"4,096 ones times 4,096 ones in bfloat16: {total}")
assert total == 256
PYTHON
