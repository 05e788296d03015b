"""The convergence recipe: weights, runs on a small text, finished runs, statistics, table and curves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import convergence_report, convergence_results, convergence_variants, text
from recipes.command_line import UserError, chosen_names, chosen_seeds
from recipes.convergence import main, train_run
from recipes.convergence_results import settings
from recipes.convergence_text import STRETCH, cached_data, in_stretches
from recipes.convergence_variants import PRESETS, RUNS, Weights, gpu
from recipes.llama import Llama
from recipes.training import override

SHORT = ["steps=6", "probe_every=3", "heldout_tokens=256", "model.context=32", "model.dim=32"]
CONFIG = override(PRESETS["tiny"](), SHORT)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for name in ("argparse.py", "ast.py", "bdb.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib"), name), folder)
    return folder


@pytest.fixture(scope="module")
def data(source: Path) -> text.Data:
    model = CONFIG.model
    return text.prepare(source, "stdlib", 0.03, model.vocab_size, model.context)


@pytest.fixture
def command(source: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> list[str]:
    """The command line of a short training; the tokens are made once for all tests."""
    cache = tmp_path_factory.getbasetemp() / "convergence-data"
    line = ["--preset", "tiny", "--data", str(source), "--cache", str(cache)]
    line += [word for assignment in SHORT for word in ("--set", assignment)]
    return [*line, "--results", str(tmp_path / "results.jsonl")]


def test_changed_text_is_read_again(source: Path, tmp_path: Path) -> None:
    own, cache = shutil.copytree(source, tmp_path / "text"), tmp_path / "cache"
    first = cached_data(CONFIG, own, cache)
    again = cached_data(CONFIG, own, cache)
    assert torch.equal(again.train, first.train)
    assert len(list(cache.iterdir())) == 1
    shutil.copy(Path(sysconfig.get_path("stdlib"), "calendar.py"), own)
    assert len(cached_data(CONFIG, own, cache).train) > len(first.train)


def record(run: str, seed: int, loss: float | None, **others: Any) -> dict[str, Any]:
    """A finished run, made up."""
    return {
        "run": run,
        "seed": seed,
        "final_loss": loss,
        "curve": [[0, 4.0], [5, loss or 4.0]],
        "seconds": 30.0,
        "device": "Some GPU",
        "torch": "2.13.0",
        "date": "2026-01-02",
        "command": "python -m recipes.convergence --preset gpu",
        "settings": {"steps": 5, "batch_size": 4, "lr": 0.001, "train_tokens": 1000}
        | {"model": {"layers": 1, "dim": 32, "vocab_size": 300, "context": 8}},
        **others,
    }


def test_the_model_is_the_quick_starts() -> None:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Llama(gpu().model).parameters())
    assert 95e6 < parameters < 105e6 and gpu().steps >= 1000


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a GPU."""
    monkeypatch.setattr(convergence_variants, "computing_dtype", lambda device: torch.bfloat16)


@pytest.mark.usefixtures("in_bfloat16")
def test_float32_weights_are_updated_and_the_model_computes_with_their_rounding() -> None:
    model = Llama(CONFIG.model)
    drawn = [p.detach().clone() for p in model.parameters()]
    weights = Weights(model, RUNS["fp32"])
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.head.weight is model.embedding.weight
    for own, first, computing in zip(weights.trained, drawn, weights.computing, strict=True):
        assert torch.equal(own, first) and torch.equal(computing, first.bfloat16())

    model(torch.arange(8)[None]).float().sum().backward()
    weights.take_gradients()
    torch.optim.SGD(weights.trained, lr=1e-4).step()
    weights.round()
    changed = 0
    for own, first, computing in zip(weights.trained, drawn, weights.computing, strict=True):
        torch.testing.assert_close(own, first - 1e-4 * computing.grad.float())
        assert torch.equal(computing, own.bfloat16())
        changed += int(not torch.equal(own, first))
    assert changed > len(drawn) // 2


@pytest.mark.usefixtures("in_bfloat16")
def test_bfloat16_weights_are_the_models_own() -> None:
    model = Llama(CONFIG.model)
    weights = Weights(model, RUNS["bf16-nearest"])
    assert all(a is b for a, b in zip(weights.trained, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        # int4-weights has both states, and int8-weights those of float32; the step of each pair is compiled
        pytest.param(n, marks=pytest.mark.exhaustive)
        if n in ("int8-weights-8bit", "int8-weights-4bit")
        else n
        for n in RUNS
    ],
)
def test_every_run_trains(name: str, data: text.Data) -> None:
    found = train_run(CONFIG, RUNS[name], data, torch.device("cpu"))
    assert [step for step, _ in found["curve"]] == [0, 3, 6]
    assert found["curve"][-1][1] < found["curve"][0][1]
    assert 0 < found["final_loss"] < math.log(CONFIG.model.vocab_size) + 0.5
    assert convergence_results.FIELDS - {"command"} <= set(json.loads(json.dumps(found)))


def test_a_run_is_a_function_of_its_seed(data: text.Data) -> None:
    def loss(seed: int, name: str) -> float:
        config = dataclasses.replace(CONFIG, seed=seed)
        return train_run(config, RUNS[name], data, torch.device("cpu"))["final_loss"]

    assert loss(0, "fp32") == loss(0, "fp32") != loss(1, "fp32")
    roundings = {loss(0, f"bf16-{how}") for how in ("nearest", "stochastic", "corrected")}
    assert len(roundings) == 3


def test_a_run_that_diverges_has_no_final_loss(data: text.Data) -> None:
    run = dataclasses.replace(
        RUNS["fp32"], make=lambda groups, **_: torch.optim.SGD(groups, lr=math.inf)
    )
    config = dataclasses.replace(CONFIG, steps=30)
    found = train_run(config, run, data, torch.device("cpu"))
    assert found["final_loss"] is None and found["curve"][0][0] == 0
    assert all(math.isfinite(loss) for _, loss in found["curve"])


def test_finished_runs_are_not_repeated(
    command: list[str], capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "results.jsonl"
    assert main([*command, "--runs", "fp32,4bit", "--seeds", "0"]) == 0
    assert "0 of 2 runs are done" in capsys.readouterr().out
    first = file.read_text()
    file.write_text(first + '{"run": "fp32", "se')  # as if it had been killed while it wrote
    assert main([*command, "--runs", "fp32,4bit", "--seeds", "0,1"]) == 0
    out = capsys.readouterr().out
    assert "2 of 4 runs are done" in out and "| 4bit | fp32 weights, 4-bit states | 2 |" in out
    assert file.read_text().startswith(first)
    assert {(r["run"], r["seed"]) for r in convergence_results.read_results(file)} == {
        (run, seed) for run in ("fp32", "4bit") for seed in (0, 1)
    }
    assert main([*command, "--runs", "fp32", "--minutes", "0"]) == 0
    assert "1 runs are left" in capsys.readouterr().out

    assert main([*command, "--set", "lr=0.01"]) == 2
    assert "lr 0.0025, here it is 0.01" in capsys.readouterr().err

    assert main([*command, "--report", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report/convergence.md").read_text()
    assert "--preset tiny --set steps=6" in page and str(tmp_path) not in page
    assert (tmp_path / "report/convergence.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "fp32,5bit"], "no run '5bit'; accepted: fp32, 8bit"),
        (["--seeds", "0,x"], "expected whole numbers"),
        (["--seeds", "-1"], "seed is -1"),
        (["--set", "stepz=3"], "stepz"),
    ],
)
def test_mistakes_are_one_line(
    command: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_report_needs_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    nothing = str(tmp_path / "none.jsonl")
    assert main(["--report", str(tmp_path), "--results", nothing]) == 2
    assert "no finished runs" in capsys.readouterr().err
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    assert main(["--report", str(tmp_path), "--results", str(tmp_path / "other.jsonl")]) == 2
    assert "something else than finished runs" in capsys.readouterr().err


def test_choices() -> None:
    assert chosen_names("4bit, fp32", RUNS) == ["4bit", "fp32"]
    assert chosen_names("", RUNS) == list(RUNS)
    assert chosen_seeds("2,0") == [2, 0]
    with pytest.raises(UserError):
        chosen_seeds("")


def test_settings_hold_the_text_and_not_the_seed(data: text.Data) -> None:
    own = settings(CONFIG, data)
    assert own == settings(dataclasses.replace(CONFIG, seed=5), data)
    other = dataclasses.replace(data, train=data.train + 1)
    with pytest.raises(UserError, match="first_tokens_sum"):
        convergence_results.check_settings(
            [record("fp32", 0, 2.0, settings=own)], settings(CONFIG, other), Path("file")
        )


def test_differences_are_taken_seed_by_seed() -> None:
    """The seeds differ by much more than the runs do, and that must not widen the interval."""
    fp32 = {0: 2.0, 1: 3.0, 2: 4.0}
    ratios = {0: 1.001, 1: 1.002, 2: 1.003, 3: 1.5}  # seed 3 has no partner
    records = [record("fp32", s, loss) for s, loss in fp32.items()]
    records += [record("8bit", s, fp32.get(s, 9.0) * r) for s, r in ratios.items()]
    reference, eight = convergence_report.summarize(records)
    assert reference.difference is None and reference.within is None
    assert eight.difference == pytest.approx(0.002)
    assert eight.interval == pytest.approx(4.303 * 0.001 / math.sqrt(3))
    assert eight.within is True
    assert "| +0.20% ± 0.25% | +0.3% | yes |" in convergence_report.table([reference, eight])


def test_a_diverged_run_is_never_within() -> None:
    records = [record("fp32", 0, 2.0), record("4bit", 0, 2.0), record("4bit", 1, None)]
    summary = convergence_report.summarize(records)[1]
    assert summary.within is False and summary.interval is None
    assert "(1 diverged)" in convergence_report.table([summary])


def test_one_interval_for_many() -> None:
    assert convergence_report.half_interval([1.0]) is None
    two = convergence_report.half_interval([0.0, 2.0])
    assert two == pytest.approx(12.706 * math.sqrt(2) / math.sqrt(2))
    assert convergence_report.half_interval([0.0, 2.0] * 20) == pytest.approx(0.357, abs=2e-3)


def test_curves() -> None:
    records = [record("fp32", 0, 2.0), record("4bit", 0, 2.1), record("4bit", 1, 2.3)]
    assert convergence_report.mean_curve(records, "4bit") == [(0, 4.0), (5, pytest.approx(2.2))]
    assert convergence_report.difference_curve(records, "4bit") == [(5, pytest.approx(0.05))]


def test_stretches_are_held_out_and_nothing_is_lost(data: text.Data) -> None:
    tokens = torch.arange(10 * STRETCH + 5, dtype=torch.int32)
    split = in_stretches(dataclasses.replace(data, train=tokens[:-7], heldout=tokens[-7:]), 0.25)
    assert torch.equal(torch.cat([split.train, split.heldout]).sort().values, tokens)
    assert split.heldout.tolist() == [
        *range(3 * STRETCH, 4 * STRETCH),
        *range(7 * STRETCH, 8 * STRETCH),
    ]
