"""benchmarks.mapping_error: its counts, and the page that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import mapping_error
from lowbit import Int, PerRow, Spec


def test_the_squared_error_by_hand() -> None:
    """int2 without clipping: codes −2..1 and a step of 1, so that 0.25 is lost of one value of (1, 0.25)."""
    spec = Spec(Int(2), PerRow(), "symmetric_no_clipping_err")
    weights = [torch.tensor([[1.0, 0.25]]), torch.tensor([[-2.0, 0.0]])]
    error = mapping_error.squared_error(weights, spec, torch.float32)
    assert error == pytest.approx(0.25**2 / (1 + 0.25**2 + 4))


def test_only_matrices_of_a_file_count_and_few_rows_of_each(tmp_path: Path) -> None:
    file = pytest.importorskip("safetensors.torch")
    tensors = {
        "large": torch.randn(1000, 128).bfloat16(),
        "narrow": torch.randn(64, 64),
        "bias": torch.randn(256),
        "ids": torch.ones(64, 128, dtype=torch.int64),
    }
    file.save_file(tensors, tmp_path / "m.safetensors")
    (found,) = mapping_error.matrices(tmp_path / "m.safetensors")
    assert found.shape == (250, 128) and found.dtype is torch.float32
    assert torch.equal(found[1], tensors["large"][4].float())
    del tensors["large"]
    file.save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(SystemExit, match="no floating-point matrix of at least 32 x 128"):
        mapping_error.matrices(tmp_path / "m.safetensors")


def test_a_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(mapping_error, "random_weights", lambda: {"few": [torch.randn(32, 128)]})
    assert mapping_error.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line for line in lines if line.startswith("| few |")]
    assert len(table) == 3 * 4 and all(line.count("|") == 3 + 7 + 1 for line in table)
    assert mapping_error.main(["model.safetensors"]) == 2
