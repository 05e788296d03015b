"""The table of 8B on one card: the step of bfloat16 weights that it compares with, and its ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers")

from recipes import one_card
from recipes import one_card_table as table
from recipes.one_card import Config


def test_bfloat16_weights_train_and_print_a_row(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "text.txt"
    source.write_text("".join(f"The square of {i} is {i * i}.\n" for i in range(500)))
    table.train_plain("tiny", source, steps=7, fast=False, context=64)
    printed = capsys.readouterr().out
    memory, ms, speed = (float(x.replace(",", "")) for x in table.figures_in(printed))
    assert "2 steps timed" in printed and 0.1 < memory < 10
    assert speed == pytest.approx(64 / ms * 1e3, rel=0.01)


def test_the_step_is_that_of_torch() -> None:
    config = Config()
    torch.manual_seed(0)
    shape = one_card.shape_of("tiny", config)
    model = one_card.AutoModelForCausalLM.from_config(shape)
    tokens = torch.randint(300, (2, 33))
    exact = F.cross_entropy(
        model(input_ids=tokens[:, :-1]).logits.double().flatten(0, 1), tokens[:, 1:].flatten()
    )
    grads = torch.autograd.grad(exact, list(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = table.plain_step(model, optimizer, tokens[:, :-1], tokens[:, 1:])
    assert abs(loss.item() - exact.item()) < 1e-5 * exact.item()
    for p, old, grad in zip(model.parameters(), before, grads, strict=True):
        assert p.grad is None and ((old - p) - grad).norm() <= 1e-3 * grad.norm()


def test_ratios_of_tokens_a_second() -> None:
    row = table.figures_in(
        "step 1\n| settings | GiB |\n|---|--:|\n| a b=1 | 14.40 | 204.1 | 10,032 |\n\nmore"
    )
    assert row == ["14.40", "204.1", "10,032"]
    lines = table.table_of({"bf16": ["61.5", "289", "7,094"], "int4 products": row}).splitlines()
    assert lines[0] == "| weights | GiB | ms | tokens/s | of bf16 | of bf16 compiled |"
    assert lines[2:] == [
        "| bf16 | 61.5 | 289 | 7,094 |  |  |",
        "| int4 products | 14.40 | 204.1 | 10,032 | 1.41 |  |",
    ]


def test_without_a_gpu_nothing_is_loaded(monkeypatch: Any, capsys: Any) -> None:
    """Its model is 8B by default, which would fill the host's memory first."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(table.subprocess, "run", None)
    assert table.main([]) == 2
    assert "the table is of a GPU, whose memory its rows limit" in capsys.readouterr().err
