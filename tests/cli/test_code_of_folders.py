"""No command runs, or asks to run, the code that lies in the folder of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lowbit.cli import language_model, shapes
from lowbit.formats import FormatError


class Recorder:
    """Stands for the classes and modules of transformers, and keeps the options of each call."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def record(self, *arguments: Any, **options: Any) -> Any:
        self.given.append(options)
        raise ValueError("the folder has code of its own")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    own: Any = ModuleType("transformers")
    own.__version__ = "5.0"
    config = SimpleNamespace(get_text_config=lambda decoder: None)
    own.AutoConfig = SimpleNamespace(for_model=lambda **options: config)
    own.AutoModelForCausalLM = own.AutoModelForImageTextToText = SimpleNamespace(
        from_config=made.record, _model_mapping={}
    )
    own.AutoTokenizer = SimpleNamespace(from_pretrained=made.record)
    own.logging = SimpleNamespace(
        set_verbosity_error=lambda: None, disable_progress_bar=lambda: None
    )
    monkeypatch.setitem(sys.modules, "transformers", own)
    monkeypatch.setitem(sys.modules, "lowbit.hf", ModuleType("lowbit.hf"))
    return made


def test_estimate_runs_no_code(recorder: Recorder) -> None:
    made, _, _ = shapes._made_by_transformers({"model_type": "own", "auto_map": {}})
    built, why = shapes._built_by_transformers(made)
    assert not built and "the folder has code of its own" in why
    assert recorder.given == [{"trust_remote_code": False}]


def test_tokenizers_run_no_code(recorder: Recorder, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no tokenizer that transformers reads"):
        language_model.tokenizer_of(tmp_path)
    assert recorder.given == [{"local_files_only": True, "trust_remote_code": False}]
