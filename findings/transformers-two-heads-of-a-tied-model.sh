#!/usr/bin/env bash
# transformers 5.23.0 does not tie the weights of a config with "tie_word_embeddings": true where the folder stores both.
#
# A folder may hold lm_head.weight beside model.embed_tokens.weight although config.json ties them (granite's folders do).
# One would guess that the config decides, as in releases 4: the head is the embedding, and the second tensor is ignored.
# Here the values decide. Equal tensors are tied. Different ones stay two parameters, with a warning, while the model's
# config goes on saying that they are tied. A reader that goes by the config alone computes other logits.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.3.5' 'safetensors==0.8.0' 'transformers==5.23.0'
cat > "$work/case.py" <<'EOF'
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

folder, head, embedding = sys.argv[1], "lm_head.weight", "model.embed_tokens.weight"
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
config = LlamaConfig(**sizes, vocab_size=64, tie_word_embeddings=True)
LlamaForCausalLM(config).save_pretrained(folder)
file = f"{folder}/model.safetensors"
state = load_file(file)
assert head not in state
for factor in (1.0, 2.0):
    save_file({**state, head: state[embedding] * factor}, file, {"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(folder)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    kept = torch.equal(model.lm_head.weight, state[embedding] * factor)
    says = model.config.tie_word_embeddings
    print(f"head = {factor} * embedding: tied {tied}, the stored head is kept {kept}, config says tied: {says}")
    assert (tied, kept, says) == (factor == 1.0, True, True), "the behaviour changed"
EOF
HF_HUB_OFFLINE=1 "$work/venv/bin/python" "$work/case.py" "$work/model" 2> /dev/null
