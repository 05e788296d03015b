"""The recipe that fine-tunes a transformers model with QAT, on a few steps of a tiny Llama."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit

pytest.importorskip("peft")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from recipes import finetune_qat

TINY = {
    "pretrain_steps": 12,
    "steps": 6,
    "batch_size": 2,
    "context": 32,
    "hidden": 64,
    "layers": 1,
    "vocab_size": 300,
    "heldout_tokens": 600,
    "rank": 4,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("text")
    for name in range(40):
        lines = (f"line {i} of file {name}: {i * name} times {i}\n" for i in range(60))
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


def run(source: Path, out: Path, *options: str, **settings: Any) -> int:
    assignments = [f"{n}={v}" for n, v in {**TINY, **settings}.items()]
    sets = [part for a in assignments for part in ("--set", a)]
    return finetune_qat.main(["--data", str(source), "--out", str(out), *options, *sets])


def test_every_method_converts_what_it_trained(source: Path, tmp_path: Path) -> None:
    methods = finetune_qat.METHODS
    assert run(source, tmp_path, "--bits", "3", "--methods", *methods) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    for method in methods:
        losses = report[method]
        assert all(map(math.isfinite, losses.values())), method
        assert losses["converted"] == pytest.approx(losses["prepared"], abs=1e-5), method
        weights = lowbit.load(tmp_path / f"{method}.safetensors")
        low_bits = [n for n, w in weights.items() if isinstance(w, lowbit.AffineTensor)]
        adapters = [n for n in weights if "lora_" in n]
        assert len(low_bits) == 7 and bool(adapters) == (method == "lora-keep")


def test_a_model_from_a_folder(source: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = finetune_qat.Config(**TINY)
    model, data = finetune_qat.start_of(None, source, config)
    model.save_pretrained(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=data.tokenizer, eos_token="<|end|>")
    tokenizer.save_pretrained(tmp_path / "model")
    found, again = finetune_qat.start_of(str(tmp_path / "model"), source, config)
    assert torch.equal(again.heldout, data.heldout) and torch.equal(again.train, data.train)
    wanted = finetune_qat.heldout_loss(model, data, config)
    assert finetune_qat.heldout_loss(found, again, config) == pytest.approx(wanted, abs=1e-6)


def test_mistakes_are_named_in_a_line(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "kept").write_text("")
    assert run(source, tmp_path) == 2
    assert "holds files already" in capsys.readouterr().err
    assert run(source, tmp_path / "new", rate=3) == 2
    assert "--set rate=3: expected NAME=VALUE" in capsys.readouterr().err
