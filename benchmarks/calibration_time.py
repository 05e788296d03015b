"""Time and memory of calibration for blocks of an 8B Llama's shape on one GPU, beside llm-compressor and auto-round.

    python -m benchmarks.calibration_time [--blocks 4] [--methods "GPTQ;llm-compressor GPTQ"]

A LlamaForCausalLM of transformers with random weights and tokens, symmetric int4 in groups of 128, all linears of the
blocks. GPTQ takes 128 sequences of 2,048 tokens; learned rounding 128 of 512, and 200 steps of 8. Each method first
runs over two blocks, with 8 sequences and 2 steps, and is then timed. Prints seconds a block, minutes of 32 blocks, and
the peak of the GPU's allocator. "GPTQ of a folder" keeps one block on the GPU, and writes an int4 folder.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lowbit
from lowbit.inference import GPTQ, LearnedRounding, Search, Step

SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
HEADS = {4096: 32, 128: 4}
VOCABULARY = 1024
LONG, SHORT = 2048, 512
BLOCKS = 32
"""The blocks of an 8B Llama, whose minutes are printed."""


def model_of(blocks: int, device: str) -> Any:
    """Random weights in bfloat16, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPE if device == "cuda" else TINY
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS[shape["hidden_size"]],
        max_position_embeddings=LONG,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


# ---- methods: a model, tokens [sequences, length], steps of learned rounding ------------------------------------


def by_lowbit(*steps: Step) -> Callable[[Any, Tensor, int], object]:
    def calibrated(model: Any, tokens: Tensor, learned: int) -> object:
        own = [LearnedRounding(learned, 8) if isinstance(s, LearnedRounding) else s for s in steps]
        chosen = {"model.layers.*": lowbit.IntxWeightOnly(4, 128, "symmetric")}
        return lowbit.calibrate(model, chosen, list(tokens.split(8)), steps=own, held_out=[])

    return calibrated


def of_folder(model: Any, tokens: Tensor, learned: int) -> object:
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "plain"
        model.save_pretrained(saved)
        device = model.device.type
        model.to("meta")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return lowbit.calibrate(
            str(saved),
            lowbit.IntxWeightOnly(4, 128, "symmetric"),
            list(tokens.cpu().split(8)),
            steps=[GPTQ()],
            held_out=[],
            out=str(Path(folder) / "int4"),
            device=device,
        )


def by_llm_compressor(model: Any, tokens: Tensor, learned: int) -> object:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    recipe = GPTQModifier(
        config_groups={
            "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": 128}}
        },
        ignore=["lm_head"],
    )
    rows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens.cpu()]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        model.config._name_or_path = model.name_or_path = folder  # it reads the configuration again
        return oneshot(
            model=model,
            dataset=torch.utils.data.DataLoader(rows, batch_size=8),
            recipe=recipe,
            processor=tokenizer(),
            pipeline="sequential",
            num_calibration_samples=len(rows),
            max_seq_length=tokens.shape[1],
        )


def by_auto_round(model: Any, tokens: Tensor, learned: int) -> object:
    from auto_round import AutoRound

    rows: Any = [{"input_ids": row} for row in tokens.cpu()]
    return AutoRound(
        model,
        tokenizer(),
        bits=4,
        group_size=128,
        sym=True,
        iters=learned,
        seqlen=tokens.shape[1],
        nsamples=len(tokens),
        batch_size=8,
        dataset=torch.utils.data.DataLoader(rows, batch_size=8, shuffle=False),
        device_map="cuda" if model.device.type == "cuda" else "cpu",
        enable_torch_compile=True,
    ).quantize()


def tokenizer() -> Any:
    """The other packages want one, though the tokens are there."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"a": 0}, unk_token="a")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


METHODS: dict[str, tuple[int, Callable[[Any, Tensor, int], object]]] = {
    "GPTQ": (LONG, by_lowbit(GPTQ())),
    "GPTQ, one stream": (LONG, by_lowbit(GPTQ(asymmetric=0))),
    "GPTQ of a folder": (LONG, of_folder),
    "llm-compressor GPTQ": (LONG, by_llm_compressor),
    "learned rounding": (SHORT, by_lowbit(Search(), LearnedRounding())),
    "auto-round": (SHORT, by_auto_round),
}
"""The length of the sequences, and the method."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200, help="of learned rounding")
    parser.add_argument("--methods", default=";".join(METHODS))
    options = parser.parse_args()
    names = options.methods.split(";")
    if unknown := [name for name in names if name not in METHODS]:
        parser.error(f"no method {unknown[0]!r}; known: {'; '.join(METHODS)}")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    print(f"{torch.cuda.get_device_name() if on_gpu else 'CPU'}, torch {torch.__version__}")
    print(f"{options.blocks} blocks, {options.sequences} sequences\n")
    print(
        "| method | s a block | 32 blocks, min | peak GiB | of the model |\n|---|--:|--:|--:|--:|"
    )
    for name in names:
        length, method = METHODS[name]
        tokens = torch.randint(VOCABULARY, (options.sequences, length), device=device)
        method(model_of(2, device), tokens[:8], 2)
        model = model_of(options.blocks, device)
        held = sum(p.nbytes for p in model.parameters())
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        method(model, tokens, options.steps)
        if on_gpu:
            torch.cuda.synchronize()
        each = (time.perf_counter() - begun) / options.blocks
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else float("nan")
        cells = f"{each:.2f} | {each * BLOCKS / 60:.1f} | {peak:.1f} | {held / 2**30:.1f}"
        print(f"| {name} | {cells} |", flush=True)
        del model


if __name__ == "__main__":
    main()
