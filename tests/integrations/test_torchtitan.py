"""lowbit in torchtitan 0.2 on CPU processes with FSDP2: every way to train, exact resume after SIGKILL, resharding."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import lowbit
from tests import forked
from tests.integrations.titan import DEBUG, ROOT, environment, logged, ran, started

pytest.importorskip("torchtitan")
if not importlib.metadata.version("torchtitan").startswith("0.2."):
    pytest.skip("torchtitan of another release", allow_module_level=True)

NORM = "grad_norm"
LONG = ("--training.steps", "120", "--lr_scheduler.total_steps", "120")
LONG += ("--checkpoint.interval", "30", "--checkpoint.keep_latest_k", "0")
LONG += ("--checkpoint.async_mode", "async", "--lowbit.metrics_freq", "15")
LONG += ("--lowbit.train", "int8_weights", "--optimizer.name", "AdamW4bit")


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Tokens of a made-up text, and their tokenizer."""
    source = tmp_path_factory.mktemp("source")
    for name in range(24):
        lines = (f"line {i} of file {name}: {i * name} times {i}\n" for i in range(300))
        (source / f"{name}.txt").write_text("".join(lines))
    out = tmp_path_factory.mktemp("text") / "tokens"
    program = "import sys; from recipes.torchtitan import tokens; sys.exit(tokens.main())"
    done = forked.run(program, "--out", out, "--data", source, "--vocab-size", "512", folder=ROOT)
    assert done.returncode == 0, done.stderr
    return out


def exported(out: Path, *options: str) -> lowbit.Report:
    """The file that the export writes for the last checkpoint of a run, loaded."""
    file = out / "model.safetensors"
    config = ("--job.config_file", DEBUG, "--job.dump_folder", out, *options)
    program = "import sys; from recipes.torchtitan import export; sys.exit(export.main())"
    done = forked.run(program, "--out", file, *config, folder=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return lowbit.load(file)


# ---- ways to train -------------------------------------------------------------------------------------------


def test_int8_products_and_their_metrics(text, tmp_path):
    """tensorboard and wandb get torchtitan's metrics and lowbit's; measuring a step does not change it."""
    measured = ran(text, tmp_path / "a", "--metrics.enable_wandb")
    assert "14 weights converted, 2 left alone" in measured
    assert "optimizer AdamW8bit" in measured
    (sent,) = (tmp_path / "a").glob("tb/*/wandb/offline-run-*/*.wandb")
    for name in ("lowbit/products_in_low_bits", "lowbit/snr_gradients(dB)", "lowbit/updates_lost"):
        assert name.encode() in sent.read_bytes()
    ran(text, tmp_path / "b", "--lowbit.metrics_freq", "0")
    assert logged(tmp_path / "a") == logged(tmp_path / "b") and len(logged(tmp_path / "a")) == 4

    def values(name: str) -> dict[int, float]:
        return logged(tmp_path / "a", f"lowbit/{name}")

    share = values("products_in_low_bits")
    assert list(share) == [2, 4] and 0.7 < share[4] < 0.8  # all but the head's
    for name in ("weights", "activations", "gradients"):
        assert 38 < values(f"snr_{name}(dB)")[4] < 50
    assert 0 <= values("updates_lost")[4] < 0.01
    assert 2.0 < values("state_bytes_per_parameter")[4] < 3.0  # small parameters keep fp32 states


SNR = {f"snr_{name}(dB)" for name in ("weights", "activations", "gradients")}
WAYS = {
    "float8-tp-muon": (
        "--lowbit.train float8(always=True) --optimizer.name Muon8bit --parallelism.tensor_parallel_degree 2",
        2,
        SNR,
    ),
    "int8-compile-ac": (
        "--lowbit.train int8(always=True) --compile.enable --activation_checkpoint.mode full",
        2,
        SNR,
    ),
    "bitnet-hsdp-lion": (
        "--lowbit.train bitnet --optimizer.name Lion8bit --training.local_batch_size 2 --lowbit.compress "
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 2",
        4,
        SNR - {"snr_gradients(dB)"},
    ),
    "in-backward-bf16": (
        "--lowbit.train= --optimizer.name AdamW4bit(seed=3) --optimizer.early_step_in_backward --lowbit.save_in_int8 "
        "--training.dtype bfloat16",
        2,
        set(),
    ),
    "int8-weights-experts": (
        "--model.name deepseek_v3_tokens --lowbit.train int8_weights --lowbit.experts",
        2,
        set(),
    ),
}
"""Options, processes, and the signal-to-noise ratios that are logged."""


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(way, text, tmp_path):
    options, processes, ratios = WAYS[way]
    log = ran(text, tmp_path, *options.split(), processes=processes)
    losses = logged(tmp_path)
    assert list(losses) == [1, 2, 3, 4] and losses[4] < losses[1]
    assert {name for name in SNR if logged(tmp_path, f"lowbit/{name}")} == ratios
    assert list(logged(tmp_path, "lowbit/updates_lost")) == [2, 4]
    assert ("weights converted" in log) == ("--lowbit.train=" not in options)
    assert ("gradients are reduced in 8 bits" in log) == ("--lowbit.compress" in options)


def test_qat_then_conversion(text, tmp_path):
    """What is exported has the values that QAT trained, in int4."""
    options = ("--lowbit.train", "", "--lowbit.qat", "int4(group_size=32)")
    ran(text, tmp_path, *options)
    state = exported(tmp_path, *options)
    weight = state["layers.0.attention.wq.weight"]
    assert isinstance(weight, lowbit.AffineTensor) and weight.spec.format.bits == 4
    assert state["output.weight"].dtype is torch.float32
    measured = logged(tmp_path, "lowbit/snr_weights(dB)")
    assert 15 < measured[4] < 30
    plain = exported(tmp_path)  # as int8 products, whose weights are what QAT trained
    exact = plain["layers.0.attention.wq.weight"]
    expected = lowbit.Int4WeightOnly(group_size=32).weight.fake_quantize(exact, torch.float32)
    assert torch.equal(weight.dequantize(), expected)


def test_a_schedule_of_qat(text, tmp_path):
    """Observers for two steps, rounding from the second on: resumed digit for digit."""
    options = ("--lowbit.train", "", "--lowbit.qat", "int8_int8_static")
    options += ("--lowbit.qat_scales", "learned", "--lowbit.qat_start", "1")
    options += ("--lowbit.qat_freeze_observers", "2")
    ran(text, tmp_path, *options)
    whole = logged(tmp_path)
    assert 25 < logged(tmp_path, "lowbit/snr_weights(dB)")[4] < 50
    shutil.rmtree(tmp_path / "checkpoint/step-4")
    shutil.rmtree(tmp_path / "tb")
    ran(text, tmp_path, *options)
    assert logged(tmp_path) == {step: whole[step] for step in (3, 4)}
    weight = exported(tmp_path, *options)["layers.0.attention.wq.weight"]
    assert weight.input_scale.isfinite().all()


# ---- checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """A run of 120 steps on two processes, with int8 weights, 4-bit states and asynchronous checkpoints."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ran(text, out, *LONG)
    return out


def complete(out: Path) -> list[int]:
    """The steps whose checkpoints are whole, in order."""
    found = out.glob("checkpoint/step-*/.metadata")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def test_killed_and_resumed_digit_for_digit(text, whole, tmp_path):
    """SIGKILL of all processes, after a checkpoint and anywhere in a step."""
    process = started(text, tmp_path, *LONG)
    deadline = time.monotonic() + 120
    while not complete(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = _children(process.pid)
    for each in (process.pid, *workers):  # torchrun first, or it would see its workers die
        os.kill(each, signal.SIGKILL)
    process.communicate(timeout=60)
    reached = complete(tmp_path)[-1]
    assert reached < 120, "the run was over before it could be killed"
    ran(text, tmp_path, *LONG)
    for metric in ("loss_metrics/global_avg_loss", NORM, "lowbit/updates_lost"):
        expected = {s: v for s, v in logged(whole, metric).items() if s > reached}
        found = logged(tmp_path, metric)
        assert found == expected and len(found) > (0 if metric.startswith("lowbit") else 20)
    first, second = (exported(out, *LONG) for out in (whole, tmp_path))
    for name, weight in first.items():
        values = (
            t.dequantize() if isinstance(t, lowbit.AffineTensor) else t
            for t in (weight, second[name])
        )
        assert torch.equal(*values), name


def _children(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(folder.name))
    return found


def test_other_numbers_of_processes(text, whole, tmp_path):
    """2 -> 1 -> 2 processes: the same batches, and the losses of the whole run but for the order of sums."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for step in (60, 90, 120):
        shutil.rmtree(out / f"checkpoint/step-{step}")
    expected = logged(whole)
    for processes, first, last in ((1, 31, 60), (2, 61, 90)):
        ran(text, out, *LONG, "--training.steps", str(last), processes=processes)
        found = logged(out)
        assert [*found] == [*range(first, last + 1)]
        assert all(abs(found[s] - expected[s]) < 5e-3 * expected[s] for s in found)


# ---- the recipe that compares -----------------------------------------------------------------------------------


def test_comparison(text, tmp_path):
    """Two ways on the same batches, one JSON, a table; runs that are there are not repeated."""
    program = [sys.executable, "-m", "recipes.torchtitan.compare", "--out", str(tmp_path)]
    options = ["--data", str(text), "--steps", "8", "--runs", "bf16,int8-weights"]
    small = [
        "--model.flavor",
        "tiny",
        "--training.seq_len",
        "64",
        "--training.local_batch_size",
        "4",
    ]
    small += ["--training.global_batch_size", "8", "--compile.no-enable"]
    small += ["--training.mixed_precision_param", "float32", "--lr_scheduler.warmup_steps", "2"]

    def compared() -> str:
        done = subprocess.run(
            [*program, *options, "--", *small],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    assert "| int8-weights | 1 |" in compared()
    assert compared().count("done before") == 2
    assert (tmp_path / "results.json").stat().st_size > 0
