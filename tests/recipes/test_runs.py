"""A run's files are replaced whole or not at all; its metrics; Ctrl-C."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from recipes import runs
from recipes.command_line import UserError
from recipes.runs import load_checkpoint, save_checkpoint, write_text

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


def test_wandb_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'lowbit\[wandb\]'"):
        runs.check_wandb("offline")
    runs.check_wandb("disabled")


needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="needs the wandb package"
)


@needs_wandb
def test_wandb_offline_keeps_its_records_in_the_run_folder(tmp_path: Path) -> None:
    folder = runs.RunFolder(tmp_path)
    tracker = runs.Tracker(folder, {"lr": 0.1}, "offline")
    tracker.log("trunk", step=1, loss=2.5)
    tracker.log("result", model="int4-qat", perplexity=9.5)
    tracker.close(0)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [r["phase"] for r in runs.read_metrics(folder)] == ["trunk", "result"]


def test_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with runs.DelayedInterrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_without_a_folder_takes_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, age in (("old", 100), ("new", 10), ("broken", 0)):
        (tmp_path / name).mkdir()
        if name != "broken":
            (tmp_path / name / "config.json").write_text("{}")
            moment = time.time() - age
            os.utime(tmp_path / name / "config.json", (moment, moment))
    assert runs.latest(tmp_path).path.name == "new"
    shutil.rmtree(tmp_path / "new")
    assert runs.latest(tmp_path).path.name == "old"


@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign"])
def test_a_damaged_checkpoint_is_named_and_kept(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "high.pt"
    save_checkpoint(path, CHECKPOINT)
    content = path.read_bytes()
    if damage == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"hello")
    left = path.read_bytes()
    with pytest.raises(UserError, match=r"high\.pt can't be read.*Delete it") as caught:
        load_checkpoint(path)
    assert "\n" not in str(caught.value) and path.read_bytes() == left


def test_a_checkpoint_stays_whole_when_its_content_cannot_be_saved(tmp_path: Path) -> None:
    path = tmp_path / "trunk.pt"
    save_checkpoint(path, CHECKPOINT)
    with pytest.raises(Exception, match="pickle"):
        save_checkpoint(path, {**CHECKPOINT, "step": 4, "bad": lambda: None})
    assert load_checkpoint(path)["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["trunk.pt"]


def test_dropped_records_and_lines_cut_short(tmp_path: Path) -> None:
    folder = runs.RunFolder(tmp_path)
    tracker = runs.Tracker(folder, {}, "disabled")
    for phase, step in (("trunk", 1), ("trunk", 2), ("high", 3)):
        tracker.log(phase, step=step)
    tracker.flush()
    with folder.metrics.open("a") as file:
        file.write('{"phase": "tr')
    tracker.drop("trunk", after_step=1)
    tracker.log("high", step=4)
    tracker.close(0)
    assert [r["step"] for r in runs.read_metrics(folder)] == [1, 3, 4]
