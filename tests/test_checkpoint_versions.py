"""Format versions: a file of 0.1.0 loads for ever, and files of other versions are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.checkpoint import FORMAT_VERSION, CheckpointError
from lowbit.files import container

DATA = Path(__file__).resolve().parent / "data"
GOLDEN = sorted(DATA.glob("checkpoint_v*.*"))


def test_there_is_a_file_of_every_version() -> None:
    wanted = {f"checkpoint_v{v}.safetensors" for v in range(1, FORMAT_VERSION + 1)}
    assert {p.name for p in GOLDEN} == wanted, "python -m tests.data.write_checkpoint"
    assert all(p.stat().st_size < 40_000 for p in GOLDEN)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_old_files_load(path: Path) -> None:
    state = lb.load(path)
    assert "written by" in lb.load_metadata(path)
    assert state["tied"] is state["int4.weight"]
    assert (state["step"], state["lr"], state["betas"], state["note"]) == (
        12,
        1e-3,
        [0.9, 0.95],
        None,
    )
    expected = {
        n.removeprefix("expected."): t for n, t in state.items() if n.startswith("expected.")
    }
    quantized = {n for n, t in state.items() if isinstance(t, lb.LowbitTensor)} - {"tied"}
    assert quantized == set(expected)
    for name, values in expected.items():
        assert torch.equal(state[name].dequantize().float(), values), name
    assert state["plain"].dtype is torch.float16
    assert state["int4.weight"].spec == lb.Int4WeightOnly(8).weight
    assert state["qat"].scheme == lb.Int8DynamicActivationInt4Weight(8)
    assert isinstance(state["float8.weight"], lb.Float8Tensor)
    book = state["state.4bit.signed"]
    assert (book.format, book.signed, book.block_size) == ("4bit", True, 32)
    assert len(quantized) == 20
    assert state["experts"].dtype is torch.bfloat16 and state["experts"].shape == (2, 3, 8)
    assert state["int8_int8.weight"].activation == lb.Int8DynamicActivationInt8Weight().activation


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_old_files_are_in_their_version(path: Path) -> None:
    """A file must not be written again under a newer version."""
    _, info = container.read(path, "cpu")
    assert f"_v{info['format_version']}." in path.name


# ---- versions -------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Any) -> None:
    """Let `change` edit the JSON of a checkpoint, whose digests are then those of the change."""
    tensors, info = container.read(path, "cpu")
    change(info)
    container.write(path, tensors, info)


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 999])
def test_a_newer_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.safetensors"
    lb.save({"a": torch.ones(2)}, path)
    rewrite(path, lambda info: info.update(format_version=version, tensors="another layout"))
    before = path.read_bytes()
    match = rf"{re.escape(str(path))}: .*format version {version}; .*reads version {FORMAT_VERSION}: upgrade"
    with pytest.raises(CheckpointError, match=match):
        lb.load(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_no_version_at_all(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "m.safetensors"
    lb.save({"a": torch.ones(2)}, path)
    rewrite(path, lambda info: info.update(format_version=version))
    with pytest.raises(
        CheckpointError, match=rf"format version {version!r}; this lowbit reads version 1$"
    ):
        lb.load(path)
