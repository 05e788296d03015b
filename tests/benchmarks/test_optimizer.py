"""The benchmarks of optimizers on a CPU, with small parameters: counted bytes, every choice, one whole step."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import pytest
import torch

import lowbit
from benchmarks import optimizer_first_step, optimizer_losses
from benchmarks.muon_step import (
    MIXTURE,
    SHARED_TABLE,
    STACKED,
    SharedCandidate,
    TorchMuon,
    measure_shared,
    muon_choices,
    muon_step,
    muon_step_shared,
)
from benchmarks.muon_step import TABLE as MUON_TABLE
from benchmarks.optimizer_first_step import (
    FIRST_STEP_TABLE,
    FirstSteps,
    FreshProcess,
    measure_first_steps,
)
from benchmarks.optimizer_step import (
    CPU_TABLE,
    STEP_TABLE,
    StepCandidate,
    StepTimes,
    issue_seconds,
    measure_step,
    optimizer_step,
    optimizer_step_cpu,
)
from benchmarks.optimizers import (
    LLAMA_1B,
    OptimizerChoice,
    lowbit_formats,
    lowbit_options,
    peers,
    random_parameters,
    state_bytes,
    torch_fused,
)
from benchmarks.peak_memory import PeakBytes, events_to_peak, split_step
from benchmarks.registry import Problem, Result, Row
from benchmarks.train_llama import (
    TRAINING_TABLE,
    TrainingCandidate,
    TrainingCost,
    measure_training,
    memory_limit,
    offloaded,
    train_memory,
)
from lowbit.optim.step import fused
from recipes.llama import LlamaConfig

SHAPES = [(64, 64), (32, 256), (64,)]
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of PyTorch's operations. tests/optim compiles and compares the kernels."""
    monkeypatch.setattr(fused, "compile_obstacle", lambda variant, device: "a test forbids it")


def test_the_parameters_are_those_of_llama() -> None:
    assert len(LLAMA_1B) == 146
    assert sum(math.prod(shape) for shape in LLAMA_1B) == 1_235_814_400


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(
    "choice", [*lowbit_formats(), *lowbit_options(), torch_fused()], ids=lambda c: c.name
)
def test_every_choice_steps(choice: OptimizerChoice) -> None:
    times = measure_step(StepCandidate(choice, SHAPES, "cpu"), 2)
    assert times.parameters == ELEMENTS
    assert min(times.step, times.first) > 0
    # reads and writes the weight, reads the gradient, and has at least half a byte of state
    assert times.moved > ELEMENTS * (2 * (2 + choice.gradient_reads) + 1)


@pytest.mark.usefixtures("not_compiled")
def test_the_floor_counts_what_is_stored() -> None:
    def moved(choice: OptimizerChoice) -> int:
        return measure_step(StepCandidate(choice, [(16, 256)], "cpu"), 2).moved

    eight, four = lowbit_formats()[1:3]
    n = 16 * 256
    torchs, own = 2 * 4, 2 * 8  # step counters, read and written
    assert moved(torch_fused()) == n * (3 * 2 + 4 * 2) + torchs
    assert moved(torch_fused(torch.float32)) == n * (3 * 4 + 4 * 4) + torchs
    assert moved(eight) == n * (3 * 2 + 4 * 1) + 4 * (n // 256) * 4 + own
    assert moved(four) == n * (3 * 2 + 4 // 2) + 4 * (n // 128) * 4 + own


def test_states_are_counted_once() -> None:
    params = random_parameters([(64, 64)], torch.float32, "cpu")
    optimizer = lowbit.optim.AdamW8bit(params)
    assert state_bytes(optimizer) == 0
    optimizer.step()
    counted = state_bytes(optimizer)
    assert counted == optimizer.state_bytes()
    optimizer.state[params[0]]["again"] = optimizer.state[params[0]]["step"]
    assert state_bytes(optimizer) == counted


def test_a_step_without_effect_is_no_measurement() -> None:
    still = OptimizerChoice("still", lambda params: torch.optim.SGD(params, lr=0.0))
    with pytest.raises(RuntimeError, match=r"still: .* not moved"):
        measure_step(StepCandidate(still, SHAPES, "cpu"), 2)


@pytest.mark.parametrize("choice", peers(), ids=lambda c: c.name)
def test_a_missing_peer_is_an_import_error(
    choice: OptimizerChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.optim", None)
    with pytest.raises(ImportError):
        choice.make([])


def test_every_problem_holds_its_reference() -> None:
    for problem in [*optimizer_step(), *optimizer_step_cpu(), *train_memory()]:
        names = [c.name for c in problem.candidates]
        assert problem.reference in names and len(set(names)) == len(names)


def test_step_cells() -> None:
    lowbit_row, torch_row = (
        Row(StepCandidate(choice, SHAPES), times)
        for choice, times in (
            (lowbit_formats()[0], StepTimes(4e-3, 1e-3, 0.25, 10**10, 10**9, 2 * 10**9, 2**20)),
            (torch_fused(), StepTimes(8e-3, 2e-3, 0.5, 14 * 10**9, 10**9, 4 * 10**9, 0)),
        )
    )
    problem = Problem("p", [lowbit_row.candidate, torch_row.candidate], torch_row.candidate.name)
    result = Result(problem, [lowbit_row, torch_row])
    cells = dict(zip(STEP_TABLE.columns, STEP_TABLE.cells(lowbit_row, result, 4e12), strict=True))
    assert cells == {
        "step ms": "4.00",
        "/ torch fused": "0.50",
        "floor ms": "2.50",
        "of the floor's speed": "62%",
        "host ms": "1.00",
        "first step s": "0.25",
        "state B/param": "2.00",
        "extra peak MiB": "1",
    }
    cells = CPU_TABLE.cells(lowbit_row, result, math.nan)
    assert len(cells) == len(CPU_TABLE.columns) and cells[0] == "1333.3"
    alone = Result(problem, [lowbit_row, Row(torch_row.candidate, why_not="out of memory")])
    assert STEP_TABLE.cells(lowbit_row, alone, 4e12)[1] == ""


def test_the_first_step_of_fresh_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program with torch's optimizer, which compiles nothing on a CPU; then processes that print what it prints."""
    monkeypatch.setattr(sys, "argv", ["-c", torch_fused().name, "cpu", "64", "64"])
    exec(optimizer_first_step.PROGRAM, {})
    seconds = json.loads(capsys.readouterr().out)
    assert 0 < seconds["step"] < seconds["from_import"]

    printing = (
        "import json, os, pathlib; folder = pathlib.Path(os.environ['LOWBIT_CACHE_DIR']); warm = folder.exists(); "
        "folder.mkdir(exist_ok=True); print(json.dumps({'step': 1 - warm / 2, 'from_import': 3 - warm}))"
    )
    monkeypatch.setattr(optimizer_first_step, "PROGRAM", printing)
    found = measure_first_steps(FreshProcess(torch_fused(), "cpu", (64, 64)), 1)
    assert found == FirstSteps(cold=1.0, cold_from_import=3, warm=0.5, warm_from_import=2)
    row = Row(None, found)
    assert len(FIRST_STEP_TABLE.cells(row, Result(Problem("p", []), [row]), 1.0)) == 4


def test_a_process_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit(f'no device {sys.argv[2]}')"
    monkeypatch.setattr(optimizer_first_step, "PROGRAM", failing)
    with pytest.raises(RuntimeError, match=r"the process of lowbit AdamW4bit failed: .*nowhere"):
        measure_first_steps(FreshProcess(lowbit_formats()[2], "nowhere", (64, 64)), 1)


@pytest.mark.parametrize(
    "choice", [lowbit_formats()[1], torch_fused(torch.bfloat16)], ids=lambda c: c.name
)
def test_a_training_step(choice: OptimizerChoice) -> None:
    config = LlamaConfig(300, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
    cost = measure_training(
        TrainingCandidate(choice, (2, 16), config=config, device="cpu", compile=False), 2
    )
    assert cost.tokens == 32 and cost.seconds > 0 and cost.peak is None


def test_training_cells() -> None:
    choices = [lowbit_formats()[0], torch_fused()]
    kinds = PeakBytes(2**31, 2**30, 3 * 2**30, 2**32, 2**29)
    rows = [
        Row(TrainingCandidate(choices[0], (4, 4096)), TrainingCost(0.2, 16_384, 30.0, 4.0, kinds)),
        Row(TrainingCandidate(choices[1], (4, 4096)), TrainingCost(0.4, 16_384, 34.5, 7.0)),
    ]
    result = Result(Problem("p", [r.candidate for r in rows], choices[1].name), rows)
    assert TRAINING_TABLE.cells(rows[0], result, 1.0) == [
        "200.0", "0.50", "81.9", "30.00", "-4.50", "4.00", *["2.00", "1.00", "3.00", "4.00", "0.50"],
    ]  # fmt: skip
    assert TRAINING_TABLE.cells(rows[1], result, 1.0)[4] == ""
    assert TRAINING_TABLE.cells(rows[1], result, 1.0)[6:] == [""] * 5


def test_the_peak_is_divided() -> None:
    """Addresses are used again; a gradient counts only if the same allocation outlives backward."""
    events = [
        *[
            ("alloc", 1, 100),
            ("alloc", 2, 50),
            ("free_requested", 2, 50),
            ("free_completed", 2, 50),
        ],
        *[("segment_alloc", 9, 5000), ("alloc", 3, 30)],  # the end of forward: 1 and 3
        *[("alloc", 4, 7), ("alloc", 2, 200)],  # the peak: a gradient and a temporary
        *[("free_requested", 2, 200), ("free_requested", 1, 100), ("alloc", 1, 20)],
        *[("free_requested", 3, 30), ("alloc", 5, 60)],  # the end of backward: gradients 1 and 4
    ]
    history = [{"action": a, "addr": addr, "size": size} for a, addr, size in events]
    assert events_to_peak(history) == 8
    assert split_step(history, 6, 12, {1, 4}) == (7, 130, 200)
    assert split_step([], 0, 0, set()) == (0, 0, 0)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_training_step_with_states_in_host_memory(gradients: bool) -> None:
    config = LlamaConfig(300, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
    choice = offloaded("torch.optim", "AdamW", gradients=gradients, fused=True)
    candidate = TrainingCandidate(choice, (2, 16), config=config, device="cpu", compile=False)
    assert measure_training(candidate, 2).seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "choice", [*lowbit_formats(), *lowbit_options(), torch_fused()], ids=lambda c: c.name
)
def test_memory_and_time_on_the_gpu(choice: OptimizerChoice) -> None:
    shapes = [(4096, 1024), (1024, 4096), (1024,)]
    times = measure_step(StepCandidate(choice, shapes), 3)
    assert 0 < times.step < times.first and times.issue < times.first
    assert times.held is not None and times.extra is not None and times.extra >= 0
    stored = times.moved / times.parameters - 2 * (2 + choice.gradient_reads)  # read and written
    assert times.held / times.parameters == pytest.approx(stored / 2, rel=0.05)


@pytest.mark.gpu
def test_a_limit_on_memory_holds_and_ends() -> None:
    def four_gib() -> torch.Tensor:
        return torch.empty(2**32, dtype=torch.uint8, device="cuda")

    with pytest.raises(torch.OutOfMemoryError), memory_limit(2.0):
        four_gib()
    assert four_gib().numel() == 2**32


@pytest.mark.gpu
def test_a_compiled_training_step_on_the_gpu() -> None:
    config = LlamaConfig(512, dim=256, layers=2, heads=4, kv_heads=2, hidden=512, context=128)
    torch_cost, lowbit_cost = (
        measure_training(TrainingCandidate(choice, (2, 128), config=config), 3)
        for choice in (torch_fused(), lowbit_formats()[1])
    )
    assert torch_cost.held is not None and lowbit_cost.held is not None
    assert torch_cost.peak is not None and torch_cost.peak > torch_cost.held > lowbit_cost.held > 0


def test_gradients_alternate_while_the_host_is_timed() -> None:
    params = random_parameters([(4, 4), (4,)], torch.float32, "cpu")
    sets = [[torch.full_like(p, value) for p in params] for value in (1.0, 2.0)]
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            seen.append([p.grad.flatten()[0].item() for p in params])

    seconds = issue_seconds(Watching(params, lr=0.1), params, sets, 3, on_gpu=False)
    assert seen == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]] and len(seconds) == 3


def test_a_mixture_of_experts_has_the_same_weights_stacked() -> None:
    assert len(MIXTURE) == 776 and len(STACKED) == 14
    assert sum(map(math.prod, MIXTURE)) == sum(map(math.prod, STACKED)) == 1_245_708_288


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize("shapes", [SHAPES, [(3, 64, 64), (100_001, 8)]], ids=str)
def test_every_choice_of_muon_steps(shapes: list[tuple[int, ...]]) -> None:
    for choice in muon_choices():
        times = measure_step(StepCandidate(choice, shapes, "cpu"), 2)
        assert times.parameters == sum(map(math.prod, shapes))
    optimizer = TorchMuon(random_parameters(SHAPES, torch.bfloat16, "cpu"))
    optimizer.step()
    assert len(optimizer.parts) == 2 and len(optimizer.state) == len(SHAPES)


def test_muons_tables() -> None:
    problems = list(muon_step())
    assert [len(p.candidates) for p in problems] == [6, 4]
    times = StepTimes(0.045, 0.02, 0.5, 10, 1000, held=1020, extra=2**20)
    for problem in problems:
        result = Result(problem, [Row(c, times) for c in problem.candidates])
        for row in result.rows:
            assert MUON_TABLE.cells(row, result, 1e12) == [
                "45.0",
                "1.00",
                "20.0",
                "0.50",
                "1.02",
                "1",
            ]


def test_muon_shared_by_processes() -> None:
    (choice, *_) = muon_choices()
    measured = measure_shared(SharedCandidate(choice, [(64, 64)] * 3, "cpu", ranks=2), 2)
    assert measured[0] > 0 and measured[2] > 0
    (problem,) = muon_step_shared()
    result = Result(problem, [Row(c, (0.04, 0.01, 2**30)) for c in problem.candidates])
    assert [len(SHARED_TABLE.cells(row, result, 1e12)) for row in result.rows] == [4, 4, 4]


def test_losses_of_optimizers() -> None:
    """Every optimizer trains, on the same batches again with the same loss; columns compare seeds in pairs."""
    for problem in optimizer_losses.optimizer_losses():
        short = [replace(c, seeds=2) for c in problem.candidates]
        measured = [optimizer_losses.trained(c, steps=3) for c in short]
        assert optimizer_losses.trained(short[0], steps=3) == measured[0]
        rows = [Row(c, m) for c, m in zip(short, measured, strict=True)]
        result = Result(problem, rows)
        shown = [optimizer_losses.cells(row, result, 0.0) for row in rows]
        assert shown[0][1] == "" and all("±" in cells[1] for cells in shown[1:])
        assert all(0.1 < loss < 10 for m in measured for loss in m.each)
        assert measured[0].bytes == pytest.approx(
            {"Muon": 4.04, "SOAP": 25.8}[problem.name.partition(",")[0]], rel=0.01
        )
