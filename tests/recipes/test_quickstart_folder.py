"""Files of a run are replaced whole or not at all, and only the files that were named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from recipes.quickstart.folder import load_checkpoint, save_checkpoint, write_text

CHECKPOINT = {"phase": "float", "step": 3, "model": {}}


def test_files_are_replaced(tmp_path: Path) -> None:
    for text in ("one\n", "zwei ≠ 2\n"):
        write_text(tmp_path / "text", text)
        assert (tmp_path / "text").read_text(encoding="utf-8") == text
    for step in (3, 4):
        save_checkpoint(tmp_path / "float.pt", {**CHECKPOINT, "step": step})
        assert load_checkpoint(tmp_path / "float.pt")["step"] == step
    assert {p.name for p in tmp_path.iterdir()} == {"text", "float.pt"}


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path) -> None:
    """A name made of the process's number can be foreseen; --out may lie in a folder for all."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("report.md", "float.pt"):
        (tmp_path / f".{name}.{os.getpid()}").symlink_to(victim)
    write_text(tmp_path / "report.md", "text")
    save_checkpoint(tmp_path / "float.pt", CHECKPOINT)
    assert victim.read_text() == "mine"


def test_a_failure_while_writing_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path / "float.pt", CHECKPOINT)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "float.pt", {**CHECKPOINT, "step": 4})
    assert load_checkpoint(tmp_path / "float.pt")["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["float.pt"]
