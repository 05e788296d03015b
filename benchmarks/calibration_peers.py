"""Calibrated rounding beside auto-round and llm-compressor: the same model, batches, scheme and held-out text.

    python -m recipes.recovery --preset tiny --seeds 0 --base-only --out runs/recovery
    python -m benchmarks.calibration_peers runs/recovery/seed0 [--bits 4,3,2] [--methods "auto-round;GPTQ()"]

The model is the quick start's, as a LlamaForCausalLM of transformers. All linears of its blocks are rounded in groups
of 32; the embedding, which is the head too, stays, as the other packages leave it. Prints nats above high precision.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit
from lowbit.inference import GPTQ, LearnedRounding, Search
from recipes.calibration import GROUP, batches_of, open_run
from recipes.phases import Run, high_precision_model

NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}


def hf_model(run: Run) -> Any:
    """The trained model, as transformers has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own, plain = run.config.model, high_precision_model(run)
    config = LlamaConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.dim,
        intermediate_size=own.hidden,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        max_position_embeddings=own.context,
        rms_norm_eps=own.norm_eps,
        rope_theta=own.rope_theta,
        tie_word_embeddings=own.tied,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    state = {}
    for name, value in plain.state_dict().items():
        for short, long in NAMES.items():
            name = name.replace(f"attention.{short}.", f"self_attn.{long}.")
        for short in ("gate", "up", "down"):
            name = name.replace(f"mlp.{short}.", f"mlp.{short}_proj.")
        name = name.replace("attention_norm", "input_layernorm")
        name = name.replace("mlp_norm", "post_attention_layernorm")
        name = name.replace("blocks.", "model.layers.").replace("embedding.", "model.embed_tokens.")
        name = "model." + name if name.startswith("norm.") else name
        state[name.replace("head.", "lm_head.")] = value
    found = model.load_state_dict(state, strict=False)
    assert not [n for n in found.missing_keys if "rotary" not in n], found
    return model.eval()


@torch.no_grad()
def loss_of(model: Any, windows: Tensor) -> float:
    """Mean held-out cross entropy in nats."""
    losses = []
    for part in windows.split(16):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        losses.append(F.cross_entropy(logits.transpose(1, 2), part[:, 1:], reduction="none"))
    return float(torch.cat(losses).double().mean())


# ---- methods: a model, batches [B, T] of tokens, bits, a mapping --------------------------------------------------


def by_lowbit(*steps: Any) -> Callable[..., Any]:
    def calibrated(model: Any, batches: list[Tensor], bits: int, mapping: str, run: Run) -> Any:
        scheme = {"*.layers.*": lowbit.IntxWeightOnly(bits, GROUP, mapping)}  # type: ignore[arg-type]
        given = [{"input_ids": b, "use_cache": False} for b in batches]
        if steps:
            lowbit.calibrate(model, scheme, given, steps=list(steps), held_out=[])
        else:
            lowbit.quantize_(model, scheme, scales="minmax")
        return model

    return calibrated


def by_auto_round(model: Any, batches: list[Tensor], bits: int, mapping: str, run: Run) -> Any:
    from auto_round import AutoRound
    from transformers import PreTrainedTokenizerFast

    rows = torch.cat(batches)
    data: Any = [{"input_ids": row} for row in rows]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8, shuffle=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=run.data.tokenizer)
    tuned = AutoRound(
        model,
        tokenizer,
        bits=bits,
        group_size=GROUP,
        sym=mapping == "symmetric",
        iters=200,
        seqlen=rows.shape[1],
        nsamples=len(rows),
        batch_size=8,
        dataset=loader,
        device_map="cpu",
        enable_torch_compile=False,
        amp=False,
    )
    found = tuned.quantize()
    return found[0] if isinstance(found, tuple) else found


def by_llm_compressor(model: Any, batches: list[Tensor], bits: int, mapping: str, run: Run) -> Any:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    rows = torch.cat(batches)
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": mapping == "symmetric",
        "strategy": "group",
        "group_size": GROUP,
    }
    recipe = GPTQModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
    )
    data = Dataset.from_dict(
        {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return oneshot(
            model=LlamaForCausalLM.from_pretrained(folder),
            dataset=data,
            recipe=recipe,
            processor=PreTrainedTokenizerFast(tokenizer_object=run.data.tokenizer),
            max_seq_length=rows.shape[1],
            num_calibration_samples=len(rows),
        )


METHODS: dict[str, Callable[..., Any]] = {
    "min-max": by_lowbit(),
    "GPTQ()": by_lowbit(GPTQ()),
    "llm-compressor GPTQ": by_llm_compressor,
    "Search(), LearnedRounding()": by_lowbit(Search(), LearnedRounding()),
    "auto-round": by_auto_round,
    "GPTQ(), LearnedRounding()": by_lowbit(GPTQ(), LearnedRounding()),
    "GPTQ(), LearnedRounding(over='model')": by_lowbit(GPTQ(), LearnedRounding(over="model")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run folder of a seed of recipes.recovery")
    parser.add_argument("--bits", default="4,3,2")
    parser.add_argument("--mappings", default="symmetric,asymmetric")
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by ;")
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    run = open_run(options.folder)
    windows = run.heldout_windows(run.config.heldout_tokens).long()
    high = loss_of(hf_model(run), windows)
    print(f"high precision {high:.4f} nats")
    for bits in map(int, options.bits.split(",")):
        for mapping in options.mappings.split(","):
            for method in options.methods.split(";"):
                nats, seconds = [], 0.0
                for draw in range(options.draws):
                    batches = [b.long() for b in batches_of(run, draw, options.batches)]
                    began = time.perf_counter()
                    model = METHODS[method](hf_model(run), batches, bits, mapping, run)
                    seconds += time.perf_counter() - began
                    nats.append(loss_of(model, windows) - high)
                each = " ".join(f"{n:.4f}" for n in nats)
                print(f"int{bits} {mapping:<10} {method:<40} {each}  {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
