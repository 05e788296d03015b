"""The folder that each test of the command line works in."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with `model`, `text.txt` and `plan.json`."""
    from tests.cli.command import TEXT, make_model  # skips without the command line's packages

    make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    plan = '{"schemes": {"lm_head": "int8", "*": "int4(group_size=64)"}}'
    (tmp_path / "plan.json").write_text(plan, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
