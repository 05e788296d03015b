"""What lowbit.hf refuses, each time in one line: versions, configs, and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from tests import forked
from tests.integrations.models import llama, mixtral


def imported(setup: str) -> str:
    """The last line of the error of `import lowbit.hf` after `setup`, in a process of its own."""
    done = forked.run(f"{setup}\nimport lowbit.hf", folder=Path.cwd())
    assert done.returncode != 0
    return done.stderr.strip().splitlines()[-1]


VERSION = """
from importlib import metadata
asked = metadata.version
def version(name):
    if name != "transformers":
        return asked(name)
    found = {found!r}
    if found is None:
        raise metadata.PackageNotFoundError(name)
    return found
metadata.version = version
"""


@pytest.mark.parametrize("found", [None, "4.57.1"])
def test_transformers_is_missing_or_too_old(found: str | None) -> None:
    said = imported(VERSION.format(found=found))
    what = "which is not installed" if found is None else "and 4.57.1 is installed"
    upgrade = "" if found is None else "--upgrade "
    wanted = f"lowbit.hf needs transformers >= 5.4, {what}: pip install {upgrade}'lowbit[hf]'"
    assert said == f"ImportError: {wanted}"


transformers = pytest.importorskip("transformers")

from lowbit.hf import LowbitConfig  # noqa: E402


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("int5",), {}, ValueError, "there is no scheme 'int5'; accepted: int4, int8"),
        (
            ("check_flag",),
            {"name": "signed", "value": True},
            ValueError,
            "there is no scheme 'check_flag'",
        ),
        (("int5",), {}, ValueError, "mxfp8, nvfp4, IntxWeightOnly"),
        (("int9",), {}, ValueError, r"accepted: int4, [\w, ]*$"),
        (("int3",), {}, ValueError, r"accepted: int4, .*; int3 is IntxWeightOnly\(bits=3\)$"),
        (
            ("int4",),
            {"group": 3},
            ValueError,
            r"int4\(group=3\): .* 'group'; accepted: group_size, ",
        ),
        (("nvfp4",), {"group_size": 32}, ValueError, "'group_size'; accepted: no options"),
        (("int4",), {"group_size": 0}, ValueError, r"int4\(group_size=0\): "),
        ((3,), {}, TypeError, "unknown scheme 3; accepted: a name such as 'int4'"),
        ((lb.Int8WeightOnly(),), {"group_size": 3}, TypeError, "group_size: options belong to"),
        (({"*": 4},), {}, TypeError, r"'\*': 4; accepted"),
        (({"re:(": "int4"},), {}, ValueError, r"'re:\(' is not a regular expression"),
        (({0: None},), {}, TypeError, "a pattern must be a str, got 0"),
        (("int4",), {"scales": "best"}, ValueError, "unknown scales 'best'; accepted: minmax"),
        (("Int8StaticActivationInt8Weight",), {}, ValueError, "needs a calibration"),
    ],
)
def test_refused_configs(arguments: Any, options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says) as found:
        LowbitConfig(*arguments, **options)
    assert "\n" not in str(found.value)


def test_a_config_goes_through_json() -> None:
    config = LowbitConfig(
        {"lm_head": None, "*.0.*": "int8", "*": lb.Int4WeightOnly(32)}, experts=False
    )
    again = LowbitConfig.from_dict(json.loads(config.to_json_string(use_diff=False)))
    assert again == config and list(again.patterns) == ["lm_head", "*.0.*", "*"]
    assert again != LowbitConfig("int4") and dict(config) == config.to_dict()
    assert "Int(bits=4" in repr(config)
    with pytest.raises(ValueError, match="neither schemes nor tensors"):
        LowbitConfig.from_dict({"quant_method": "lowbit"})


def read(folder: Path, config: Any = None, **options: Any) -> Any:
    given = {} if config is None else {"quantization_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given, **options)


@pytest.mark.parametrize(
    ("schemes", "says"),
    [
        ({"nothing": "int8"}, "chose no weight"),
        ({"*": None}, "nothing to convert"),
        ({"*embed_tokens": "int8", "lm_head": "int4"}, "are one tied weight, but"),
    ],
)
def test_refused_patterns(schemes: Any, says: str, tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=says) as error:
        read(tmp_path, LowbitConfig(schemes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pattern", ["lm_head", "*.embed_tokens", "*norm", "re:model\\.norm"])
@pytest.mark.parametrize("tied", [False, True])
def test_none_for_a_layer_that_stays_as_it_is(tied: bool, pattern: str, tmp_path: Path) -> None:
    llama(tie_word_embeddings=tied).save_pretrained(tmp_path)
    found = read(tmp_path, LowbitConfig({pattern: None, "*": "int8"}))
    assert len(found.hf_quantizer.report.converted) == 7


def test_a_quantized_folder_keeps_its_own_schemes(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "plain")
    found = read(tmp_path / "plain", LowbitConfig("int8"))
    found.save_pretrained(tmp_path / "low")
    with pytest.warns(UserWarning, match="The `quantization_config` from the model will be used"):
        again = read(tmp_path / "low", LowbitConfig("int4"))
    weight = again.model.layers[0].mlp.up_proj.weight
    assert weight.spec.format.bits == 8


def test_a_nan_is_refused(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj\.weight: it has 1 NaN or infinite values"):
        read(tmp_path, LowbitConfig("int8"))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    settings = json.loads(config.read_text())
    settings["intermediate_size"] = 64
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"it has the shape \(64, 96\) in the checkpoint, and the"):
        read(tmp_path, LowbitConfig("int8"))


def saved(folder: Path) -> Path:
    mixtral().save_pretrained(folder / "plain")
    read(folder / "plain", LowbitConfig("int8")).save_pretrained(folder / "low")
    return folder / "low"


def edited(folder: Path, change: Any) -> None:
    """The folder with other settings."""
    settings = json.loads((folder / "config.json").read_text())
    change(settings["quantization_config"])
    (folder / "config.json").write_text(json.dumps(settings))


WEIGHT = "model.layers.0.mlp.experts.down_proj"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edited(folder, lambda settings: settings.update(format_version=99))
    with pytest.raises(ValueError, match="format_version 99; this lowbit reads 1 to"):
        read(folder)


def test_parts_without_a_description_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edited(folder, lambda settings: settings["tensors"].pop(WEIGHT))
    with pytest.raises(ValueError, match=f"describes no tensor for {WEIGHT}"):
        read(folder)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_missing_part_is_refused(part: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{WEIGHT}.{part}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=rf"down_proj: its parts do not fit its description: .*no {part}"
    ):
        read(folder)


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(Exception, match=r"(?i)incomplete|truncated|damaged|header|metadata"):
        read(folder)


def test_disk_offload_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match='places modules on "disk"'):
        read(tmp_path, LowbitConfig("int8"), device_map=places, offload_folder=tmp_path / "off")


def test_a_model_in_training_is_not_saved(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "plain")
    found = read(tmp_path / "plain", LowbitConfig({"*.q_proj": "int8"}))
    lb.qat.prepare_(found, {"*.up_proj": lb.Int8WeightOnly()})
    with pytest.raises(ValueError, match=r"still in training; lowbit\.qat\.convert_"):
        found.save_pretrained(tmp_path / "out")
    lb.qat.convert_(found)
    found.save_pretrained(tmp_path / "out")
    assert torch.equal(read(tmp_path / "out").lm_head.weight, found.lm_head.weight)
