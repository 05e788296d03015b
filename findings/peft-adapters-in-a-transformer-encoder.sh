#!/usr/bin/env bash
# peft 0.21.2, torch 2.13.0 (CPU): LoRA on linear1 and linear2 of nn.TransformerEncoder has no effect in eval mode, with gradients
# and without. In train mode the same adapters change the output by 63%, and they learn. An evaluation during training, and
# every use of the trained model, is that of the base model, to the bit. A merge (merge_and_unload) makes them count.
#
# One would guess that a layer computes the same in eval mode as in train mode, up to dropout, which is 0 here. In eval mode
# nn.TransformerEncoderLayer takes a fast path that does not call its sub-modules. It reads linear1.weight, and PEFT's layer gives
# the weight of the base under this name. The fast path is left out while a parameter that it reads asks for a gradient. The
# base is frozen, and nobody asks the adapters. torch.backends.mha.set_fastpath_enabled(False) is the way out.
#
# Exits non-zero if the adapters count in eval mode.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.23.0' 'accelerate==1.15.0' 'peft==0.21.2'
"$dir/venv/bin/python" - <<'PYTHON'
import peft
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
encoder = nn.Sequential(nn.TransformerEncoder(layer, 2)).eval()
x = torch.randn(2, 5, 64)


def change(y: torch.Tensor) -> float:
    return ((y - base).norm() / base.norm()).item()


with torch.no_grad():
    base = encoder(x)
model = peft.get_peft_model(encoder, peft.LoraConfig(r=4, target_modules=["linear1", "linear2"]))
for name, parameter in model.named_parameters():
    if "lora_B" in name:  # zeros at the start
        nn.init.normal_(parameter, std=0.3)

train = change(model.train()(x))
with_gradients = change(model.eval()(x))
with torch.no_grad():
    without = change(model(x))
    torch.backends.mha.set_fastpath_enabled(False)
    way_out = change(model(x))
    torch.backends.mha.set_fastpath_enabled(True)
    merged = change(model.merge_and_unload()(x))
print(f"the adapters change the output by {train:.2f} in train mode; in eval mode by {with_gradients:.2f} with gradients,")
print(f"{without:.2f} without, {way_out:.2f} without the fast path, and merged by {merged:.2f}")
assert train > 0.3 and with_gradients == without == 0
assert abs(way_out - train) < 1e-4 and abs(merged - train) < 1e-4
PYTHON
