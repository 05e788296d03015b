"""The quick start from end to end, at a size of seconds: outputs, interruption, resumption, reloading."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from recipes import pages, phases, quickstart, quickstart_measure, quickstart_report, runs, text
from recipes.command_line import UserError
from recipes.llama import LlamaConfig
from recipes.phases import Run
from recipes.presets import tiny
from recipes.quickstart import main
from recipes.quickstart_measure import Measurements
from recipes.runs import RunFolder, load_checkpoint, read_metrics
from recipes.training import TrainingConfig, learning_rate_factor, perplexity, window_losses

CONFIG = dataclasses.replace(
    tiny(),
    model=LlamaConfig(
        vocab_size=300, dim=64, layers=1, heads=2, kv_heads=1, hidden=96, context=32, dropout=0.1
    ),
    bits=(4, 3),
    batch_size=4,
    steps=14,
    branch_steps=6,
    decay_steps=3,
    warmup_steps=2,
    probe_every=4,
    probe_sequences=4,
    save_every=5,
    heldout_tokens=1000,
    sample_tokens=12,
)
PHASES = [phase.name for phase in phases.phases(CONFIG)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> text.Data:
    source = tmp_path_factory.mktemp("text")
    for name in ("argparse.py", "ast.py", "bdb.py", "cmd.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib"), name), source)
    model = CONFIG.model
    return text.prepare(source, "stdlib", 0.03, model.vocab_size, model.context)


def start(path: Path, data: text.Data, config: TrainingConfig = CONFIG) -> RunFolder:
    folder = RunFolder(path)
    folder.create(dataclasses.asdict(config), data)
    return folder


def go_on(
    folder: RunFolder,
    data: text.Data,
    config: TrainingConfig = CONFIG,
    device: torch.device = CPU,
) -> Measurements:
    """Finish the run in `folder`."""
    tracker = runs.Tracker(folder, {}, "disabled")
    try:
        return quickstart.train_and_report(Run(config, folder, data, tracker, device))
    finally:
        tracker.close(0)


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise KeyboardInterrupt during the step after so many steps."""
    left = steps

    class Interrupt(runs.DelayedInterrupt):
        @property
        def requested(self) -> bool:  # type: ignore[override]
            nonlocal left
            left -= 1
            return left < 0

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    monkeypatch.setattr(runs, "DelayedInterrupt", Interrupt)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, data: text.Data
) -> tuple[RunFolder, Measurements]:
    folder = start(tmp_path_factory.mktemp("runs") / "whole", data)
    return folder, go_on(folder, data)


Finished = tuple[RunFolder, Measurements]


@pytest.fixture
def measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload in this process, time one call, draw nothing: the run `finished` does all of it, which takes seconds."""

    def once(run: Callable[[], object], *options: object, **named: object) -> float:
        run()
        return 1.0

    def drawn(run: Run, found: Measurements) -> None:
        for name in ("loss.png", "perplexity.png"):
            (run.folder.path / name).touch()

    saved = quickstart_measure.evaluate_saved
    monkeypatch.setattr(quickstart_measure, "evaluate_in_fresh_process", saved)
    monkeypatch.setattr(quickstart_measure, "median_seconds", once)
    monkeypatch.setattr(quickstart, "draw_figures", drawn)


def test_every_file_is_there(finished: Finished) -> None:
    folder, found = finished
    for name in ("report.md", "report.html", "loss.png", "perplexity.png", "metrics.jsonl"):
        assert (folder.path / name).stat().st_size > 200
    assert [r.name for r in found.results] == [
        "high",
        "int4-rtn",
        "int4-qat",
        "int3-rtn",
        "int3-qat",
    ]
    for result in found.results:
        assert folder.model(result.name).stat().st_size == result.file_bytes
        assert result.sample.startswith("class Queue")
    sizes = [r.file_bytes for r in found.results]
    assert sizes[0] > 3 * sizes[1] and sizes[1] > sizes[3]
    assert not list(folder.path.rglob(".*"))


def test_report_says_what_was_measured(finished: Finished) -> None:
    folder, found = finished
    markdown = (folder.path / "report.md").read_text(encoding="utf-8")
    html = (folder.path / "report.html").read_text(encoding="utf-8")
    for result in found.results:
        for shown in (result.label, f"{result.perplexity:.3f}", pages.size(result.file_bytes)):
            assert shown in markdown and shown in html
    for count in found.optimizer_bytes.values():
        assert f"{count:,}" in markdown
    assert html.count("data:image/png;base64,") == 2 and 'src="http' not in html
    assert markdown.count("| equal |") == len(found.results)


def test_fresh_process_finds_the_same_perplexity(finished: Finished) -> None:
    for result in finished[1].results:
        assert result.reloaded_perplexity == result.perplexity


def test_metrics_hold_every_step_and_result(finished: Finished) -> None:
    folder, found = finished
    records = read_metrics(folder)
    for phase in phases.phases(CONFIG):
        steps = [r["step"] for r in records if r["phase"] == phase.name and "loss" in r]
        assert steps == list(range(phase.start + 1, phase.end + 1))
        probes = [r["step"] for r in records if r["phase"] == phase.name and "heldout_loss" in r]
        assert probes[0] == phase.start and probes[-1] == phase.end
    assert {"loss", "lr", "grad_norm", "tokens_per_s"} <= records[1].keys()
    results = {r["model"]: r["perplexity"] for r in records if r["phase"] == "result"}
    assert results == {r.name: r.perplexity for r in found.results}


def test_branches_share_data_schedule_and_start(finished: Finished) -> None:
    records = read_metrics(finished[0])
    rates = {p: [r["lr"] for r in records if r["phase"] == p and "lr" in r] for p in PHASES}
    assert rates["high"] == rates["int4"] == rates["int3"]
    factor = learning_rate_factor(CONFIG)
    whole = [CONFIG.lr * factor(step) for step in range(CONFIG.steps)]
    assert rates["trunk"] + rates["high"] == pytest.approx(whole)
    last = [next(r for r in reversed(records) if r["phase"] == "trunk"), None]
    first = next(r for r in records if r["phase"] == "high")
    assert first["heldout_loss"] == last[0]["heldout_loss"]  # type: ignore[index]


def test_saved_models_match_their_descriptions(finished: Finished) -> None:
    folder, found = finished
    for name, bits in (("int4-qat", 4), ("int3-rtn", 3)):
        model = quickstart_measure.load_model(folder.model(name), torch.device("cpu"))
        assert model.head.weight is model.embedding.weight
        weight = model.blocks[0].mlp.down.weight
        assert isinstance(weight, lowbit.AffineTensor)
        assert weight.spec == phases.scheme(CONFIG, bits).weight
    assert found.quantized_parameters == 300 * 64 + 64 * (64 * 2 + 32 * 2 + 96 * 3)


def test_converted_model_is_the_one_that_was_trained(finished: Finished) -> None:
    folder, found = finished
    phase = next(p for p in phases.phases(CONFIG) if p.name == "int4")
    tracker = runs.Tracker(folder, {}, "disabled")
    run = Run(CONFIG, folder, text.load(folder.data), tracker, CPU)
    model = phases.start_or_resume(run, phase).model
    losses = window_losses(model, run.heldout_windows(CONFIG.heldout_tokens), bf16=False)
    assert perplexity(losses) == found.by_name("int4-qat").perplexity
    tracker.close(0)


def test_optimizer_bytes_are_those_of_the_states(finished: Finished) -> None:
    fp32, low = finished[1].optimizer_bytes.values()
    parameters = finished[1].parameters
    assert 8 * parameters <= fp32 <= 8 * parameters + 8 * 20
    assert low < fp32 / 3


@pytest.mark.parametrize(
    "stop",
    [0, 9, 16, *(pytest.param(stop, marks=pytest.mark.exhaustive) for stop in (4, 25))],
)
@pytest.mark.usefixtures("measured_briefly")
def test_interrupted_and_resumed_equals_uninterrupted(
    stop: int,
    tmp_path: Path,
    data: text.Data,
    finished: Finished,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, found = finished
    folder = start(tmp_path / "again", data)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(stop, patch)
        go_on(folder, data)
    done = len((folder.path / "metrics.jsonl").read_bytes())
    assert done < len((whole.path / "metrics.jsonl").read_bytes())
    with open(folder.metrics, "ab") as file:  # as if killed some steps later, while writing
        for phase in PHASES:
            if folder.checkpoint(phase).exists() or phase == "trunk":
                last = phase
        file.write(f'{{"phase": "{last}", "step": 99, "loss": 1}}\n{{"phase": "tr'.encode())
    resumed = go_on(folder, data)
    assert [without_times(r) for r in read_metrics(folder)] == [
        without_times(r) for r in read_metrics(whole)
    ]
    for phase in PHASES:
        same(load_checkpoint(whole.checkpoint(phase)), load_checkpoint(folder.checkpoint(phase)))
    for one, other in zip(found.results, resumed.results, strict=True):
        assert torch.equal(one.losses, other.losses) and one.sample == other.sample


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not k.endswith("tokens_per_s")}


def same(one: Any, other: Any, path: str = "") -> None:
    """Assert that two values of any kind are equal to the bit, except times."""
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one.keys() - {"seconds"}:
            same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, lowbit.LowbitTensor):
        names = one.__tensor_flatten__()[0]
        for name in names:
            same(getattr(one, name), getattr(other, name), f"{path}.{name}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, list | tuple):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{path}[{i}]")
    else:
        assert one == other, path


@pytest.mark.usefixtures("measured_briefly")
def test_resuming_a_finished_run_only_measures_again(
    tmp_path: Path, data: text.Data, finished: Finished
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    before = {p: p.stat().st_mtime_ns for p in copy.path.glob("checkpoints/*")}
    go_on(copy, data)
    assert {p: p.stat().st_mtime_ns for p in copy.path.glob("checkpoints/*")} == before
    assert len(read_metrics(copy)) == len(read_metrics(finished[0]))


@pytest.mark.usefixtures("measured_briefly")
def test_interrupted_while_measuring(
    tmp_path: Path, data: text.Data, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)

    def interrupted(folder: RunFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quickstart_measure, "evaluate_in_fresh_process", interrupted)
        go_on(copy, data)
    go_on(copy, data)
    assert len(read_metrics(copy)) == len(read_metrics(finished[0]))


def test_a_damaged_checkpoint_stops_a_run_and_changes_nothing(
    tmp_path: Path, data: text.Data, finished: Finished
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    copy.checkpoint("high").write_bytes(b"hello")
    left = {p: p.read_bytes() for p in copy.path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"high\.pt can't be read"):
        go_on(copy, data)
    assert {p: p.read_bytes() for p in copy.path.rglob("*") if p.is_file()} == left


@pytest.mark.usefixtures("measured_briefly")
def test_deleted_phase_runs_again(tmp_path: Path, data: text.Data, finished: Finished) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    copy.checkpoint("high").unlink()
    again = go_on(copy, data)
    same(load_checkpoint(finished[0].checkpoint("high")), load_checkpoint(copy.checkpoint("high")))
    assert len(read_metrics(copy)) == len(read_metrics(finished[0]))
    assert again.by_name("high").perplexity == finished[1].by_name("high").perplexity


def test_damaged_model_file(tmp_path: Path, finished: Finished) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    path = copy.model("int4-qat")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"int4-qat\.safetensors is not a model"):
        quickstart_measure.evaluate_saved(copy)


def test_a_loss_that_is_not_finite_stops_with_a_way_out(tmp_path: Path, data: text.Data) -> None:
    config = dataclasses.replace(CONFIG, lr=1e30)
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step .* smaller learning rate"):
        go_on(start(tmp_path / "run", data, config), data, config)


@pytest.mark.parametrize(("speeds", "said"), [((95, 120), None), ((85, 92), "0.85 to 0.92")])
def test_the_report_begins_with_slow_models(
    finished: Finished, speeds: tuple[int, int], said: str | None
) -> None:
    found = copy.deepcopy(finished[1])
    low = [r for r in found.results if r.bits is not None]
    found.by_name("high").generate_tokens_per_s = 100.0
    for result in low:
        result.generate_tokens_per_s = float(speeds[1])
    low[-1].generate_tokens_per_s = float(speeds[0])
    slow, headline = quickstart_report.slowness(found), quickstart_report.headline(found)
    if said is None:
        assert slow is None and "Slow" not in headline
    else:
        assert slow is not None and said in slow and headline.startswith(slow)


def test_recovery_is_the_share_of_the_lost_perplexity() -> None:
    def result(name: str, value: float) -> quickstart_measure.Result:
        losses = torch.full((5,), math.log(value), dtype=torch.float64)
        return quickstart_measure.Result(name, name, None, losses, value, 0, 0.0, 0.0, "")

    results = [result(n, v) for n, v in (("high", 10.0), ("int4-rtn", 12.0), ("int4-qat", 10.5))]
    config = dataclasses.replace(CONFIG, bits=(4,))
    (found,) = quickstart_measure.recoveries(config, results)
    assert found.share == pytest.approx(0.75) and found.lost == pytest.approx(2.0)
    assert found.low == pytest.approx(0.75) and found.high == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(12, "12 B"), (1500, "1.50 kB"), (2_340_000, "2.34 MB"), (5e9, "5.00 GB")],
)
def test_sizes_in_powers_of_1000(count: int, shown: str) -> None:
    assert pages.size(int(count)) == shown


def test_the_html_page_escapes_what_models_write(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_bytes(b"picture")
    code = pages.code("```\n<script>")
    assert code == "````python\n```\n<script>\n````"
    table = pages.table(["a|b", "c", "d"], [["<script>", "|", "2"]])
    assert table.splitlines()[:2] == ["| a\\|b | c | d |", "| --- | ---: | ---: |"]
    html = pages.to_html(tmp_path, f"# Title\n\n{code}\n\n{table}\n\n![Loss](loss.png)\n")
    assert "<script>" not in html and html.count("&lt;script&gt;") == 2
    assert "<title>Title</title>" in html and '<td style="text-align:right">2</td>' in html
    assert 'src="data:image/png;base64,cGljdHVyZQ=="' in html


def test_evaluate_prints_json(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    folder, found = finished
    assert main(["--evaluate", str(folder.path)]) == 0
    assert json.loads(capsys.readouterr().out) == {r.name: r.perplexity for r in found.results}
    assert main(["--resume", str(folder.path), "--preset", "tiny"]) == 2
    assert "--preset doesn't go with --resume" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16(
    tmp_path: Path, data: text.Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device = dataclasses.replace(CONFIG, bf16=True), torch.device("cuda")
    folder = start(tmp_path / "run", data, config)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(9, patch)
        go_on(folder, data, config, device)
    found = go_on(folder, data, config, device)
    assert all(r.perplexity == r.reloaded_perplexity for r in found.results)
    steps = [(r["phase"], r["step"]) for r in read_metrics(folder) if "loss" in r]
    assert steps == [(p.name, s + 1) for p in phases.phases(config) for s in range(p.start, p.end)]
