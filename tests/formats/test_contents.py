"""Contents of shards, indices and config.json that contradict each other are refused; none is read as other values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import (
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8StaticActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    PerBlock,
    formats,
)
from lowbit.files.memory import is_short_memory
from lowbit.formats import FormatError
from lowbit.formats.base import damage_of
from lowbit.formats.experts import stack_of
from lowbit.formats.registry import by_name
from lowbit.schemes.scheme import Scheme
from tests.formats.codec_case import NAME, weight
from tests.formats.models import build, low_bit, plain_folder

safetensors = pytest.importorskip("safetensors.torch")

BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def group(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["config_groups"]["group_0"]
    return found


def described(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["tensors"][NAME]
    return found


INTS = IntxWeightOnly(4, 32, "asymmetric")
CASES: dict[str, tuple[str, Scheme, Change]] = {
    "a shape of one size": (
        "compressed-tensors",
        INTS,
        lambda parts, c: parts.update(weight_shape=torch.tensor([64])),
    ),
    "a negative shape": (
        "compressed-tensors",
        INTS,
        lambda parts, c: parts.update(weight_shape=torch.tensor([-64, -128])),
    ),
    "a shape of more rows": (
        "compressed-tensors",
        INTS,
        lambda parts, c: parts.update(weight_shape=torch.tensor([65, 128])),
    ),
    "targets that are numbers": (
        "compressed-tensors",
        INTS,
        lambda parts, c: group(c).update(targets=[5]),
    ),
    "no regular expression": (
        "compressed-tensors",
        INTS,
        lambda parts, c: group(c).update(targets=["re:("]),
    ),
    "zero points above 127": (
        "compressed-tensors",
        IntxWeightOnly(8, 32, "asymmetric"),
        lambda parts, c: parts.update(weight_zero_point=torch.full((64, 4), 300)),
    ),
    "zero points that are floats": (
        "compressed-tensors",
        IntxWeightOnly(8, 32, "asymmetric"),
        lambda parts, c: parts.update(weight_zero_point=torch.full((64, 4), 0.5)),
    ),
    "symmetric weights with zero points": (
        "compressed-tensors",
        Int8DynamicActivationInt8Weight(),
        lambda parts, c: parts.update(weight_zero_point=torch.full((64, 1), 3, dtype=torch.int8)),
    ),
    "symmetric packed weights with zero points": (
        "compressed-tensors",
        Int4WeightOnly(32),
        lambda parts, c: parts.update(weight_zero_point=torch.zeros(8, 4, dtype=torch.int32)),
    ),
    "symmetric inputs with zero points": (
        "compressed-tensors",
        Int8DynamicActivationInt8Weight(),
        lambda parts, c: (
            group(c)["input_activations"].update(dynamic=False, strategy="tensor"),
            parts.update(input_scale=torch.ones(1), input_zero_point=torch.ones(1).char()),
        ),
    ),
    "scales that are integers, gptq": (
        "gptq",
        Int4WeightOnly(32),
        lambda parts, c: parts.update(scales=torch.ones(4, 64, dtype=torch.int32)),
    ),
    "scales that are integers, awq": (
        "awq",
        INTS,
        lambda parts, c: parts.update(scales=torch.ones(4, 64, dtype=torch.int32)),
    ),
    "scales that are integers, fp8": (
        "fp8",
        BLOCKS,
        lambda parts, c: parts.update(weight_scale_inv=torch.ones(1, 1, dtype=torch.int8)),
    ),
    "numbers that multiply the inputs, torchao": (
        "torchao",
        Int8WeightOnly(),
        lambda parts, c: parts.update(_weight_act_pre_scale=torch.ones(128)),
    ),
    "static scales of inputs, torchao": (
        "torchao",
        Int8DynamicActivationInt8Weight(),
        lambda parts, c: parts.update(_weight_act_quant_scale=torch.ones(1)),
    ),
    "codes above the bits, torchao": (
        "torchao",
        INTS,
        lambda parts, c: parts["_weight_qdata"][0].fill_(8),
    ),
    "zero points above the bits, torchao": (
        "torchao",
        INTS,
        lambda parts, c: parts["_weight_zero_point"][0].fill_(-9),
    ),
    "twelve bits": ("torchao", INTS, lambda parts, c: described(c).update(target_dtype="int12")),
    "no bits": ("torchao", INTS, lambda parts, c: described(c).update(target_dtype="int")),
    "inputs that are a number": (
        "torchao",
        Int8WeightOnly(),
        lambda parts, c: described(c).update(act_quant_kwargs=5),
    ),
    "no regular expression, gptq": (
        "gptq_v2",
        INTS,
        lambda parts, c: c.update(dynamic={"+:(": {"bits": 8}}),
    ),
    "blocks of 0": ("fp8", BLOCKS, lambda parts, c: c.update(weight_block_size=[0, 0])),
    "blocks of text": ("fp8", BLOCKS, lambda parts, c: c.update(weight_block_size=["a", "b"])),
    "a kind from the end": ("lowbit", INTS, lambda parts, c: described(c).update(kind=-1)),
    "an entry that is a number": ("lowbit", INTS, lambda parts, c: c["tensors"].update({NAME: 5})),
    "an entry of a negative shape": (
        "lowbit",
        INTS,
        lambda parts, c: described(c).update(shape=[-64, -128]),
    ),
}


def changed(case: str) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """The format of a case, and parts and settings that do not fit each other."""
    name, scheme, change = CASES[case]
    format, given = by_name(name), weight(scheme, 128 if name == "fp8" else 64)
    parts = {part: t.clone() for part, t in format.encode(given).items()}
    config = format.config({NAME: given}, ())
    read = dict(format.settings(config, format.metadata({NAME: given}, ())))
    change(parts, read)
    return name, parts, read


@pytest.mark.parametrize("case", CASES)
def test_contents_that_contradict_each_other_are_refused(case: str) -> None:
    name, parts, config = changed(case)
    with pytest.raises(FormatError), damage_of(NAME):
        by_name(name).read(parts, config, NAME, None)


@pytest.mark.parametrize("case", ["no regular expression", "blocks of 0", "a shape of one size"])
def test_the_error_names_the_folder(case: str, tmp_path: Path) -> None:
    """On one line, also where Python found the fault."""
    name, parts, config = changed(case)
    path = tmp_path / "model"
    path.mkdir()
    stored = {by_name(name).stored_name(NAME, part): t for part, t in parts.items()}
    safetensors.save_file(stored, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(FormatError) as caught:
        dict(formats.tensors(path))
    assert str(caught.value).startswith(f"{path}: {NAME}: ") and "\n" not in str(caught.value)


SHORT = [
    MemoryError("no memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
]


@pytest.mark.parametrize("error", SHORT, ids=lambda e: type(e).__name__)
def test_short_memory_is_not_damage(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*args: Any) -> Any:
        raise error

    given, own = weight(INTS), by_name("lowbit")
    described = own.settings(own.config({NAME: given}, ()), own.metadata({NAME: given}, ()))
    parts = own.encode(given)
    for module, function in ((torch, "cat"), (lowbit.AffineTensor, "from_inner")):
        monkeypatch.setattr(module, function, short)
    for read in (
        short,
        lambda: own.read(parts, described, NAME, None),
        lambda: stack_of({(0, 0): torch.ones(1, 2), (0, 1): torch.ones(1, 2)}),
    ):
        with pytest.raises(type(error), match=str(error)[:9].replace("[", r"\[")), damage_of(NAME):
            read()


def test_the_allocator_names_short_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_short_memory(caught.value) and not is_short_memory(RuntimeError("a shape"))


def test_codes_above_their_bits_are_refused() -> None:
    """They were packed without their upper bits, as other weights."""
    format, given = by_name("compressed-tensors"), weight(Int8DynamicActivationInt8Weight())
    parts, config = format.encode(given), format.config({NAME: given}, ())
    format.read(parts, config, NAME, None)
    group(config)["weights"]["num_bits"] = 4
    with pytest.raises(FormatError, match=r"its codes are .* accepted with 4 bits: -8 to 7"):
        format.read(parts, config, NAME, None)


@pytest.mark.parametrize("shape", [(2,), (0,)])
def test_a_static_scale_is_one_number(shape: tuple[int, ...]) -> None:
    format = by_name("compressed-tensors")
    scale = torch.tensor([[0.5]])
    given = weight(Int8StaticActivationInt8Weight(), input_qparams=(scale, None))
    parts, config = format.encode(given), format.config({NAME: given}, ())
    format.read(parts, config, NAME, None)
    with pytest.raises(FormatError, match="its input_scale has the shape"):
        format.read({**parts, "input_scale": torch.ones(shape)}, config, NAME, None)
    del parts["input_scale"]
    with pytest.raises(FormatError, match="input_scale"):
        format.read(parts, config, NAME, None)


# ---- which shard a tensor is read from -------------------------------------------------------------------------------


def copy_of_norm(folder: Path, file: str) -> None:
    """Another shard that also has `norm.weight`, with other values."""
    safetensors.save_file({"norm.weight": torch.full((256,), 7.0)}, folder / file, {"format": "pt"})


def test_the_index_decides_where_a_tensor_is_read(tmp_path: Path) -> None:
    """Two shards that it names have one tensor: only one of them is that of the model."""
    model = build()
    folder = plain_folder(tmp_path / "model", model)
    copy_of_norm(folder, "zz.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["more.weight"] = "zz.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"no shard holds more.weight of the index"):
        dict(formats.tensors(folder))
    both = {"norm.weight": torch.full((256,), 7.0), "more.weight": torch.ones(2)}
    safetensors.save_file(both, folder / "zz.safetensors", {"format": "pt"})
    found = dict(formats.tensors(folder))
    assert torch.equal(found["norm.weight"], model.norm.weight) and len(found["more.weight"]) == 2
    index["weight_map"]["up_proj.bias"] = "zz.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"no shard holds up_proj.bias .* where the index says"):
        dict(formats.tensors(folder))


def test_a_tensor_in_two_shards_without_an_index_is_refused(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model", build())
    copy_of_norm(folder, "zz.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match=r"norm.weight is in model-0.* and in zz.safetensors"):
        lowbit.load_pretrained(folder, build())


def test_the_index_of_a_variant_does_not_come_along(tmp_path: Path) -> None:
    """`save_pretrained(variant="fp16")` writes one; its shards have other names than the new ones."""
    folder = plain_folder(tmp_path / "model", build())
    index = folder / "model.safetensors.index.json"
    index.rename(folder / "model.safetensors.index.fp16.json")
    for shard in sorted(folder.glob("*.safetensors")):
        shard.rename(folder / shard.name.replace("model-", "model.fp16-"))
    lowbit.export(folder, tmp_path / "out", "lowbit", scheme=lowbit.Int8WeightOnly())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}


def test_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    """transformers reads model.safetensors, and others what the index names."""
    folder = plain_folder(tmp_path / "model", build())
    safetensors.save_file(build(1).state_dict(), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match="that names other shards; keep those of one model"):
        lowbit.load_pretrained(folder, build())


@pytest.mark.parametrize("value", [5, "int8", ["int8"]])
def test_settings_of_another_type_are_refused(value: object, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "model", build(), quantization_config=value)
    with pytest.raises(FormatError, match=r"quantization_config of config.json is"):
        lowbit.load_pretrained(folder, build())


def test_settings_at_two_places_do_not_reach_the_export(tmp_path: Path) -> None:
    """Those of the language model would describe the old weights in the new folder."""
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {"quantization_config": config["quantization_config"]}
    path.write_text(json.dumps(config))
    lowbit.export(tmp_path / "model", tmp_path / "out", "lowbit")
    made = json.loads((tmp_path / "out/config.json").read_text())
    assert made["text_config"] == {}
    assert made["quantization_config"]["quant_method"] == "lowbit"


# ---- models that config.json names -----------------------------------------------------------------------------------


class Parent:
    """Stands for PreTrainedModel, whose own `config_class` is None."""

    config_class: Any = None


class Broken(Parent):
    """A model whose settings break it."""

    config_class = SimpleNamespace(from_dict=lambda config: config)

    def __init__(self, config: dict[str, Any]) -> None:
        torch.empty(config["size"])


@pytest.mark.parametrize("name", ["Parent", "Broken"])
def test_a_model_that_transformers_cannot_build(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, whatever transformers raises."""
    own: Any = ModuleType("transformers")
    own.__version__, own.PreTrainedModel, own.Parent, own.Broken = "5", Parent, Parent, Broken
    monkeypatch.setitem(sys.modules, "transformers", own)
    folder = plain_folder(tmp_path / "model", build(), architectures=[name], size=-1)
    with pytest.raises(FormatError, match=f"cannot build the {name} of config.json") as caught:
        lowbit.load_pretrained(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
