"""The folders and texts that the snippets of docs/wishes read: tiny, under the names that readers have for theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

import lowbit
from tests.integrations.models import fill_adapters
from tests.integrations.packed_models import publish
from tests.integrations.test_command_line import add_tokenizer

VOCABULARY = 320


def _packed(folder: Path) -> None:
    publish("gpt-oss MXFP4", folder, vocab_size=VOCABULARY)
    add_tokenizer(folder)


def _trained(folder: Path) -> None:
    publish("gpt-oss MXFP4", folder.with_name("packed"), vocab_size=VOCABULARY)
    folder.with_name("packed-plain").rename(folder)
    add_tokenizer(folder)


def _llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16().save_pretrained(folder)
    add_tokenizer(folder)


def _llama_int4(folder: Path) -> None:
    plain = folder.with_name("plain")
    _llama(plain)
    lowbit.export(plain, folder, scheme=lowbit.Int4WeightOnly(32))


def _adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = lowbit.load_pretrained(folder.with_name("llama-int4"))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    fill_adapters(adapted, 0.02)
    adapted.save_pretrained(folder)


def _text(path: Path) -> None:
    path.write_text("".join(f"line {i}, and {i * i} follows\n" for i in range(60)))


MAKERS: dict[str, Callable[[Path], None]] = {
    "gpt-oss-20b": _packed,
    "gpt-oss-mine": _trained,
    "llama": _llama,
    "llama-int4": _llama_int4,
    "adapter": _adapter,
    "text.txt": _text,
}


def make(code: str, folder: Path) -> None:
    """Make in `folder` what `code` reads: the names in quotes that it does not save itself."""
    for name, maker in MAKERS.items():
        if f'"{name}"' in code and f'save_pretrained("{name}")' not in code:
            maker(folder / name)
