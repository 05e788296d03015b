"""The recipes that train packed folders and write them back, on a few steps of tiny models of the same classes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from tests.integrations import models
from tests.integrations.models import logits
from tests.integrations.packed_models import publish, sums

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from recipes import text
from recipes.packed import (
    deepseek_fp8_full,
    gpt_oss_mxfp4_lora,
    kimi_int4_qat,
    nvfp4_distill,
    qwen3_moe_int4_qat,
)

VOCABULARY = 320
RECIPES: dict[Any, tuple[str, float, tuple[str, ...]]] = {
    gpt_oss_mxfp4_lora: ("gpt-oss MXFP4", 1e-2, (".self_attn.",)),
    deepseek_fp8_full: ("DeepSeek-V3 float8", 3e-3, ("",)),
    qwen3_moe_int4_qat: ("Qwen3-MoE int4", 3e-3, ("_proj.",)),
    kimi_int4_qat: ("Kimi K2 int4", 3e-3, (".mlp.experts.",)),
    nvfp4_distill: ("Qwen3 NVFP4", 3e-4, ("",)),
}
"""For each recipe the kind of folder, the learning rate, and a part of the names of tensors that may change."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("text")
    for name in range(40):
        lines = (f"line {i} of file {name}: {i * name} times {i}\n" for i in range(60))
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def tokenizer(source: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    texts, _, _ = text.read_split(source, "stdlib", 0.03)
    made = text.train_tokenizer(texts, VOCABULARY)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=text.END)


def run(recipe: Any, folder: Path, source: Path, out: Path, *more: str) -> int:
    settings = {"steps": 10, "batch_size": 2, "context": 32, "heldout_tokens": 100}
    settings["lr"] = RECIPES[recipe][1]  # type: ignore[assignment]
    sets = [part for n, v in settings.items() for part in ("--set", f"{n}={v}")]
    arguments = ["--model", str(folder), "--data", str(source), "--out", str(out), *sets, *more]
    status: int = recipe.main(arguments)
    return status


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.__name__.rpartition(".")[2])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_the_loss_falls_and_the_folder_is_written_back(
    recipe: Any, source: Path, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    kind, _, parts = RECIPES[recipe]
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.1}  # logits that rounding changes
    folder = publish(kind, tmp_path / "published", **sizes)
    tokenizer.save_pretrained(folder)
    teacher = ("--teacher", f"{folder}-plain") if recipe is nvfp4_distill else ()
    assert run(recipe, folder, source, tmp_path / "run", *teacher) == 0
    printed = capsys.readouterr().out
    losses = [float(found) for found in re.findall(r": +(\d+\.\d{4})", printed)]
    before, after, written = losses
    assert after < before * (0.95 if teacher else 0.99)
    assert written == pytest.approx(after, rel=0.02)
    out = tmp_path / "run"
    own, theirs = sums(out), sums(folder)
    assert {n: s[:3] for n, s in own.items()} == {n: s[:3] for n, s in theirs.items()}
    changed = {n for n in own if own[n] != theirs[n]}
    assert changed and all(any(part in n for part in parts) for n in changed)
    assert f"{len(own) - len(changed)} of {len(own)} stored tensors" in printed
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    theirs = models.loaded(out, torch.bfloat16)
    model: Any = lowbit.load_pretrained(out)
    lowbit.dequantize_(model)
    assert torch.equal(logits(theirs), logits(model))


def test_adapters_of_packed_layers_are_merged_by_learned_rounding(
    source: Path, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    """Rounded to nearest, nearly all of what such a short training won is lost."""
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.1}
    folder = publish("Qwen3-MoE int4", tmp_path / "published", **sizes)
    tokenizer.save_pretrained(folder)
    assert run(gpt_oss_mxfp4_lora, folder, source, tmp_path / "run", "--set", "steps=4") == 0
    printed = capsys.readouterr().out
    before, after, written = (float(found) for found in re.findall(r": +(\d+\.\d{4})", printed))
    assert before - after > 0.1 and before - written > 0.9 * (before - after)
    assert re.search(r"rounded to nearest, .* learned", printed)


MISTAKES = {
    "an existing folder": ("", "", "exists already"),
    "no place": ("", "a/b", "is not a folder"),
    "steps": ("steps=-1", "out", "steps is -1; accepted: 0 or more"),
    "batches": ("batch_size=0", "out", "batch_size is 0; accepted: 1 or more"),
    "layers": ("layers=0", "out", "layers is 0; accepted: 1 or more"),
    "a short text": ("context=100000", "out", "context=100000 takes"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_named_before_the_training(
    case: str, source: Path, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    setting, out, message = MISTAKES[case]
    folder = publish("Kimi K2 int4", tmp_path / "published", vocab_size=VOCABULARY)
    tokenizer.save_pretrained(folder)
    more = ("--set", setting) if setting else ()
    assert run(kimi_int4_qat, folder, source, tmp_path / out, *more) == 2
    found = capsys.readouterr()
    assert message in found.err and found.out == ""


def test_folders_that_do_not_fit_are_named(
    source: Path, tokenizer: Any, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(kimi_int4_qat, tmp_path / "empty", source, tmp_path / "out") == 2
    assert "has no config.json" in capsys.readouterr().err
    folder = publish("Qwen3 NVFP4", tmp_path / "published")  # with a smaller vocabulary
    plain = Path(f"{folder}-plain")
    for one in (folder, plain):
        tokenizer.save_pretrained(one)
    assert run(kimi_int4_qat, plain, source, tmp_path / "out") == 2
    assert "has no weight in low bits" in capsys.readouterr().err
    assert run(kimi_int4_qat, folder, source, tmp_path / "out") == 2
    assert "and the model has 128" in capsys.readouterr().err
    teacher = publish("Qwen3 NVFP4", tmp_path / "teacher", vocab_size=VOCABULARY)
    given = ("--teacher", f"{teacher}-plain")
    assert run(nvfp4_distill, folder, source, tmp_path / "out", *given) == 2
    assert "must have the same tokenizer" in capsys.readouterr().err
