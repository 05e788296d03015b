#!/usr/bin/env bash
# llmcompressor 0.14.0.1: the "sequential" pipeline is sequential from block to block alone. GPTQ rounds down_proj of a
# block for the inputs that gate_proj and up_proj give in high precision: at 2 bits its weights are equal to the bit,
# whether those two are rounded to 2 bits or left alone. The down_proj of the next block differs.
#
# One would guess that a weight sees the inputs that the weights before it, already rounded, give, as GPTQ's
# "true sequential" order does, since errors of gate and up are what down_proj could make up for.
#
# Exits non-zero if the first block's down_proj changes.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.17.0' 'llmcompressor==0.14.0.1' 'numpy==2.4.6'
cd "$dir" # it writes logs
"$dir/venv/bin/python" - 2> "$dir/errors" <<'PYTHON' || { tail -5 "$dir/errors"; exit 1; }
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, use_cache=False,
)
LlamaForCausalLM(config).save_pretrained("model")
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in torch.randint(64, (8, 16))]
words = models.WordLevel({"a": 0}, unk_token="a")
processor = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))  # asked for, though the tokens are there
int2 = {"num_bits": 2, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def down_projs(*left_alone):
    model = LlamaForCausalLM.from_pretrained("model", dtype=torch.float32)
    groups = {"all": {"targets": ["Linear"], "weights": int2}}
    oneshot(
        model=model,
        dataset=torch.utils.data.DataLoader(rows, batch_size=4),
        recipe=GPTQModifier(config_groups=groups, ignore=["lm_head", *left_alone]),
        processor=processor,
        pipeline="sequential",
        num_calibration_samples=8,
    )
    return [block.mlp.down_proj.weight.detach().clone() for block in model.model.layers]


pairs = zip(down_projs(), down_projs("re:.*layers.0.mlp.(gate|up)_proj"), strict=True)
equal = [torch.equal(rounded, alone) for rounded, alone in pairs]
print(f"gate and up of block 0 rounded or not: down_proj equal in block 0: {equal[0]}, in block 1: {equal[1]}")
assert equal == [True, False]
PYTHON
