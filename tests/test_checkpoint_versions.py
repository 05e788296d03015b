"""Format versions: files of every old one load forever, newer ones are refused, migrations run in order."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit import checkpoint
from lowbit.checkpoint import FORMAT_VERSION, CheckpointError
from lowbit.files import container
from tests.data.write_presets import SCHEMES

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
    assert state["int4.weight"].spec == lb.Int4WeightOnly(8, "symmetric").weight
    assert state["qat"].scheme == lb.Int8DynamicActivationInt4Weight(8, "symmetric")
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
    _, info, _ = container.read(path, "cpu")
    assert f"_v{info['format_version']}." in path.name


# ---- presets whose default has changed since ------------------------------------------------------------------

PRESETS = lb.load(DATA / "presets_symmetric.safetensors")
OLD = sorted(n for n in PRESETS if not n.startswith("expected."))
every_old = pytest.mark.parametrize("name", OLD)


def spec_of(weight: Any) -> lb.Spec:
    return weight.scheme.weight if isinstance(weight, lb.FakeQuantizedTensor) else weight.spec


def todays(name: str) -> nn.Linear:
    """A layer for the weight of this name, prepared or quantized by the present form of its preset."""
    preset, dtype = name.removeprefix("qat.").split(".")
    layer = nn.Linear(32, 4, bias=False, dtype=getattr(torch, dtype))
    flow = lb.qat.prepare_ if name.startswith("qat.") else lb.quantize_
    flow(layer, SCHEMES[preset])
    return layer


def test_the_presets_have_another_mapping_today() -> None:
    assert len(OLD) == 24
    for name in OLD:
        assert spec_of(PRESETS[name]).mapping == "symmetric"
        assert spec_of(todays(name).weight).mapping == "symmetric_no_clipping_err"


@every_old
def test_weights_of_an_old_preset_load_as_they_were(name: str) -> None:
    weight, expected = PRESETS[name], PRESETS[f"expected.{name}"]
    assert torch.equal(weight.dequantize().float(), expected)
    preset = SCHEMES[name.removeprefix("qat.").split(".")[0]]
    assert dataclasses.replace(spec_of(weight), mapping=preset.weight.mapping) == preset.weight


@every_old
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_layer_that_loads_an_old_weight_keeps_its_mapping(name: str, assign: bool) -> None:
    layer, old = todays(name), PRESETS[name]
    parameter = layer.weight
    layer.load_state_dict({"weight": old}, assign=assign)
    assert (layer.weight is parameter) != assign
    assert spec_of(layer.weight) == spec_of(old)
    assert torch.equal(layer.weight.dequantize().float(), PRESETS[f"expected.{name}"])
    x = torch.randn(3, 32, dtype=old.dtype)
    assert torch.equal(layer(x), F.linear(x, old))
    if not name.startswith("qat."):
        return
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).float().square().sum().backward()
    optimizer.step()
    trained = layer.weight.weight.detach().clone()
    lb.qat.convert_(layer)
    expected = lb.AffineTensor.from_float(trained, old.scheme)
    assert layer.weight.spec == spec_of(old) == expected.spec
    assert torch.equal(layer.weight.codes, expected.codes)
    assert torch.equal(layer.weight.scale, expected.scale)


def test_a_view_of_a_qat_weight_takes_no_other_mapping() -> None:
    """The parameter would silently keep its own."""
    layer = todays("qat.int8.float32")
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"stored differently.*the other's scheme"):
        layer.weight.detach().copy_(PRESETS["qat.int8.float32"])
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("mapping", ["asymmetric", "float_zero_point"])
def test_a_mapping_with_other_codes_is_refused(mapping: Any) -> None:
    layer = nn.Linear(32, 4, bias=False)
    lb.quantize_(layer, lb.IntxWeightOnly(8, mapping=mapping))
    before = layer.weight.dequantize()
    with pytest.raises(RuntimeError, match="stored differently"):
        layer.load_state_dict({"weight": PRESETS["int8.float32"]})
    assert torch.equal(layer.weight.dequantize(), before)


# ---- versions -------------------------------------------------------------------------------------------------


def rewrite(path: Path, change: Any) -> None:
    """Let `change` edit the JSON of a checkpoint, whose digests are then those of the change."""
    tensors, info, _ = container.read(path, "cpu")
    change(info)
    container.write(path, tensors, info)


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
    """Simulates two more versions: one renames a section and a part, the next renames a kind."""
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
