"""The quick start from end to end, at a size of seconds: outputs, interruption, resumption, reloading."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from recipes.llama import LlamaConfig
from recipes.quickstart import data as quickstart_data
from recipes.quickstart import evaluate, measure, report, train
from recipes.quickstart.__main__ import main
from recipes.quickstart.config import UserError, tiny
from recipes.quickstart.folder import RunFolder, load_checkpoint, save_checkpoint
from recipes.quickstart.interrupt import Interrupt, Interrupted
from recipes.quickstart.run import run
from recipes.quickstart.tracking import Tracker, read_metrics

CONFIG = dataclasses.replace(
    tiny(),
    model=LlamaConfig(
        vocab_size=300, dim=64, layers=1, heads=2, kv_heads=1, hidden=96, context=32, dropout=0.1
    ),
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
PHASES = [phase.name for phase in train.phases(CONFIG)]


class StopAfter(Interrupt):
    """As if Ctrl-C came after this many looks at `requested`."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> quickstart_data.Data:
    source = tmp_path_factory.mktemp("text")
    for name in ("argparse.py", "ast.py", "bdb.py", "cmd.py"):
        shutil.copy(Path(quickstart_data.sysconfig.get_path("stdlib"), name), source)
    return quickstart_data.prepare(CONFIG, source, StopAfter(1_000_000))


def start(path: Path, data: quickstart_data.Data) -> RunFolder:
    folder = RunFolder(path)
    folder.create(CONFIG, data)
    return folder


def go_on(
    folder: RunFolder, data: quickstart_data.Data, interrupt: Interrupt | None = None
) -> measure.Measurements:
    tracker = Tracker(folder, CONFIG, "disabled")
    try:
        return run(CONFIG, folder, data, tracker, interrupt or StopAfter(1_000_000))
    finally:
        tracker.close(0)


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, data: quickstart_data.Data
) -> tuple[RunFolder, measure.Measurements]:
    folder = start(tmp_path_factory.mktemp("runs") / "whole", data)
    return folder, go_on(folder, data)


Finished = tuple[RunFolder, measure.Measurements]


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reload in this process: the tests of the fresh one are elsewhere, and a process takes seconds."""
    monkeypatch.setattr(
        measure, "evaluate_in_fresh_process", lambda folder, _: evaluate.evaluate_saved(folder)
    )


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
        for text in (result.label, f"{result.perplexity:.3f}", repr(result.reloaded_perplexity)):
            assert text in markdown and text in html
    for count in found.optimizer_bytes.values():
        assert f"{count:,}" in markdown
    assert html.count("data:image/png;base64,") == 2 and 'src="http' not in html
    assert "| NO |" not in markdown


def test_fresh_process_finds_the_same_perplexity(finished: Finished) -> None:
    for result in finished[1].results:
        assert result.reloaded_perplexity == result.perplexity


def test_metrics_hold_every_step_and_result(finished: Finished) -> None:
    folder, found = finished
    records = read_metrics(folder)
    for phase in train.phases(CONFIG):
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
    factor = train.learning_rate_factor(CONFIG)
    whole = [CONFIG.lr * factor(step) for step in range(CONFIG.steps)]
    assert rates["trunk"] + rates["high"] == pytest.approx(whole)
    last = [next(r for r in reversed(records) if r["phase"] == "trunk"), None]
    first = next(r for r in records if r["phase"] == "high")
    assert first["heldout_loss"] == last[0]["heldout_loss"]  # type: ignore[index]


def test_saved_models_are_what_they_say(finished: Finished) -> None:
    folder, found = finished
    for name, bits in (("int4-qat", 4), ("int3-rtn", 3)):
        model = evaluate.load_model(folder.model(name), torch.device("cpu"))
        assert model.head.weight is model.embedding.weight
        weight = model.blocks[0].mlp.down.weight
        assert isinstance(weight, lowbit.AffineTensor)
        assert weight.spec == train.scheme(CONFIG, bits).weight
    assert found.quantized_parameters == 300 * 64 + 64 * (64 * 2 + 32 * 2 + 96 * 3)


def test_converted_model_is_the_one_that_was_trained(finished: Finished) -> None:
    folder, found = finished
    phase = next(p for p in train.phases(CONFIG) if p.name == "int4")
    training = train.start_or_resume(CONFIG, phase, folder, torch.device("cpu"))
    tokens = quickstart_data.load(folder.data).heldout
    windows = quickstart_data.heldout_windows(CONFIG, tokens, 1000 // 32)
    losses = evaluate.window_losses(training.model, windows, torch.device("cpu"), False)
    assert evaluate.perplexity(losses) == found.by_name("int4-qat").perplexity


def test_optimizer_bytes_are_those_of_the_states(finished: Finished) -> None:
    fp32, low = finished[1].optimizer_bytes.values()
    parameters = finished[1].parameters
    assert 8 * parameters <= fp32 <= 8 * parameters + 8 * 20
    assert low < fp32 / 3


@pytest.mark.parametrize("stop", [0, 4, 9, 16, 30])
@pytest.mark.usefixtures("same_process")
def test_interrupted_and_resumed_equals_uninterrupted(
    stop: int, tmp_path: Path, data: quickstart_data.Data, finished: Finished
) -> None:
    whole, found = finished
    folder = start(tmp_path / "again", data)
    with pytest.raises(Interrupted):
        go_on(folder, data, StopAfter(stop))
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
    """Equal to the bit, whatever it is, but for times."""
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


@pytest.mark.usefixtures("same_process")
def test_resuming_a_finished_run_only_measures_again(
    tmp_path: Path, data: quickstart_data.Data, finished: Finished
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    before = {p: p.stat().st_mtime_ns for p in copy.path.glob("checkpoints/*")}
    go_on(copy, data)
    assert {p: p.stat().st_mtime_ns for p in copy.path.glob("checkpoints/*")} == before
    assert len(read_metrics(copy)) == len(read_metrics(finished[0]))


@pytest.mark.parametrize("damage", ["truncated", "garbage", "foreign"])
def test_damaged_training_checkpoint_is_named_and_kept(
    damage: str, tmp_path: Path, data: quickstart_data.Data, finished: Finished
) -> None:
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(finished[0].path, copy.path)
    path = copy.checkpoint("high")
    content = path.read_bytes()
    if damage == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"hello")
    left = {p: p.read_bytes() for p in copy.path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"high\.pt can't be read.*Delete it") as caught:
        go_on(copy, data)
    assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in copy.path.rglob("*") if p.is_file()} == left


@pytest.mark.usefixtures("same_process")
def test_deleted_phase_runs_again(
    tmp_path: Path, data: quickstart_data.Data, finished: Finished
) -> None:
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
        evaluate.evaluate_saved(copy)
    assert evaluate.evaluate_saved(copy, "high")["high"] == finished[1].by_name("high").perplexity


def test_checkpoint_stays_whole_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "trunk.pt"
    save_checkpoint(path, {"phase": "trunk", "step": 1, "model": {}})
    with pytest.raises((AttributeError, TypeError, RuntimeError, Exception)):
        save_checkpoint(path, {"phase": "trunk", "step": 2, "model": {}, "bad": lambda: None})
    assert load_checkpoint(path)["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["trunk.pt"]


def test_a_loss_that_is_not_finite_stops_with_a_way_out(
    tmp_path: Path, data: quickstart_data.Data
) -> None:
    folder = start(tmp_path / "run", data)
    config = dataclasses.replace(CONFIG, lr=1e30)
    tracker = Tracker(folder, config, "disabled")
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step .* smaller learning rate"):
        run(config, folder, data, tracker, StopAfter(1_000_000))
    tracker.close(2)


@pytest.mark.parametrize(("speeds", "said"), [((95, 120), None), ((85, 92), "0.85 to 0.92")])
def test_slow_models_are_the_first_thing_said(
    finished: Finished, speeds: tuple[int, int], said: str | None
) -> None:
    found = copy.deepcopy(finished[1])
    low = [r for r in found.results if r.bits is not None]
    found.by_name("high").generate_tokens_per_s = 100.0
    for result in low:
        result.generate_tokens_per_s = float(speeds[1])
    low[-1].generate_tokens_per_s = float(speeds[0])
    text, headline = report.slowness(found), report.headline(CONFIG, found)
    if said is None:
        assert text is None and "Slow" not in headline
    else:
        assert text is not None and said in text and headline.startswith(text)
    (note,) = (b for b in report.model_table(found) if isinstance(b, report.Text))
    assert f"generates at {report.shares(found)} of the speed" in note.text


def test_recovery_is_the_share_of_the_lost_perplexity() -> None:
    def result(name: str, value: float) -> measure.Result:
        losses = torch.full((5,), math.log(value), dtype=torch.float64)
        return measure.Result(name, name, None, losses, value, 0, 0.0, 0.0, "")

    results = [result(n, v) for n, v in (("high", 10.0), ("int4-rtn", 12.0), ("int4-qat", 10.5))]
    config = dataclasses.replace(CONFIG, bits=(4,))
    (found,) = measure.recoveries(config, results)
    assert found.share == pytest.approx(0.75) and found.lost == pytest.approx(2.0)
    assert found.low == pytest.approx(0.75) and found.high == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1500, "1.50 kB"), (2_340_000, "2.34 MB"), (5e9, "5.00 GB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert report.size(int(count)) == text


def test_markdown_and_html_escape_what_models_write() -> None:
    blocks: list[report.Block] = [
        report.Heading("A <title>", 1),
        report.Code("a & b", "```\n<script>"),
        report.Table(["a|b", "c"], [["<", "|"]]),
    ]
    assert "<script>" not in report.to_html(blocks)
    assert "~~~~~~python\n```\n<script>\n~~~~~~" in report.to_markdown(blocks)
    assert "a\\|b" in report.to_markdown(blocks)


def test_json_of_the_last_line(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    folder, found = finished
    assert evaluate.main([str(folder.path), "--model", "int3-qat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"int3-qat": found.by_name("int3-qat").perplexity}
    assert main(["--resume", str(folder.path), "--preset", "tiny"]) == 2
    assert "doesn't go with --resume" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16(tmp_path: Path, data: quickstart_data.Data) -> None:
    config = dataclasses.replace(CONFIG, bf16=True)
    folder = RunFolder(tmp_path / "run")
    folder.create(config, data)
    for stop in (9, 1_000_000):
        tracker = Tracker(folder, config, "disabled")
        try:
            found = run(config, folder, data, tracker, StopAfter(stop))
        except Interrupted:
            assert stop == 9
        finally:
            tracker.close(0)
    assert all(r.perplexity == r.reloaded_perplexity for r in found.results)
    steps = [(r["phase"], r["step"]) for r in read_metrics(folder) if "loss" in r]
    assert steps == [(p.name, s + 1) for p in train.phases(config) for s in range(p.start, p.end)]
