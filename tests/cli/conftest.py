"""The folder that each test of the command line works in."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, the current one, with `model` and `text.txt`."""
    from tests.cli.command import TEXT, make_model  # skips without the command line's packages

    make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
