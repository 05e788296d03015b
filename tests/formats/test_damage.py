"""Damaged, missing and misleading files, full disks, read-only folders: one line says so, nothing is half-written."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    Int8WeightOnly,
    MXFP4WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
    formats,
    quantize_,
)
from lowbit.files import digests
from lowbit.formats import FormatError
from tests.formats.models import TOKENS, build, low_bit, plain_folder

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in several shards."""
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def settings(key: str, value: object) -> Callable[[Path], None]:
    return lambda folder: change_config(
        folder, lambda config: config["quantization_config"].update({key: value})
    )


def rename_parts(folder: Path) -> None:
    """As if the shards were those of another format."""
    for path in folder.glob("*.safetensors"):
        found = safetensors.load_file(path)
        safetensors.save_file({n.replace("weight_", "q"): t for n, t in found.items()}, path)
    (folder / "model.safetensors.index.json").unlink()


def without_scales(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        found = safetensors.load_file(path)
        safetensors.save_file({n: t for n, t in found.items() if n != "up_proj.weight_scale"}, path)
    (folder / "model.safetensors.index.json").unlink()


def without_a_shard_and_the_index(folder: Path) -> None:
    """The names of the others tell how many there are."""
    (folder / "model.safetensors.index.json").unlink()
    sorted(folder.glob("*.safetensors"))[-1].unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a lost shard": (lambda f: first_shard(f).unlink(), "lacks the shard model-00001"),
    "a lost shard, no index": (without_a_shard_and_the_index, "lacks the shard model-0000"),
    "a truncated shard": (
        lambda f: os.truncate(first_shard(f), first_shard(f).stat().st_size - 9),
        "truncated, damaged or not a safetensors file",
    ),
    "a shard of text": (
        lambda f: first_shard(f).write_text("hello"),
        "truncated, damaged or not a",
    ),
    "an empty shard": (lambda f: first_shard(f).write_bytes(b""), "truncated, damaged or not a"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "half a config": (lambda f: os.truncate(f / "config.json", 40), "config.json cannot be read"),
    "a list as config": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "an index without names": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "no weight_map",
    ),
    "an index that leads elsewhere": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../../secret.safetensors"}})
        ),
        "lacks the shard ../../secret",
    ),
    "no weights": (lambda f: [p.unlink() for p in f.glob("*.safe*")], "no .*safetensors"),
    "an unknown method": (settings("quant_method", "hqq"), "'hqq' in config.json is not one"),
    "another method": (settings("quant_method", "fp8"), "config.json says fp8"),
    "other tensors": (rename_parts, "claims another format than it has"),
    "a lost part": (without_scales, "no weight_scale beside them"),
    "no groups": (settings("config_groups", 5), "config_groups is 5"),
    "other bits": (
        lambda f: change_config(
            f,
            lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(
                num_bits=8
            ),
        ),
        "codes of 8 bits take",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folders(case: str, folder: Path) -> None:
    damage, why = DAMAGE[case]
    damage(folder)
    for read in (
        lambda: lowbit.load_pretrained(folder, build()),
        lambda: lowbit.export(folder, folder.parent / "out", "lowbit"),
        lambda: dict(formats.tensors(folder)),
    ):
        with pytest.raises(FormatError, match=why) as caught:
            read()
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_a_name_of_the_index_that_no_shard_holds(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["more.weight"] = first_shard(folder).name
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"no shard holds more.weight"):
        lowbit.load_pretrained(folder, build())


def test_no_folder_and_folders_of_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/config.json").write_text("{}")
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    for name, why in [
        ("nowhere", "is not a folder"),
        ("file", "is not a folder"),
        (".", "no config.json"),
        ("pickled", "convert pytorch_model.bin to safetensors"),
    ]:
        with pytest.raises(FormatError, match=why):
            lowbit.load_pretrained(tmp_path / name, build())
    with pytest.raises(FormatError, match="`hf download owner/model --local-dir model`"):
        lowbit.load_pretrained("owner/model")
    with pytest.raises(FormatError, match=r"with config\.json$"):
        lowbit.load_pretrained("../model-that-is-not-there")


def test_parts_of_lowbit_without_a_description(tmp_path: Path) -> None:
    """What `save_pretrained` of a low-bit model leaves: nothing says which scheme it is."""
    plain_folder(tmp_path / "model", low_bit(Int4WeightOnly(64)))
    with pytest.raises(FormatError, match=r"config.json does not describe them"):
        lowbit.load_pretrained(tmp_path / "model", build())


def test_a_file_that_changes_on_its_way_to_the_disk_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The folder is read back. Here the writer itself flips a bit behind the hash."""
    hashed = digests.while_written

    def damaged(t: torch.Tensor, write: Callable[[memoryview], object]) -> str:
        def flip(piece: memoryview) -> None:
            content = bytearray(piece)
            content[3] ^= t.shape == (256,)
            write(memoryview(content))

        return hashed(t, flip)

    monkeypatch.setattr(digests, "while_written", damaged)
    with pytest.raises(FormatError, match=r"read back .*norm.weight.* are damaged.*Check the disk"):
        lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of the size of files")
@pytest.mark.parametrize("limit", [20_000, 300])
def test_no_space_left(limit: int, tmp_path: Path) -> None:
    """The system refuses to write more than so many bytes into a file."""
    import resource

    model = low_bit(Int4WeightOnly(64))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(FormatError, match="out cannot be written") as caught:
            lowbit.export(model, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "too large" in str(caught.value) and "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write")
def test_a_read_only_folder() -> None:
    with pytest.raises(FormatError, match="/proc/out cannot be written"):
        lowbit.export(low_bit(Int4WeightOnly(64)), "/proc/out")


def test_an_interrupted_export_leaves_nothing(monkeypatch, tmp_path: Path) -> None:
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(digests, "while_written", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("call", ["rename", "rmtree"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("before", [True, False], ids=["before the call", "after it"])
def test_an_interruption_while_a_folder_is_replaced_leaves_one_whole_folder(
    call: str, count: int, before: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives once, before or after a call that moves or removes a folder."""
    model, module = low_bit(Int8WeightOnly()), os if call == "rename" else shutil
    done, calls = getattr(module, call), 0

    def interrupted(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if before and calls == count:
            raise KeyboardInterrupt
        done(*args, **kwargs)
        if calls == count:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, call, interrupted)
    try:
        lowbit.export(model, folder, "lowbit", overwrite=True)
    except KeyboardInterrupt:
        assert calls >= count
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    lowbit.load_pretrained(folder, build())


BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
WRITTEN = {
    "compressed-tensors": ("compressed-tensors", Int4WeightOnly(64)),
    "nvfp4": ("compressed-tensors", NVFP4WeightOnly()),
    "mxfp4": ("compressed-tensors", MXFP4WeightOnly()),
    "fp8": ("fp8", BLOCKS),
    "gptq": ("gptq", Int4WeightOnly(64)),
    "awq": ("awq", Int4WeightOnly(64)),
    "bitsandbytes-int8": ("bitsandbytes-int8", Int8WeightOnly()),
    "bitsandbytes-4bit": ("bitsandbytes-4bit", NF4WeightOnly()),
    "torchao": ("torchao", Int8WeightOnly()),
    "lowbit": ("lowbit", Int4WeightOnly(64)),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in each format."""
    path = tmp_path_factory.mktemp("formats")
    for name, (format, scheme) in WRITTEN.items():
        model = low_bit(scheme)
        lowbit.export(model, path / name, format, lossy=True, max_shard_size="20KB")
    return path


@pytest.mark.cover("values")
@pytest.mark.parametrize("claimed", [*WRITTEN, "gpt-oss"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_that_claims_another_format(
    name: str, claimed: str, written: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(written / name, folder)
    if claimed == name:
        lowbit.load_pretrained(folder, build())
        return
    claim = {"quant_method": "mxfp4"}
    if claimed != "gpt-oss":
        claim = json.loads((written / claimed / "config.json").read_text())["quantization_config"]
    change_config(folder, lambda config: config.update(quantization_config=claim))
    with pytest.raises(FormatError) as caught:
        lowbit.load_pretrained(folder, build())
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


SKIPPED = {
    "compressed-tensors": {"config_groups": {}, "ignore": ["re:.*"]},
    "fp8": {"weight_block_size": [128, 128], "modules_to_not_convert": ["up_proj", "down_proj"]},
    "gptq": {"bits": 4, "group_size": 64, "dynamic": {"-:.*": {}}},
    "awq": {"bits": 4, "group_size": 64, "modules_to_not_convert": ["up_proj", "down_proj"]},
    "bitsandbytes": {"load_in_8bit": True, "llm_int8_skip_modules": ["up_proj", "down_proj"]},
    "mxfp4": {"modules_to_not_convert": ["up_proj", "down_proj"]},
}
CACHE = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_zero_point"),
    "fp8": ("self_attn.kv_scale", "self_attn.k_proj.k_scale"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_a_folder_whose_layers_were_all_skipped_is_plain(name: str, tmp_path: Path) -> None:
    """With the scales of a cache in some of them, which are left out and named."""
    model, settings = build(), {"quant_method": name, **SKIPPED[name]}
    scales = {f"layers.0.{own}": torch.ones(1) for own in CACHE.get(name, ("self_attn.k_scale",))}
    tensors = {**model.state_dict(), **scales}
    folder = plain_folder(tmp_path / "model", tensors, quantization_config=settings)
    with pytest.warns(UserWarning, match=f"{len(scales)} scales of a KV cache, such as layers.0"):
        found = lowbit.load_pretrained(folder, build(1))
    assert torch.equal(found(TOKENS), model(TOKENS))
    report = lowbit.export(folder, tmp_path / "out", "lowbit", scheme=Int8WeightOnly())
    assert report.converted == ["down_proj.weight", "up_proj.weight"] and len(report.notes) == 1
    assert not lowbit.export(tmp_path / "out", tmp_path / "again", "lowbit").notes


PROMISED = {
    "compressed-tensors": {"config_groups": {"g": {"targets": ["Linear"], "weights": {}}}},
    "fp8": {"weight_block_size": [128, 128]},
    "gptq": {"bits": 4, "group_size": 64, "dynamic": {"-:down": {}}},
    "awq": {"bits": 4, "group_size": 64, "modules_to_not_convert": ["down_proj"]},
    "bitsandbytes": {"load_in_8bit": True},
    "mxfp4": {},
}


@pytest.mark.parametrize("name", PROMISED)
def test_plain_layers_that_config_json_says_to_be_in_low_bits(name: str, tmp_path: Path) -> None:
    settings = {"quant_method": name, **PROMISED[name]}
    folder = plain_folder(tmp_path / "model", build(), quantization_config=settings)
    with pytest.raises(
        FormatError, match=r"another format than it has, such as for \w+_proj.weight"
    ):
        lowbit.load_pretrained(folder, build())


DAMAGED_SETTINGS = [
    {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": [5]},
    {"quant_method": "compressed-tensors", "config_groups": 5},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:("]}}},
    {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}},
    {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[5]]},
    {"quant_method": "awq", "bits": 4, "modules_to_not_convert": "up_proj"},
    {"quant_method": "fp8", "ignored_layers": 5},
    {"quant_method": "auto-round", "bits": 4, "extra_config": {"up_proj": 5}},
]


@pytest.mark.parametrize("settings", DAMAGED_SETTINGS, ids=str)
def test_damaged_settings_of_a_plain_folder(settings: dict, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model", build(), quantization_config=settings)
    with pytest.raises(FormatError) as caught:
        lowbit.load_pretrained(folder, build())
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_a_model_may_have_parameters_that_are_named_as_scales_of_a_cache(tmp_path: Path) -> None:
    model = build()
    model.self_attn = torch.nn.Module()
    model.self_attn.k_scale = torch.nn.Parameter(torch.full((3,), 2.0))
    quantize_(model, {"*_proj": Int4WeightOnly(64), "*": None})
    lowbit.export(model, tmp_path / "out")
    model.self_attn.k_scale = torch.nn.Parameter(torch.zeros(3))
    found = lowbit.load_pretrained(tmp_path / "out", copy.deepcopy(model))
    assert found.self_attn.k_scale.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_without_scales_are_no_values(
    dtype: torch.dtype, written: Path, tmp_path: Path
) -> None:
    """A weight of int8 or float8 with no scale beside it, among weights in low bits."""
    folder = tmp_path / "model"
    shutil.copytree(written / "compressed-tensors", folder)
    extra = {"lm_head.weight": torch.ones(50, 128).to(dtype)}
    for path in folder.glob("*.safetensors"):
        found = safetensors.load_file(path)
        if "lm_head.weight" in found:
            safetensors.save_file({**found, **extra}, path, {"format": "pt"})
    with pytest.raises(FormatError, match=r"lm_head.weight holds codes, and has no weight_scale"):
        lowbit.load_pretrained(folder, build())


@pytest.mark.parametrize("name", WRITTEN)
def test_codes_that_config_json_does_not_describe(name: str, written: Path, tmp_path: Path) -> None:
    """They are refused: float8 and int8 codes would be taken for values."""
    folder = tmp_path / "model"
    shutil.copytree(written / name, folder)
    change_config(folder, lambda config: config.pop("quantization_config"))
    for read in (
        lambda: lowbit.load_pretrained(folder, build()),
        lambda: lowbit.export(folder, tmp_path / "out", "lowbit", scheme=Int8WeightOnly()),
    ):
        with pytest.raises(FormatError, match=r"holds parts of .*config.json") as caught:
            read()
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_plain_weights_may_have_names_of_parts(tmp_path: Path) -> None:
    """A module with a parameter `weight_scale` beside its weight, both of floats."""
    model = build()
    model.up_proj.weight_scale = torch.nn.Parameter(torch.ones(256))
    plain_folder(tmp_path / "model", model)
    found = lowbit.load_pretrained(tmp_path / "model", copy.deepcopy(model))
    assert torch.equal(found.up_proj.weight, model.up_proj.weight)


@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "awq"])
def test_another_group_size_than_the_scales_have(
    name: str, size: int, written: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(written / name, folder)

    def change(config: dict) -> None:
        own = config["quantization_config"]
        for place in (own, *(g["weights"] for g in own.get("config_groups", {}).values())):
            place["group_size"] = size

    change_config(folder, change)
    with pytest.raises(FormatError, match=r"scale|g_idx") as caught:
        lowbit.load_pretrained(folder, build())
    assert "invalid for input" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRITTEN)
def test_lost_and_truncated_shards_of_every_format(
    name: str, written: Path, tmp_path: Path
) -> None:
    for damage, why in (DAMAGE["a lost shard"], DAMAGE["a truncated shard"]):
        folder = tmp_path / "model"
        shutil.copytree(written / name, folder)
        damage(folder)
        with pytest.raises(FormatError, match=why):
            lowbit.load_pretrained(folder, build())
        shutil.rmtree(folder)
