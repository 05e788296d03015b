#!/usr/bin/env bash
# transformers 5.23.0, torch 2.13.0 (CPU): Trainer.evaluate() with TrainingArguments(bf16_full_eval=True) casts the model
# itself to bfloat16 and leaves it so. A float32 model that is evaluated once before training, for a baseline, trains with
# weights and moments in bfloat16 afterwards, where steps of 1e-5 move 15% of the elements of a weight instead of all. Nothing
# warns. Evaluations in the middle of train() leave the dtype alone, and run in float32 in spite of the argument.
#
# One would guess that an evaluation leaves the model as it is: the documentation says of the argument that it applies
# during evaluation only.
#
# Exits non-zero if the model is float32 after evaluate().
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q 'torch==2.13.0' 'transformers==5.23.0' 'accelerate==1.15.0' 'numpy==2.4.6'
cd "$dir"
"$dir/venv/bin/python" - 2>"$dir/log" <<'PYTHON' || { cat "$dir/log"; exit 1; }
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def trained(evaluate_first):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    text = [{"input_ids": torch.arange(i, i + 8), "labels": torch.arange(i, i + 8)} for i in range(8)]
    arguments = TrainingArguments(
        output_dir="out",
        bf16_full_eval=True,
        use_cpu=True,
        max_steps=4,
        learning_rate=1e-5,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=text, eval_dataset=text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if evaluate_first:
            trainer.evaluate()
        weight = model.model.layers[0].mlp.down_proj.weight
        before, start = weight.dtype, weight.detach().clone()
        trainer.train()
    told = [str(w.message) for w in caught if "bf16" in str(w.message) or "bfloat16" in str(w.message)]
    weight = model.model.layers[0].mlp.down_proj.weight
    moments = {state["exp_avg"].dtype for state in trainer.optimizer.state.values()}
    return before, moments, (weight != start).float().mean().item(), told


for first in (False, True):
    dtype, moments, moved, told = trained(first)
    print(f"evaluate() before train() {first}: weights {dtype}, moments {moments}, weights that moved {moved:.3f}, {told}")
    assert dtype == (torch.bfloat16 if first else torch.float32) and moments == {dtype} and not told
    assert (moved < 0.5) == first
PYTHON
