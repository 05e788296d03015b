"""`lowbit.evaluate` through lm-eval itself, on a task of three questions that lies in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lowbit
from tests.cli.command import make_model
from tests.integrations.test_command_line import add_tokenizer

pytest.importorskip("lm_eval")


def test_tasks_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    add_tokenizer(make_model(tmp_path / "model"))
    questions = [{"text": t, "choices": ["the model", "xyz"], "label": 0} for t in "abc"]
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    task = {
        "task": "three",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
    }
    from transformers import AutoTokenizer

    original, low = (lowbit.load_pretrained(tmp_path / "model") for _ in range(2))
    lowbit.quantize_(low, lowbit.Int8WeightOnly())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    report = lowbit.evaluate(low, original, tasks=[task], tokenizer=tokenizer, limit=2)
    assert report.original is not None
    for found in (report.original, report.models[0]):
        assert set(found.tasks) == {"three"}
        assert found.tasks["three"]["acc"] in (0.0, 0.5, 1.0)
    assert "three acc" in str(report)
