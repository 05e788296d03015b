"""`benchmarks.qat_start` on models of a few steps: three kinds train, are rounded and are in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import qat_start

SMALL = ["encoder", "convolutional", "mixture of experts"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny = qat_start.Size(32, 16, 2, 2, trunk=3, branch=2, lr=1e-3, end=5e-4, branch_lr=5e-4)
    monkeypatch.setitem(qat_start.SIZES, "tiny", tiny)
    text = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "text.bin").write_bytes(text.to(torch.uint8).numpy().tobytes())
    return tmp_path


@pytest.mark.parametrize("kind", SMALL)
def test_a_kind(kind: str, out: Path) -> None:
    methods = ["present", "learned"]
    line = qat_start.run_trial(kind, 1, out, methods, [3], "tiny")
    (path,) = out.glob("tiny-*.json")
    found = json.loads(path.read_text())
    assert found["kind"] == kind and line.startswith(kind)
    losses = {k: v for k, v in found.items() if k not in ("kind", "seed")}
    assert set(losses) == {"high", "trunk", "rounded-3", "present-3", "learned-3"}
    assert all(0 < loss < 10 for loss in losses.values())
    assert len(set(losses.values())) == len(losses), "each differs"
    again = qat_start.run_trial(kind, 1, out, methods, [3], "tiny")
    assert again.endswith("has everything") and json.loads(path.read_text()) == found
    *_, row = qat_start.table(out, "tiny").splitlines()
    assert row.startswith(f"| {kind} | int3 | 1 |")
    assert f"{qat_start.share(found, 'present-3'):.1f}" in row


def test_the_interval_is_that_of_student() -> None:
    assert qat_start.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"  # 4.30 * 1 / sqrt(3)
    assert qat_start.interval([1.5]) == "1.5"


def test_a_share() -> None:
    record = {"high": 1.0, "rounded-3": 3.0, "present-3": 1.5}
    assert qat_start.share(record, "present-3") == 75
