"""The quick start as a command: its exit status, its output, and Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from pathlib import Path

import pytest

from recipes import text
from recipes.quickstart import main
from tests import forked
from tests.recipes.test_quickstart import measured_briefly  # noqa: F401

COMMAND = """
import os, runpy
for name in [name for name in os.environ if name.startswith("WANDB_")]:
    del os.environ[name]
runpy.run_module("recipes.quickstart", run_name="__main__")
"""
"""`python -m recipes.quickstart`"""
SMALL = {
    "model.vocab_size": 300,
    "model.dim": 32,
    "model.layers": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.hidden": 48,
    "model.context": 32,
    "batch_size": 4,
    "heldout_tokens": 500,
    "sample_tokens": 8,
    "probe_sequences": 2,
}


def arguments(tmp_path: Path, steps: int, *more: str) -> list[str]:
    source = tmp_path / "text"
    if not source.exists():
        source.mkdir()
        (source / "mine.txt").write_text("".join(f"a line, number {i * i}\n" for i in range(4000)))
    settings = [f"--set={name}={value}" for name, value in {**SMALL, "steps": steps}.items()]
    place = ["--preset", "tiny", "--data", str(source), "--out", str(tmp_path / "run")]
    return [*place, *settings, *more]


def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = forked.Program(COMMAND, *arguments(tmp_path, 100_000), folder=tmp_path)
    try:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size) and process.status() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill(signal.SIGINT)
        done = process.finished(timeout=60)
    finally:
        if process.status() is None:
            process.kill(signal.SIGKILL)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert f"--resume {run}" in done.stdout
    assert (run / "checkpoints" / "trunk.pt").exists()
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    assert config["steps"] == 100_000 and config["model"]["dim"] == 32


@pytest.mark.usefixtures("measured_briefly")
def test_the_command_line_does_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(arguments(tmp_path, 10)) == 0
    output = capsys.readouterr().out
    assert "int4, after QAT" in output and "report.html" in output
    assert (tmp_path / "run" / "report.md").exists()
    assert main(arguments(tmp_path, 10)) == 2
    assert "already exists; continue the run in it with --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere"], "error: --data nowhere: there is no such file or folder"),
        (["--data", "hollow"], "error: hollow has no text to train on"),
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--resume"], "no run in"),
        (["--set", "depth=3"], "NAME=VALUE with NAME one of"),
        (["--set", "steps=-3"], "steps is -3"),
    ],
    ids=[
        "missing-data",
        "empty-data",
        "resume-nowhere",
        "resume-nothing",
        "no-setting",
        "bad-setting",
    ],
)
def test_mistakes_are_one_line_and_status_2(
    more: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hollow").mkdir()
    assert main(more if "--resume" in more else ["--preset", "tiny", *more]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["hollow"]


def test_a_folder_in_use_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "run" / "precious.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert main(arguments(tmp_path, 10)) == 2
    assert "already exists" in capsys.readouterr().err
    assert [p.name for p in kept.parent.iterdir()] == [
        "precious.txt"
    ] and kept.read_text() == "mine"


def test_resume_of_a_folder_with_a_broken_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"steps": 3}')
    assert main(["--resume", str(tmp_path)]) == 2
    assert "not a configuration of the quick start" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizers.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'tokenizers'\")"
    )
    found = forked.run(COMMAND, folder=tmp_path)
    assert found.returncode == 2
    assert "No module named 'tokenizers'" in found.stderr and ".[recipes]" in found.stderr
    assert "Traceback" not in found.stderr


needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="needs the wandb package"
)


@needs_wandb
def test_wandb_online_without_a_key(tmp_path: Path) -> None:
    own = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    options = arguments(tmp_path, 10, "--wandb", "online")
    found = forked.run(COMMAND, *options, folder=tmp_path, **own)
    assert found.returncode == 2
    assert "wandb login" in found.stderr and "--wandb disabled" in found.stderr
    assert "Traceback" not in found.stderr and not (tmp_path / "run").exists()


def test_interrupted_while_reading_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*inputs: object) -> None:
        raise KeyboardInterrupt  # by SIGINT, which a process started in the background ignores

    monkeypatch.setattr(text, "read_split", interrupted)
    assert main(arguments(tmp_path, 10)) == 130
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
