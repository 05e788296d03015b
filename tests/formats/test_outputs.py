"""What an export may replace at its output, and what it keeps: data of others, and what appears during the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lowbit
from lowbit import Int4WeightOnly
from lowbit.formats import FormatError
from lowbit.formats.new_file import new_file
from lowbit.formats.shards import Shards
from tests.cli.command import listing
from tests.formats.models import build, low_bit, plain_folder

pytest.importorskip("safetensors")


@pytest.mark.parametrize("kept", ["step-500/model.safetensors", "a/b/old.bin", ".git/HEAD"])
def test_overwrite_keeps_what_an_export_never_writes(kept: str, tmp_path: Path) -> None:
    """The folder of a trainer has config.json too, and its earlier checkpoints inside."""
    out, model = tmp_path / "out", low_bit(Int4WeightOnly(64))
    lowbit.export(model, out)
    (out / "chat_templates").mkdir()
    (out / "chat_templates/tool.jinja").touch()  # what a tokenizer writes is replaced
    lowbit.export(model, out, overwrite=True)
    assert not (out / "chat_templates").exists()
    (out / kept).parent.mkdir(parents=True)
    (out / kept).write_text("mine")
    before = listing(tmp_path)
    with pytest.raises(FormatError, match=r"overwrite=True would delete too"):
        lowbit.export(model, out, overwrite=True)
    assert listing(tmp_path) == before and (out / kept).read_text() == "mine"


def test_overwrite_keeps_the_folder_that_is_read(tmp_path: Path) -> None:
    """The output holds the source, so replacing it would delete the source."""
    out = tmp_path / "out"
    lowbit.export(low_bit(Int4WeightOnly(64)), out)
    source = plain_folder(out / "plain", build())
    before = listing(tmp_path)
    with pytest.raises(FormatError, match=r"which is read; give another name"):
        lowbit.export(source, out, scheme=Int4WeightOnly(64), overwrite=True)
    assert listing(tmp_path) == before


def test_a_folder_that_appears_during_the_export_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two exports with the same output, for example."""
    out, finish = tmp_path / "out", Shards.finish

    def late(self: Any) -> None:
        finish(self)
        out.mkdir()
        (out / "config.json").write_text("{}")

    monkeypatch.setattr(Shards, "finish", late)
    with pytest.raises(FormatError, match="exists already"):
        lowbit.export(low_bit(Int4WeightOnly(64)), out)
    assert listing(tmp_path) == ["out", "out/config.json"]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_file_that_appears_during_the_export_is_kept(name: str, tmp_path: Path) -> None:
    """The file itself, and the one beside it with the tensors of a large ONNX model."""

    def write() -> None:
        with new_file(tmp_path / "model.onnx", False, "onnx", ".onnx") as path:
            path.write_text("program")
            path.with_name("model.onnx.data").write_text("tensors")
            (tmp_path / name).write_text("mine")

    with pytest.raises(FormatError, match=f"{name} exists already"):
        write()
    assert listing(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


def test_files_take_their_places_together(tmp_path: Path) -> None:
    with new_file(tmp_path / "model.onnx", True, "onnx", ".onnx") as path:
        path.write_text("program")
        path.with_name("model.onnx.data").write_text("tensors")
    assert listing(tmp_path) == ["model.onnx", "model.onnx.data"]
