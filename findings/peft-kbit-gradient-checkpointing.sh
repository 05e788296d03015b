#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0, torch 2.13.0 (CPU): prepare_model_for_kbit_training(model) has
# use_gradient_checkpointing=True by default. It turns checkpointing on only for models whose attributes say
# is_loaded_in_8bit, is_loaded_in_4bit, or one of five quantization methods. For any other model the argument does nothing,
# also where it is given explicitly, and nothing is said; the rest of the function (freezing, casting 16-bit parameters to
# float32) is done all the same.
#
# One would guess that the argument is followed, or a warning: the docstring says "If True, use gradient checkpointing to
# save memory at the expense of slower backward pass".
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.23.0' 'peft==0.21.2' 'accelerate==1.15.0' 'numpy==2.4.6'
cd "$work"
"$work/venv/bin/python" - <<'PY'
import warnings

import torch
from peft import prepare_model_for_kbit_training
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128)


def prepared(**attributes):
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    for name, value in attributes.items():
        setattr(model, name, value)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    own = [str(w.message) for w in said if "checkpoint" in str(w.message)]
    dtypes = {p.dtype for p in model.parameters()}
    print(attributes or "no attribute", "-> checkpointing:", model.is_gradient_checkpointing, dtypes, own)
    return model.is_gradient_checkpointing, dtypes, own


plain, known = prepared(), prepared(is_loaded_in_4bit=True)
assert plain == (False, {torch.float32}, []), "the behaviour changed"
assert known[0] is True, "the behaviour changed"
PY
