"""A folder in any format: a flipped bit names the tensor, and digests are those of the bytes that were written."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Int4WeightOnly, formats
from lowbit.files import digests
from lowbit.formats import FormatError
from lowbit.formats import folder as folders
from tests.formats.models import build, low_bit
from tests.formats.test_damage import WRITTEN, written

safetensors = pytest.importorskip("safetensors.torch")
__all__ = ["written"]  # a fixture

Header = dict[str, Any]


def header_of(path: Path) -> tuple[Header, int]:
    """The header of a shard, and where its tensors begin."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), 8 + size


def with_header(path: Path, change: Callable[[Header], object]) -> None:
    header, begin = header_of(path)
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + path.read_bytes()[begin:])


def flip(path: Path, name: str) -> None:
    header, begin = header_of(path)
    content = bytearray(path.read_bytes())
    content[begin + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(content)


def readers(folder: Path) -> list[Callable[[], object]]:
    from lowbit.cli.inspect import _weights

    return [
        lambda: lowbit.load_pretrained(folder, build()),
        lambda: lowbit.export(folder, folder.parent / "out", "lowbit"),
        lambda: dict(formats.tensors(folder)),
        lambda: folders.Folder(folder).read("up_proj.weight"),
        lambda: [*_weights(folders.Folder(folder), None)],
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_flipped_bit_names_the_tensor(name: str, written: Path, tmp_path: Path) -> None:
    """In every tensor of a folder: codes, scales, shapes, plain weights. `inspect` reads as the command does."""
    count = 0
    for shard in sorted((written / name).glob("*.safetensors")):
        for stored in header_of(shard)[0].keys() - {"__metadata__"}:
            folder = tmp_path / f"{count}"
            shutil.copytree(written / name, folder)
            flip(folder / shard.name, stored)
            reads = readers(folder)
            if "up_proj.weight" not in stored:
                del reads[3]
            for read in reads if count < 3 else reads[2:3]:
                with pytest.raises(
                    FormatError, match=rf"{stored} is damaged: other bytes"
                ) as caught:
                    read()
                assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
            count += 1
    assert count >= 8


def without_digests(header: Header) -> None:
    for key in (digests.TEXT, digests.SEAL):
        del header["__metadata__"][key]


def renamed(header: Header) -> None:
    header["other.bias"] = header.pop("norm.bias")


CHANGES: dict[str, tuple[Callable[[Header], object], str]] = {
    "a digest": (
        lambda h: h["__metadata__"].update({digests.TEXT: h["__metadata__"][digests.TEXT] + " "}),
        "digests of its tensors are damaged",
    ),
    "a lost digest": (
        lambda h: h["__metadata__"].pop(digests.SEAL),
        "digests of its tensors are damaged",
    ),
    "lost digests": (
        lambda h: h["__metadata__"].pop(digests.TEXT),
        "digests of its tensors are damaged",
    ),
    "a name": (renamed, "written with other tensors than norm.bias, other.bias"),
    "a shape": (lambda h: h["norm.bias"].update(shape=[2, 128]), r"norm.bias is damaged: it has"),
    "a dtype": (lambda h: h["norm.bias"].update(dtype="F16"), r"it has .*float16.* saved with"),
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("name", ["lowbit", "compressed-tensors"])
def test_a_changed_header(name: str, case: str, written: Path, tmp_path: Path) -> None:
    change, why = CHANGES[case]
    shutil.copytree(written / name, tmp_path / "model")
    shards = (tmp_path / "model").glob("*.safetensors")
    with_header(next(path for path in shards if "norm.bias" in header_of(path)[0]), change)
    if case == "a name":
        (tmp_path / "model/model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=why):
        lowbit.load_pretrained(tmp_path / "model", build())


@pytest.mark.parametrize("name", WRITTEN)
def test_other_readers_find_headers_of_texts(name: str, written: Path, tmp_path: Path) -> None:
    """As programs read headers without the package; and a folder without digests, an earlier one, loads unverified."""
    shutil.copytree(written / name, tmp_path / "model")
    for path in (tmp_path / "model").glob("*.safetensors"):
        header, begin = header_of(path)
        beside = header.pop("__metadata__")
        assert beside["format"] == "pt" and all(isinstance(text, str) for text in beside.values())
        ends = sorted(entry["data_offsets"] for entry in header.values())
        assert [end for _, end in ends[:-1]] == [start for start, _ in ends[1:]]
        assert begin % 8 == 0 and begin + ends[-1][1] == path.stat().st_size
        assert {*json.loads(beside[digests.TEXT])} == {*header}
        with_header(path, without_digests)
        if "norm.bias" in header:
            flip(path, "norm.bias")
    assert len(dict(formats.tensors(tmp_path / "model"))) == 7


# ---- bytes that change while they are written ------------------------------------------------------------------------


@pytest.fixture
def trained_meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Another thread changes the parameters of a model between the hash of each piece and its writing."""
    hashed, parameters = digests.while_written, []

    def racing(t: torch.Tensor, write: Callable[[memoryview], object]) -> str:
        def changed(piece: memoryview) -> None:
            with torch.no_grad():
                for p in parameters:
                    p.view(torch.uint8).bitwise_not_()
            write(piece)

        return hashed(t, changed)

    monkeypatch.setattr(digests, "while_written", racing)
    return lambda model: parameters.extend(
        p for p in model.parameters() if type(p.data) is torch.Tensor
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_of_a_model_that_trains(
    name: str, trained_meanwhile: Callable[[Any], None], tmp_path: Path
) -> None:
    format, scheme = WRITTEN[name]
    model = low_bit(scheme)
    trained_meanwhile(model)
    lowbit.export(model, tmp_path / "out", format, lossy=True)
    lowbit.load_pretrained(tmp_path / "out", build())


def test_a_file_of_a_model_that_trains(
    trained_meanwhile: Callable[[Any], None], tmp_path: Path
) -> None:
    model = low_bit(Int4WeightOnly(64))
    trained_meanwhile(model)
    lowbit.save(model, tmp_path / "m.safetensors")
    assert len(lowbit.load(tmp_path / "m.safetensors")) == 7
