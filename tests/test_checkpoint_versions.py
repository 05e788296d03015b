"""Format versions: files of every old one load forever, newer ones are refused, migrations run in order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit as lb
from lowbit import checkpoint
from lowbit.checkpoint import FORMAT_VERSION, CheckpointError

DATA = Path(__file__).resolve().parent / "data"
SUFFIXES = pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
GOLDEN = sorted(DATA.glob("checkpoint_v*.*"))


def test_there_is_a_file_of_every_version() -> None:
    names = {p.name for p in GOLDEN}
    for version in range(1, FORMAT_VERSION + 1):
        for suffix in (".pt", ".safetensors"):
            assert f"checkpoint_v{version}{suffix}" in names, (
                "python -m tests.data.write_checkpoint"
            )
    assert all(p.stat().st_size < 20_000 for p in GOLDEN)
    assert sorted(checkpoint.MIGRATIONS) == list(range(1, FORMAT_VERSION))


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
    assert quantized == set(expected) and len(quantized) >= 4
    for name, values in expected.items():
        assert torch.equal(state[name].dequantize().float(), values), name
    assert state["plain"].dtype is torch.float16
    assert state["int4.weight"].spec == lb.Int4WeightOnly(8).weight
    assert state["qat"].scheme == lb.Int8DynamicActivationInt4Weight(8)
    assert isinstance(state["float8.weight"], lb.Float8Tensor)
    book = state["state.4bit.signed"]
    assert (book.format, book.signed, book.block_size) == ("4bit", True, 32)
    if path.suffix == ".safetensors":
        assert len(quantized) == 20
        assert state["experts"].dtype is torch.bfloat16 and state["experts"].shape == (2, 3, 8)
        assert (
            state["int8_int8.weight"].activation == lb.Int8DynamicActivationInt8Weight().activation
        )


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_old_files_are_in_their_version(path: Path) -> None:
    """A file must not be written again under a newer version."""
    _, info = checkpoint._read(path, "cpu")
    assert f"_v{info['format_version']}." in path.name


def rewrite(path: Path, change: Any) -> None:
    """Let `change` edit the JSON of a checkpoint."""
    tensors, info = checkpoint._read(path, "cpu")
    change(info)
    text = json.dumps(info)
    if path.suffix == ".pt":
        torch.save({"lowbit": text, "tensors": tensors}, path)
    else:
        from safetensors.torch import save_file

        save_file(tensors, path, metadata={"lowbit": text})


@SUFFIXES
@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 999])
def test_a_newer_version_is_refused(tmp_path: Path, suffix: str, version: int) -> None:
    path = tmp_path / f"m{suffix}"
    lb.save({"a": torch.ones(2)}, path)
    rewrite(path, lambda info: info.update(format_version=version, tensors="another layout"))
    before = path.read_bytes()
    match = rf"{re.escape(str(path))}: .*format version {version}; .*versions 1 to {FORMAT_VERSION}.*upgrade"
    with pytest.raises(CheckpointError, match=match):
        lb.load(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_no_version_at_all(tmp_path: Path, version: Any) -> None:
    path = tmp_path / "m.pt"
    lb.save({"a": torch.ones(2)}, path)
    rewrite(path, lambda info: info.update(format_version=version))
    with pytest.raises(CheckpointError, match=rf"format_version is {version!r}; accepted: 1 to"):
        lb.load(path)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_migrations_run_one_after_the_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two more versions had come: one renames a section and a part, the next a kind."""
    expected = lb.load(path)
    calls = []

    def to_next(tensors: dict[str, Tensor], info: dict[str, Any]) -> checkpoint.Plain:
        calls.append(info["format_version"])
        info = {**info, "format_version": info["format_version"] + 1, "linked": info["ties"]}
        del info["ties"]
        return {re.sub(r"\.codes$", ".bits", n): t for n, t in tensors.items()}, info

    def to_the_one_after(tensors: dict[str, Tensor], info: dict[str, Any]) -> checkpoint.Plain:
        calls.append(info["format_version"])
        info = {**info, "format_version": info["format_version"] + 1, "ties": info["linked"]}
        return {re.sub(r"\.bits$", ".codes", n): t for n, t in tensors.items()}, info

    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", FORMAT_VERSION + 2)
    monkeypatch.setitem(checkpoint.MIGRATIONS, FORMAT_VERSION, to_next)
    monkeypatch.setitem(checkpoint.MIGRATIONS, FORMAT_VERSION + 1, to_the_one_after)
    state = lb.load(path)
    assert calls[-2:] == [FORMAT_VERSION, FORMAT_VERSION + 1]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        same = (
            torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value
        )
        assert same, name


def test_a_migration_changes_nothing_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, info = checkpoint.to_plain({"a": torch.ones(2), "b": 3})
    before = json.dumps(info)

    def migrate(tensors: dict[str, Tensor], info: dict[str, Any]) -> checkpoint.Plain:
        tensors["c"] = tensors.pop("a")
        info["values"] = {}
        return tensors, info

    monkeypatch.setattr(checkpoint, "FORMAT_VERSION", FORMAT_VERSION + 1)
    monkeypatch.setitem(checkpoint.MIGRATIONS, FORMAT_VERSION, migrate)
    assert checkpoint.from_plain(tensors, info).keys() == {"c"}
    assert tensors.keys() == {"a"} and json.dumps(info) == before
