"""The FSDP2 recipe on CPU processes: every way to train, exact resume after a kill, other numbers of processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.tensor import FakeQuantizedTensor, Int8WeightTensor
from recipes import fsdp2
from recipes.command_line import UserError
from recipes.llama import Llama
from tests.forked import Program, all_finished, ranks

TINY = ["--set", "steps=6", "--set", "save_every=2", "--set", "log_every=1", "--set", "lr=1e-2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in range(12):
        lines = (f"line {i} of file {name}: {i * name} times {i}\n" for i in range(400))
        (folder / f"{name}.txt").write_text("".join(lines))
    return folder


def started(*options: str | Path) -> subprocess.Popen:
    """One process, by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=1", "-m", "recipes.fsdp2", *map(str, options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
    )


PROGRAM = "import sys; from recipes import fsdp2; sys.exit(fsdp2.main())"


def ran(*options: str | Path, processes: int = 2) -> str:
    """What all processes print."""
    return all_finished(ranks(PROGRAM, *options, processes=processes, folder=Path.cwd()))


def losses(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["loss"] for r in records if r["phase"] == "train"}


@pytest.mark.parametrize(
    ("low_bits", "optimizer", "processes"),
    [
        ("int8", "AdamW4bit", 1),
        ("float8", "torch", 1),
        ("int8-weights", "AdamW8bit", 0),
        ("bitnet", "Lion8bit", 1),
        ("qat-int4", "Muon8bit", 2),
    ],
)
def test_a_run_learns_and_its_model_loads(low_bits, optimizer, processes, source, tmp_path, whole):
    """Without processes: the run that others go on with."""
    out = tmp_path / "run" if processes else whole
    if processes:
        ways = ("--low-bits", low_bits, "--optimizer", optimizer)
        made = ran(*ways, "--data", source, "--out", out, *TINY, processes=processes)
        assert "held-out perplexity" in made
    found = losses(out)
    assert list(found) == [1, 2, 3, 4, 5, 6] and found[6] < found[1]
    assert [c.name for c in fsdp2.checkpoints(fsdp2.RunFolder(out))] == ["step-4", "step-6"]
    config = fsdp2.Config.from_dict(json.loads((out / "config.json").read_text()))
    model = Llama(config.model)
    state = lowbit.load(out / "models" / "final.safetensors")
    model.load_state_dict(state, assign=True)
    kinds = {"int8-weights": Int8WeightTensor, "qat-int4": FakeQuantizedTensor}
    assert type(model.blocks[0].mlp.up.weight.detach()) is kinds.get(low_bits, torch.Tensor)
    logits = model(torch.arange(8)[None])
    assert logits.shape == (1, 8, 512) and logits.isfinite().all()


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """A run of six steps on two processes, whose gradients are reduced in 8 bits."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ways = ("--low-bits", "int8-weights", "--set", "compress=True")
    ran(*ways, "--data", source, "--out", out, *TINY)
    return out


def as_killed(whole: Path, target: Path) -> Path:
    """The files of that run as they were when it was killed in its last checkpoint."""
    shutil.copytree(whole, target)
    (target / "checkpoints" / "step-6").rename(target / "checkpoints" / "partial")
    (target / "models" / "final.safetensors").unlink()
    with (target / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "st')
    return target


@pytest.mark.parametrize("processes", [2, 1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_killed_run_goes_on(processes, whole, tmp_path):
    killed = as_killed(whole, tmp_path / "killed")
    ran("--resume", killed, processes=processes)
    expected, found = losses(whole), losses(killed)
    assert [*found] == [1, 2, 3, 4, 5, 6]
    if processes == 2:
        assert found == expected
        models = [lowbit.load(run / "models" / "final.safetensors") for run in (whole, killed)]
        for name, t in models[0].items():
            assert torch.equal(
                getattr(t, "codes", t), getattr(models[1][name], "codes", models[1][name])
            )
    else:  # gradients are added in another order
        assert all(abs(found[step] - expected[step]) < 2e-3 * expected[step] for step in expected)


def reached(out: Path) -> tuple[int, dict[int, float]]:
    """The step of the last checkpoint, 0 without one, and the losses of the steps whose lines are whole."""
    saved = fsdp2.checkpoints(fsdp2.RunFolder(out)) if out.exists() else []
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    records = [r for r in map(json.loads, lines) if r["phase"] == "train"]
    return fsdp2.step_of(saved[-1]) if saved else 0, {r["step"]: r["loss"] for r in records}


def killed_when(out: Path, processes: list[Program], is_due: Callable[[int, dict], bool]) -> None:
    """SIGKILL of all processes as soon as `is_due` of what they have reached."""
    deadline = time.monotonic() + 120
    while not is_due(*reached(out)):
        assert all(p.status() is None for p in processes) and time.monotonic() < deadline
        time.sleep(0.01)
    for process in processes:
        process.kill(signal.SIGKILL)
    for process in processes:
        assert process.finished(timeout=90).returncode == -signal.SIGKILL


def test_steps_after_a_checkpoint_are_repeated_after_sigkill(source, tmp_path):
    """Two processes, gradients in 8 bits on the wire, int8 weights: the same losses, digit for digit."""
    out = tmp_path / "run"
    options = ["--low-bits", "int8-weights", "--set", "compress=True", "--set", "log_every=1"]
    options += ["--set", "steps=5000", "--set", "save_every=4", "--data", source, "--out", out]
    begun = ranks(PROGRAM, *options, processes=2, folder=Path.cwd())
    killed_when(out, begun, lambda saved, seen: saved > 0 and max(seen, default=0) > saved + 1)
    saved, before = reached(out)
    resumed = ranks(PROGRAM, "--resume", out, processes=2, folder=Path.cwd())
    killed_when(out, resumed, lambda again, seen: again > saved and max(seen) >= max(before))
    after = reached(out)[1]
    assert max(before) > saved
    assert {step: after[step] for step in before} == before


def test_killed_for_real(source, tmp_path):
    out = tmp_path / "run"
    process = started(
        "--data", source, "--out", out, "--set", "steps=5000", "--set", "save_every=3"
    )
    deadline = time.monotonic() + 120
    while not fsdp2.checkpoints(fsdp2.RunFolder(out)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on to its processes
    process.communicate(timeout=90)
    reached = fsdp2.step_of(fsdp2.checkpoints(fsdp2.RunFolder(out))[-1])
    processes = ranks(PROGRAM, "--resume", out, processes=1, folder=Path.cwd())
    while fsdp2.step_of(fsdp2.checkpoints(fsdp2.RunFolder(out))[-1]) <= reached:
        assert all(p.status() is None for p in processes) and time.monotonic() < deadline + 120
        time.sleep(0.05)
    for process in processes:
        process.kill(signal.SIGTERM)
    for process in processes:
        assert process.finished(timeout=90).returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        (["--set", "batch_size=9"], 2, r"batch_size=9 sequences do not divide among 2"),
        (["--set", "low_bits=int5"], 1, r"low_bits is 'int5'; accepted: none, int8"),
        (["--set", "optimizer=Adam3bit"], 1, r"optimizer is 'Adam3bit'; accepted: AdamW"),
        (["--set", "save_every=0"], 1, r"save_every is 0; accepted: 1 or more"),
        (["--set", "lr=0.0"], 1, r"lr=0\.0 must be above 0"),
        (["--optimizer", "torch", "--set", "in_backward=True"], 1, r"in_backward takes an elem"),
        (["--resume", "nowhere"], 1, r"nowhere holds no run"),
        (["--resume", "nowhere", "--preset", "8b"], 1, r"--preset with --resume"),
    ],
)
def test_mistakes(options, world_size, message):
    with pytest.raises(UserError, match=message):
        fsdp2.settings(fsdp2.arguments().parse_args(options)).check(world_size)


def test_without_torchrun(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["fsdp2"])
    assert fsdp2.main() == 2
    assert "start it with torchrun" in capsys.readouterr().err


def test_presets_have_the_sizes_that_they_say():
    for preset, millions in (("tiny", 0.13), ("small", 302), ("8b", 7248)):
        with torch.device("meta"):
            model = Llama(fsdp2.PRESETS[preset]().model)
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)
