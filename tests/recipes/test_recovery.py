"""The recovery recipe on a model of seconds: runs, interruption, shares, page."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from recipes import phases, recovery, runs, text
from recipes.command_line import UserError
from recipes.llama import Llama
from recipes.phases import Phase, Run
from recipes.recovery import main
from recipes.recovery_report import Results, share_of
from recipes.recovery_variants import PRESETS, RUNS, gpu
from recipes.training import override

HAS_PEFT = importlib.util.find_spec("peft") is not None
SHORT = [
    *("steps=14", "probe_every=4", "probe_sequences=4", "heldout_tokens=600", "sample_tokens=8"),
    *("batch_size=4", "model.context=32", "model.dim=64", "model.layers=1", "model.hidden=96"),
    *("model.heads=2", "model.kv_heads=1", "model.vocab_size=300"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in ("argparse.py", "ast.py", "bdb.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib"), name), folder)
    return folder


def command(source: Path, out: Path, *more: str) -> list[str]:
    line = ["--preset", "tiny", "--data", str(source), "--out", str(out), *more]
    return [*line, *(word for assignment in SHORT for word in ("--set", assignment))]


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


WITHOUT_PEFT = [name for name, variant in RUNS.items() if variant.rank is None]
ON_A_GPU = ["g32-int2", "g32-int8xint4", *(["lora-int4"] if HAS_PEFT else [])]
"""Runs with the settings of a GPU; `test_the_gpus_model_is_prepared_for_every_run` prepares all."""


@pytest.fixture(scope="module")
def finished(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recovery") / "whole"
    assert main(command(source, out, "--seeds", "0", "--runs", ",".join(WITHOUT_PEFT))) == 0
    return out


def test_seeds_of_several_processes_keep_each_others_results(tmp_path: Path) -> None:
    """Each has its own object, as processes have; between reading and writing another one's turn may come."""

    def train(seed: int) -> None:
        config = dataclasses.replace(PRESETS["tiny"](), seed=seed)
        results = Results(tmp_path, config, torch.device("cpu"))
        run = argparse.Namespace(config=config)
        for i in range(20):
            results.add(run, f"run{i}", {"loss": float(i)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(train, range(4)))
    found = content(tmp_path)["seeds"]
    assert {seed: len(own) for seed, own in found.items()} == {str(s): 20 for s in range(4)}


def test_the_gpus_model_sees_60_million_tokens() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(gpu().model).parameters())
    assert 95e6 < parameters < 105e6
    assert gpu().trunk_steps * gpu().step_tokens >= 60e6 and gpu().compile


@pytest.mark.parametrize("name", RUNS)
def test_the_gpus_model_is_prepared_for_every_run(name: str) -> None:
    """At its full size, without memory for its weights."""
    variant = RUNS[name]
    own = variant.scheme(gpu())
    if own is None:
        return
    with torch.device("meta"):
        model = Llama(gpu().model)
    report = lowbit.qat.prepare_(model, own, scales=variant.scales)
    layers = gpu().model.layers
    assert len([e for e in report.entries if e.converted]) >= 7 * layers + 1
    learned = [n for n, _ in model.named_parameters() if n.endswith("weight_scale")]
    assert len(learned) == (7 * layers + 1 if variant.scales == "learned" else 0)


def test_the_gpus_runs_take_a_step_each(source: Path, tmp_path: Path) -> None:
    """With its settings but for the sizes, and without torch.compile."""
    line = command(source, tmp_path / "out", "--seeds", "0", "--runs", ",".join(ON_A_GPU))
    line[line.index("tiny")] = "gpu"
    few = ("steps=3", "branch_steps=1", "warmup_steps=1", "decay_steps=1", "compile=False")
    assert main([*line, *(word for assignment in few for word in ("--set", assignment))]) == 0
    models = content(tmp_path / "out")["seeds"]["0"]
    assert set(ON_A_GPU) <= set(models)
    assert all(0 < model["loss"] < 100 for model in models.values())


def test_every_run_is_measured_beside_its_rounded_model(finished: Path) -> None:
    models = content(finished)["seeds"]["0"]
    assert {"high", *WITHOUT_PEFT} <= set(models)
    for name in WITHOUT_PEFT:
        own = models[name]
        assert own["loss"] == pytest.approx(sum(own["losses"]) / len(own["losses"]), abs=1e-5)
        assert RUNS[name].rounded in models
    assert "rounded g32-int2, {−2 … 1}" in models
    page = (finished / "report.md").read_text()
    assert all(f"| {name} |" in page for name in WITHOUT_PEFT)
    assert "--preset tiny --seeds 0" in page and str(finished) not in page
    assert (finished / "recovery.png").stat().st_size > 10_000


def test_qat_starts_with_new_optimizer_states(finished: Path) -> None:
    folder = runs.RunFolder(finished / "seed0")
    config = dataclasses.replace(override(PRESETS["tiny"](), SHORT), seed=0)
    data, device = text.load(folder.data), torch.device("cpu")
    run = Run(config, folder, data, runs.Tracker(folder, {}, "disabled"), device)
    again = Phase("high again", config.trunk_steps, config.steps)
    assert phases.start_or_resume(run, again).optimizer.state
    own, phase = recovery.phase_of(run, "g32-int4")
    assert not phases.start_or_resume(own, phase).optimizer.state


def test_equal_compute_is_a_third_more_steps(finished: Path) -> None:
    models = content(finished)["seeds"]["0"]
    high, plain, compute = (models[n]["steps"] for n in ("high", "plain-int4", "compute-int4"))
    trunk = override(PRESETS["tiny"](), SHORT).trunk_steps
    assert plain == high
    assert compute - trunk == round((high - trunk) * 4 / 3)


def test_finished_runs_are_not_run_again(
    source: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    with monkeypatch.context() as patch:
        patch.setattr(phases, "train_step", None)
        assert main(command(source, out, "--seeds", "0", "--runs", "g32-int4,row-int4")) == 0
    assert content(out)["seeds"] == content(finished)["seeds"]
    assert main([*command(source, out, "--seeds", "0"), "--set", "lr=0.01"]) == 2


def test_a_killed_run_goes_on(
    source: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, step = tmp_path / "killed", phases.train_step
    left = [6]

    def killed(*arguments: Any) -> dict[str, float]:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step(*arguments)

    line = command(source, out, "--seeds", "0", "--set", "save_every=2")
    assert main([*line, "--base-only"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(phases, "train_step", killed)
        assert main([*line, "--runs", "g32-int3,plain-int3"]) == 130
    assert not {"plain-int3"} & set(content(out)["seeds"]["0"])
    assert main([*line, "--runs", "g32-int3,plain-int3"]) == 0
    whole, again = content(finished)["seeds"]["0"], content(out)["seeds"]["0"]
    for name in ("high", "g32-int3", "plain-int3", "rounded g32-int3"):
        assert whole[name]["losses"] == again[name]["losses"]


def test_branches_train_what_they_say(source: Path, finished: Path) -> None:
    config = override(PRESETS["tiny"](), SHORT)
    schemes = {name: variant.scheme(config) for name, variant in RUNS.items()}
    assert schemes["g32-int4"] == lowbit.IntxWeightOnly(4, 32)
    assert schemes["row-int4"] == lowbit.IntxWeightOnly(4)
    assert schemes["g32-int2"] == lowbit.Int2WeightOnly(32)
    assert schemes["g32-int8xint4"] == lowbit.Int8DynamicActivationInt4Weight(32)


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
def test_adapters_train_in_place_of_the_weights(source: Path, tmp_path: Path) -> None:
    assert main(command(source, tmp_path / "out", "--seeds", "0", "--runs", "lora-int4")) == 0
    assert "lora-int4" in content(tmp_path / "out")["seeds"]["0"]


@pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
def test_beside_adapters_train_the_embedding_and_norms_alone() -> None:
    config = override(PRESETS["tiny"](), SHORT)
    model = phases.with_adapters(Llama(config.model), 4)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    adapters = {name for name in trained if ".lora_" in name}
    norms = {name for name in trained if "norm" in name}
    assert len(adapters) == 2 * 7 * config.model.layers
    assert trained - adapters - norms == {"embedding.weight"}
    assert len(norms) == 2 * config.model.layers + 1


def test_beside_adapters_frozen_weights_do_not_train() -> None:
    """By the names that PEFT gives; the test above trains with PEFT itself."""
    config = override(PRESETS["tiny"](), SHORT)
    model = Llama(config.model)
    lowbit.qat.prepare_(model, lowbit.IntxWeightOnly(4, 32), scales="learned")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layer = model.blocks[0].mlp.up
    layer.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(64, 4, bias=False)})
    weights, adapters, scales = phases.trained_parameters(model)
    assert not weights and len(adapters) == 1 and len(scales) == 8


def test_shares_of_several_seeds() -> None:
    high, lost = [2.0, 2.2, 2.4, 2.1], [2.4, 2.7, 2.8, 2.4]
    seeds = {}
    for seed, share in (("0", 0.75), ("1", 0.85)):
        after = [b + (a - b) * share for a, b in zip(high, lost, strict=True)]
        models = {"high": high, "rounded g32-int4": lost, "g32-int4": after}
        seeds[seed] = {name: {"losses": losses} for name, losses in models.items()}
    found = share_of(seeds, "g32-int4")
    assert found is not None
    assert found.mean == pytest.approx(80) and (found.low, found.high) == pytest.approx((80, 80))
    assert found.seeds == pytest.approx({"0": 75, "1": 85})
    assert share_of(seeds, "g32-int3") is None


@pytest.mark.skipif(HAS_PEFT, reason="peft is here")
def test_without_peft_the_error_names_the_package() -> None:
    config = override(PRESETS["tiny"](), SHORT)
    with pytest.raises(UserError, match=r"finetune"):
        phases.with_adapters(Llama(config.model), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--runs", "g32-int5"], "no run 'g32-int5'"), (["--seeds", "x"], "expected whole numbers")],
)
def test_mistakes_are_one_line(
    source: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command(source, tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(recovery.Path(tmp_path).rglob("config.json"))


@pytest.mark.gpu
def test_compiled_on_a_gpu(source: Path, tmp_path: Path) -> None:
    line = command(source, tmp_path / "out", "--seeds", "0", "--runs", "g32-int4,g32-int8xint4")
    assert main([*line, "--set", "bf16=True", "--set", "compile=True"]) == 0
