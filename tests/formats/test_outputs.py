"""What an export replaces and keeps at its output, which files it copies, and the loss that it reports."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Int4WeightOnly
from lowbit.formats import FormatError
from lowbit.formats.format_file import format_file
from lowbit.formats.registry import PROGRAMS
from lowbit.formats.shards import Shards
from lowbit.numerics.snr import snr
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
        with format_file(tmp_path / "model.onnx", False, "onnx", ".onnx") as path:
            path.write_text("program")
            path.with_name("model.onnx.data").write_text("tensors")
            (tmp_path / name).write_text("mine")

    with pytest.raises(FormatError, match=f"{name} exists already"):
        write()
    assert listing(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the size of files")
@pytest.mark.parametrize("suffix", [f.suffix for f in PROGRAMS] + [".gguf"])
@pytest.mark.parametrize("limit", [0, 1000])
def test_a_full_disk_is_named_whatever_a_package_says(
    suffix: str, limit: int, tmp_path: Path
) -> None:
    """PyTorch says "unexpected pos", numpy "4096 requested and 0 written"."""
    import resource

    def write(error: Exception) -> None:
        with format_file(tmp_path / f"m{suffix}", False, "a program", suffix) as path:
            path.write_bytes(bytes(limit))
            raise error

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for error in (
        RuntimeError("unexpected pos 64 vs 0"),
        OSError("4096 requested"),
        FormatError("no"),
    ):
        with pytest.raises((type(error), FormatError), match=str(error)):
            write(error)  # the disk has space
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(FormatError, match=rf"m{suffix} cannot be written: File too large"):
                write(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [*tmp_path.iterdir()] == []


def test_files_take_their_places_together(tmp_path: Path) -> None:
    with format_file(tmp_path / "model.onnx", True, "onnx", ".onnx") as path:
        path.write_text("program")
        path.with_name("model.onnx.data").write_text("tensors")
    assert listing(tmp_path) == ["model.onnx", "model.onnx.data"]


def left(out: Path) -> Path:
    """What a process that was killed left beside `out`."""
    place = out.with_name(f".{out.name}.lowbit-0123456789ab")
    place.mkdir()
    (place / "lock").touch()
    (place / out.name).mkdir()
    (place / out.name / "model-00001.safetensors").touch()
    return place


@pytest.mark.parametrize("suffix", ["", ".gguf", ".onnx", ".safetensors"])
def test_the_next_run_removes_what_a_killed_one_left(suffix: str, tmp_path: Path) -> None:
    out, model = tmp_path / f"out{suffix}", low_bit(Int4WeightOnly(64))
    left(out)
    with pytest.warns(UserWarning, match="0123456789ab, which a killed process left, is removed"):
        if suffix in ("", ".safetensors"):
            lowbit.export(model, out) if suffix == "" else lowbit.save(model, out)
        else:
            with format_file(out, False, suffix, suffix) as path:
                path.touch()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_next_run_puts_the_old_folder_back(tmp_path: Path) -> None:
    """A process was killed between two renames, where the file system exchanges nothing."""
    out, model = tmp_path / "out", low_bit(Int4WeightOnly(64))
    lowbit.export(model, out)
    before = listing(out)
    out.rename(left(out) / "old")
    with (
        pytest.warns(UserWarning, match=r"out was missing, .* the old one is back"),
        pytest.raises(FormatError, match="exists already"),
    ):
        lowbit.export(model, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and listing(out) == before


# ---- files beside the weights ----------------------------------------------------------------------------------------


STALE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


def test_files_that_describe_other_weights_are_not_copied(tmp_path: Path) -> None:
    source = plain_folder(tmp_path / "plain", build())
    for name in (*STALE, "generation_config.json"):
        (source / name).write_text("{}")
    lowbit.export(source, tmp_path / "out", scheme=Int4WeightOnly(64))
    found = listing(tmp_path / "out")
    assert {"generation_config.json", "tokenizer.json"} <= {*found} and not {*STALE} & {*found}


@pytest.mark.parametrize("has_config", [True, False])
def test_a_tokenizer_folder_gives_no_weights(has_config: bool, tmp_path: Path) -> None:
    """Its own weights, under the name of the shard that was written, would take the place of the model's."""
    model, folder = low_bit(Int4WeightOnly(64)), tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("of another model")
    if has_config:
        (folder / "config.json").write_text("{}")
    lowbit.export(model, tmp_path / "out", tokenizer=folder)
    assert listing(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.json"]
    made = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(made.up_proj.weight.dequantize(), model.up_proj.weight.dequantize())


def test_the_settings_of_generation_are_those_of_the_model(tmp_path: Path) -> None:
    class Settings:
        def to_json_string(self) -> str:
            return "{}"

    model: Any = low_bit(Int4WeightOnly(64))
    model.generation_config = Settings()
    (tmp_path / "words").mkdir()
    (tmp_path / "words/generation_config.json").write_text("of another model")
    lowbit.export(model, tmp_path / "out", tokenizer=tmp_path / "words")
    assert (tmp_path / "out/generation_config.json").read_text() == "{}"


@pytest.mark.parametrize("tokenizer", ["nowhere", 5])
def test_a_tokenizer_that_is_none_is_refused_before_anything_is_written(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Shards, "add", None)
    with pytest.raises(FormatError, match=r"accepted: an object with save_pretrained, or a folder"):
        lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out", tokenizer=tokenizer)
    assert listing(tmp_path) == []


# ---- the loss that is reported ---------------------------------------------------------------------------------------


def test_the_ratio_of_scalars_and_of_infinite_noise() -> None:
    assert snr(torch.tensor(2.0), torch.tensor(1.8)) == pytest.approx(20.0, abs=1e-3)
    assert snr(torch.tensor(2.0), torch.tensor(2.0)) == math.inf
    assert snr(torch.ones(3), torch.full((3,), math.inf)) == -math.inf
    assert snr(torch.zeros(3), torch.ones(3)) == -math.inf
