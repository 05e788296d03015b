#!/usr/bin/env bash
# torch 2.13.0 (CPU, bfloat16): a training loop that stands within one torch.autocast learns nothing. All 50 losses are
# equal to the last digit, while the optimizer adds the same gradient 50 times: after the block, the loss in float32 is 70
# times that of the untrained model. The same loop with autocast around each forward pass learns the function, and
# so does one with cache_enabled=False. Nothing warns.
#
# One would guess that where the block begins is a matter of taste: it decides in which dtype products are computed, and an
# optimizer step holds none. Autocast keeps the 16-bit copy of each weight until the outermost block ends, and an update in
# place does not invalidate it. The usual form, a block around the forward pass, hides the cache.
#
# Exits non-zero if the loop within one block learns.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$dir/venv/bin/python" - <<'PYTHON'
import contextlib
import warnings

import torch

warnings.simplefilter("error")


def trained(around_the_loop, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    inputs = torch.randn(256, 16)
    targets = inputs @ torch.randn(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def block(here):
        return torch.autocast("cpu", torch.bfloat16, **options) if here else contextlib.nullcontext()

    losses = []
    with block(around_the_loop):
        for _ in range(50):
            with block(not around_the_loop):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        final = torch.nn.functional.mse_loss(model(inputs), targets).item()
    return losses, final


for name, around, options in (
    ("autocast around the loop", True, {}),
    ("autocast around the loop, without a cache", True, {"cache_enabled": False}),
    ("autocast around each forward pass", False, {}),
):
    losses, final = trained(around, **options)
    print(f"{name}: losses {losses[0]:.4g}, {losses[1]:.4g} ... {losses[-1]:.4g}, in float32 at the end {final:.4g}")
    if around and not options:
        assert len(set(losses)) == 1 and final > 10 * losses[0]
    else:
        assert losses[-1] < 1e-3 * losses[0] and final < 1e-3 * losses[0]
PYTHON
