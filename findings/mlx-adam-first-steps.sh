#!/usr/bin/env bash
# mlx 0.32.4 (CPU): mlx.optimizers.Adam and AdamW leave out the correction of the moments' bias unless they are made with
# bias_correction=True. With constant gradients the first step is 3.2 times the learning rate, the twelfth 6.6 times, and 100
# steps move a weight by 466 learning rates instead of 100.
#
# One would guess that a class named Adam makes Adam's step, whose correction is in the paper's algorithm and in every other
# framework's default. A learning rate and a warm-up that were tuned elsewhere are several times too high at the start, and
# the betas decide by how much: with 0.9 and 0.95 the first step is 0.45 learning rates.
#
# Exits non-zero if the first step is the learning rate.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q mlx==0.32.4 mlx-cpu==0.32.4
"$dir/venv/bin/python" - <<'PYTHON'
import mlx.core as mx
import mlx.optimizers as optimizers

mx.set_default_device(mx.cpu)
lr = 1e-3


def steps(optimizer):
    parameters, sizes = {"weight": mx.zeros(4)}, []
    for _ in range(100):
        before = parameters["weight"][0].item()
        parameters = optimizer.apply_gradients({"weight": mx.full((4,), 0.5)}, parameters)
        sizes.append((before - parameters["weight"][0].item()) / lr)
    return sizes


for name, optimizer in (
    ("Adam", optimizers.Adam(lr)),
    ("AdamW", optimizers.AdamW(lr, weight_decay=0.0)),
    ("Adam, betas 0.9 and 0.95", optimizers.Adam(lr, betas=[0.9, 0.95])),
    ("Adam, bias_correction=True", optimizers.Adam(lr, bias_correction=True)),
):
    found = steps(optimizer)
    largest = max(found)
    print(f"{name}: first step {found[0]:.2f} learning rates, largest {largest:.2f}", end=" ")
    print(f"(step {found.index(largest) + 1}), sum of 100 {sum(found):.0f}")
    if "bias_correction" in name:
        assert abs(found[0] - 1) < 1e-3 and abs(largest - 1) < 1e-2
    elif "betas" not in name:
        assert abs(found[0] - 3.16) < 0.01 and largest > 6
PYTHON
