#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU): RwkvForCausalLM.save_pretrained(folder) after one forward pass in eval mode writes
# another model. from_pretrained(folder) gives logits that are 41% off. Saved before the first forward pass, or after
# model.train() and one more forward pass, the folder is right.
#
# One would guess that inference changes no weight, as for every other model, so that it does not matter when a model is saved.
# In eval mode RWKV divides the output weights of every sixth block and those after it by powers of two, in place, at the
# first forward pass (`rescale_every`, against overflows of float16, also in float32), and remembers that in a Python attribute.
# The folder has the divided weights, and the loaded model divides them again. A model that has at most six blocks, such as a
# small one of a test, is not affected.
#
# Exits non-zero if the folder written after inference gives the same logits.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.23.0'
cd "$dir"
"$dir/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import RwkvConfig, RwkvForCausalLM

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
tokens = torch.arange(20)[None]


@torch.no_grad()
def reloaded(blocks: int, prepare) -> float:
    """The relative error of the logits of a folder, saved after `prepare(model)`."""
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=64, hidden_size=64, num_hidden_layers=blocks, context_length=32)
    model = RwkvForCausalLM(config).eval()
    prepare(model)
    model.save_pretrained("saved")
    expected = model.eval()(tokens).logits
    found = RwkvForCausalLM.from_pretrained("saved").eval()(tokens).logits
    return float((found - expected).norm() / expected.norm())


before = reloaded(12, lambda model: None)
after = reloaded(12, lambda model: model(tokens))
small = reloaded(6, lambda model: model(tokens))
trained = reloaded(12, lambda model: (model(tokens), model.train()(tokens)))
print(f"saved before inference {before:.1e}, after it {after:.2f}, of six blocks {small:.1e}, in train mode {trained:.1e}")
assert before < 1e-5 and small < 1e-5 and trained < 1e-5 and after > 0.1
PYTHON
