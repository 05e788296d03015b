"""The benchmark of folders: what it makes, measures and leaves behind, on a small model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.quantize_folder import MODELS, TABLE, Spent, Step, make, problems
from benchmarks.registry import Row

for package in ("safetensors", "typer", "rich"):
    pytest.importorskip(package)


@pytest.mark.parametrize(("size", "count"), [("1B", 1_235_814_400), ("8B", 8_030_261_248)])
def test_shapes_are_those_of_the_published_models(size: str, count: int) -> None:
    assert sum(torch.Size(shape).numel() for shape in MODELS[size].shapes().values()) == count


def test_shards_hold_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit import formats

    monkeypatch.setattr("benchmarks.quantize_folder.MOST_IN_A_SHARD", 200_000)
    make("tiny", str(tmp_path / "model"))
    assert len([*(tmp_path / "model").glob("*.safetensors")]) > 2
    found = {name: tuple(t.shape) for name, t in formats.tensors(tmp_path / "model")}
    assert found == MODELS["tiny"].shapes()


def test_every_step_is_measured_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[tuple[Step, Spent]] = []

    def recorded(step: Step, repeats: int) -> Spent:
        measured.append((step, TABLE.measure(step, repeats)))
        return measured[-1][1]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("benchmarks.quantize_folder.measure_step", recorded)
    for problem in problems("cpu", ("tiny",)):
        # `inspect` alone: what it reads is made first.
        (inspect,) = problem.selected(["inspect, compressed"], []).candidates
        recorded(inspect, 2)
        assert [step.writes is None for step, _ in measured] == [False, True]
        for step, found in measured:
            assert found.seconds > 0 and found.peak > found.shard > 0
            assert (found.written > 0) == (step.writes is not None)
            assert len(TABLE.cells(Row(step, found), None, 0.0)) == len(TABLE.columns)
    assert [*tmp_path.iterdir()] == []
