"""Stacks of experts: split into the matrices of published checkpoints, joined again, and gpt-oss' stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import (
    AffineTensor,
    Float8DynamicActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    IntxWeightOnly,
    LowbitTensor,
    MXFP4WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
    PerBlock,
    PerTensor,
    TableTensor,
)
from lowbit.formats import FormatError, grid
from lowbit.formats.experts import check_whole, joined, stack_of, stacked
from lowbit.formats.folder import Folder
from lowbit.formats.registry import by_name
from lowbit.schemes.scheme import Scheme
from tests.formats.codec_case import assert_same_model
from tests.formats.models import plain_folder

MXFP4 = by_name("mxfp4")
BLOCKS = Float8DynamicActivationFloat8Weight(PerBlock(128, 128))
HELD = {
    "compressed-tensors": {
        "int4": Int4WeightOnly(32),
        "int3 asymmetric": IntxWeightOnly(3, 64, "asymmetric"),
        "int8 x int8": Int8DynamicActivationInt8Weight(),
        "float8": Float8WeightOnly(),
        "float8 blocks": BLOCKS,
        "mxfp4": MXFP4WeightOnly(),
        "nvfp4": NVFP4WeightOnly(),
    },
    "gptq_v2": {"int4": Int4WeightOnly(32), "int4 asymmetric": IntxWeightOnly(4, 64, "asymmetric")},
    "awq": {"int4": Int4WeightOnly(32), "int4 asymmetric": IntxWeightOnly(4, 64, "asymmetric")},
    "fp8": {"float8 blocks": BLOCKS},
    "lowbit": {"int4": Int4WeightOnly(32), "nvfp4": NVFP4WeightOnly()},
}
CASES = [(format, name) for format, schemes in HELD.items() for name in schemes]
E, INNER, HIDDEN = 3, 128, 256


class Experts(nn.Module):
    """The parameters of transformers' experts, without their products."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, HIDDEN).to(dtype) / 10)
        self.down_proj = nn.Parameter(torch.randn(E, HIDDEN, INNER).to(dtype) / 10)


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, E, bias=False, dtype=dtype)
        self.experts = Experts(dtype)


class Config:
    """As transformers' models have it."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def to_json_string(self) -> str:
        return f'{{"model_type": "{self.model_type}"}}'


class Model(nn.Module):
    def __init__(self, model_type: str = "qwen3_moe", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = Config(model_type)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Mlp(torch.bfloat16)}) for _ in range(2))


def low_bit(scheme: Scheme, model_type: str = "qwen3_moe") -> Model:
    model = Model(model_type)
    lowbit.quantize_(model, scheme, lambda _, name: name.endswith("experts"))
    return model


@pytest.mark.filterwarnings("ignore:transformers 5.23 leaves out")
@pytest.mark.cover("values")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(("format", "name"), CASES)
def test_stacks_are_split_and_joined_to_the_bit(
    format: str, name: str, model_type: str, tmp_path: Path
) -> None:
    model, out = low_bit(HELD[format][name], model_type), tmp_path / "out"
    if format in ("gptq_v2", "awq"):  # scales of float16
        for t in model.parameters():
            if isinstance(t, LowbitTensor):
                t.scale = t.scale.half().bfloat16()
    lowbit.export(model, out, format, max_shard_size="100KB")
    assert_same_model(lowbit.load_pretrained(out, Model(model_type, seed=1)), model)
    stored = {name for name, _ in lowbit.formats.tensors(out)}
    if format == "lowbit":
        assert "layers.1.mlp.experts.down_proj" in stored
    elif model_type == "mixtral":
        assert "layers.1.block_sparse_moe.experts.2.w2.weight" in stored
        assert "layers.0.block_sparse_moe.gate.weight" in stored
    else:
        assert "layers.1.mlp.experts.2.up_proj.weight" in stored
    assert len(stored) == (6 if format == "lowbit" else 2 * (1 + 3 * E))


@pytest.mark.parametrize("format", ["lowbit", "compressed-tensors"])
def test_from_folder_to_folder(format: str, tmp_path: Path) -> None:
    """From stacks to matrices, and matrices as they are."""
    model = low_bit(Int4WeightOnly(32), "mixtral")
    lowbit.export(model, tmp_path / "one", format)
    lowbit.export(tmp_path / "one", tmp_path / "two", "compressed-tensors")
    found = lowbit.load_pretrained(tmp_path / "two", Model("mixtral", seed=1))
    assert_same_model(found, model)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_plain_stacks_stay_as_they_are(model_type: str, tmp_path: Path) -> None:
    """Beside a router, or one of the two stacks, in low bits."""
    for case, ends in (("gate", "gate"), ("down", "experts.down_proj")):
        model = Model(model_type)
        lowbit.quantize_(model, Int4WeightOnly(32), lambda _, name, ends=ends: name.endswith(ends))
        lowbit.export(model, tmp_path / case)
        found = lowbit.load_pretrained(tmp_path / case, Model(model_type, seed=1))
        assert_same_model(found, model)
        stored = {name for name, _ in lowbit.formats.tensors(tmp_path / case)}
        assert "layers.0.mlp.experts.gate_up_proj" in stored


def published_folder(path: Path) -> Model:
    """Write a model with a matrix for each part of an expert, as published checkpoints are; returns it with stacks."""
    model = Model()
    plain = nn.Module()
    for name, t in model.named_parameters():
        target: Any = plain
        *parents, last = name.split(".")
        for part in parents:
            if part not in target._modules:
                target.add_module(part, nn.Module())
            target = target._modules[part]
        if t.ndim == 2:
            target.register_parameter(last, t)
            continue
        for expert, own in enumerate(t):
            parts = own.chunk(2) if last == "gate_up_proj" else [own]
            kinds = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for kind, part in zip(kinds, parts, strict=True):
                linear = nn.Linear(part.shape[1], part.shape[0], bias=False)
                linear.weight = nn.Parameter(part.detach().clone())
                if str(expert) not in target._modules:
                    target.add_module(str(expert), nn.Module())
                target._modules[str(expert)].add_module(kind, linear)
    plain_folder(path, plain, model_type="qwen3_moe")
    return model


def test_a_folder_of_plain_matrices_is_quantized_and_joined(tmp_path: Path) -> None:
    """The router stays plain under a pattern for the layers."""
    model = published_folder(tmp_path / "plain")
    joined = lowbit.load_pretrained(tmp_path / "plain", Model(seed=1))
    assert_same_model(joined, model)
    report = lowbit.export(
        tmp_path / "plain", tmp_path / "out", scheme={"layers.*": Int4WeightOnly(32)}
    )
    assert report.left["layers.0.mlp.gate.weight"].startswith("a router")
    found = lowbit.load_pretrained(tmp_path / "out", Model(seed=1))
    assert_same_model(found, low_bit(Int4WeightOnly(32)))


@pytest.mark.parametrize("source", ["model", "folder of stacks", "folder of matrices"])
def test_nvfp4_experts_come_with_a_warning(source: str, tmp_path: Path) -> None:
    given: Any = low_bit(NVFP4WeightOnly())
    scheme = None
    if source == "folder of stacks":
        lowbit.export(given, tmp_path / "given", "lowbit")
        given = tmp_path / "given"
    elif source == "folder of matrices":
        published_folder(tmp_path / "given")
        given, scheme = tmp_path / "given", NVFP4WeightOnly()
    with pytest.warns(UserWarning, match="global scales of NVFP4 experts"):
        lowbit.export(given, tmp_path / "out", scheme=scheme)


def test_gate_and_up_with_different_global_scales_make_no_stack() -> None:
    """Each quantized by itself, as some programs do."""
    first, second = matrices(NVFP4WeightOnly())
    with pytest.raises(FormatError, match="different global_scale"):
        stack_of({(0, 0): first, (0, 1): second})
    assert stacked([first, second]).shape == (2, 64, 128)


def test_a_missing_matrix_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lowbit.export(low_bit(Int4WeightOnly(32)), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "experts.1.up_proj" not in n}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FormatError, match=r"lacks 1 of the 6 matrices of .* of expert 1"):
        lowbit.load_pretrained(tmp_path / "out", Model())


def test_any_number_of_an_expert_is_refused_at_once() -> None:
    """A name in a shard may have any number, and no list of all experts before it is made."""
    with pytest.raises(FormatError, match=r"lacks 999999999998 of the 1000000000000 .* expert 1$"):
        check_whole("mlp.experts.down_proj", {(0, 0), (10**12 - 1, 0)})


def test_two_names_of_one_matrix_are_refused(tmp_path: Path) -> None:
    """`experts.0` and `experts.00`: both would take the same place of the stack."""
    lowbit.export(low_bit(Int4WeightOnly(32)), tmp_path / "model", "compressed-tensors")
    path = tmp_path / "model/model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    first = "experts.0.up_proj."
    tensors |= {
        n.replace(first, "experts.00.up_proj."): t.clone() for n, t in tensors.items() if first in n
    }
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(FormatError, match=r"experts.0.* are one matrix of"):
        lowbit.load_pretrained(tmp_path / "model", low_bit(Int4WeightOnly(32)))
    with pytest.raises(FormatError, match=r"experts.0.* are one matrix of"):
        lowbit.export(tmp_path / "model", tmp_path / "out", "lowbit")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_two_names_of_one_plain_tensor_are_refused(tmp_path: Path) -> None:
    """The rules of a model's class may bring two stored names to one: neither is dropped in silence."""
    lowbit.export(low_bit(Int4WeightOnly(32)), tmp_path / "model", "compressed-tensors")
    folder = Folder(tmp_path / "model")
    first, second = folder.plain[:2]
    with pytest.raises(
        FormatError, match=f"{first} and {second} are one tensor of the model, one;"
    ):
        joined(folder, {"one"}, lambda name: ["one"] if name in (first, second) else [])


def test_an_unknown_model_keeps_its_stacks_and_is_refused(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(32), "of my own")
    with pytest.raises(FormatError, match="names parts after a module's `weight`"):
        lowbit.export(model, tmp_path / "out")
    lowbit.export(model, tmp_path / "own", "lowbit")
    assert_same_model(lowbit.load_pretrained(tmp_path / "own", Model("of my own", 1)), model)


@pytest.mark.parametrize("format", ["bitsandbytes-4bit", "bitsandbytes-int8", "torchao"])
def test_formats_whose_loaders_take_no_experts_refuse_them(format: str, tmp_path: Path) -> None:
    scheme = NF4WeightOnly() if "4bit" in format else Int8DynamicActivationInt8Weight()
    with pytest.raises(FormatError, match=r"names parts after a module's `weight`|holds"):
        lowbit.export(low_bit(scheme), tmp_path / "out", format)


def matrices(scheme: Scheme, count: int = 2, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return [AffineTensor.from_float(torch.randn(64, 128), scheme, **options) for _ in range(count)]


def test_matrices_that_make_no_stack() -> None:
    four = matrices(Int4WeightOnly(32))
    with pytest.raises(FormatError, match="another scheme"):
        stacked([four[0], matrices(IntxWeightOnly(3, 32))[0]])
    with pytest.raises(FormatError, match="another scheme"):
        stacked([four[0], four[1].dequantize()])
    with pytest.raises(FormatError, match="another scheme, or have another shape"):
        stacked([four[0], four[1][:32]])
    with pytest.raises(FormatError, match="static scales"):
        static = lowbit.Int8StaticActivationInt8Weight()
        stacked(matrices(static, input_qparams=(torch.ones(1), None)))
    with pytest.raises(FormatError, match="scale"):
        stacked(matrices(Float8WeightOnly(PerTensor())))


def test_scales_of_two_dtypes_take_the_wider_one() -> None:
    """A scale that bfloat16 does not represent stays float32 in the one expert that has it."""
    low = matrices(Int4WeightOnly(32))
    low[0] = low[0]._with({**low[0].inner_tensors(), "scale": low[0].scale.bfloat16()})
    found = stacked(low)
    assert found.scale.dtype is torch.float32
    for own, expert in zip(low, found, strict=True):
        assert torch.equal(own.dequantize(), expert.dequantize())


# ---- gpt-oss --------------------------------------------------------------------------------------------------------


def stack(experts: int = 3, rows: int = 10, columns: int = 64) -> TableTensor:
    """[E, K, N], as gpt-oss has its experts."""
    torch.manual_seed(0)
    values = torch.randn(experts, rows, columns, dtype=torch.bfloat16)
    return AffineTensor.from_float(values, MXFP4WeightOnly())._transposed()  # type: ignore[return-value]


WEIGHT = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize("shape", [(3, 10, 64), (1, 7, 32), (2, 64, 320)], ids=str)
def test_mxfp4_keeps_values_and_layout(shape: tuple[int, int, int]) -> None:
    w = stack(*shape)
    parts, config = MXFP4.encode(w), MXFP4.config({WEIGHT: w}, {"lm_head"})
    experts, rows, columns = shape
    assert parts["_blocks"].shape == (experts, rows, columns // 32, 16)
    assert parts["_scales"].shape == (experts, rows, columns // 32)
    stored = {MXFP4.stored_name(WEIGHT, part): t for part, t in parts.items()}
    assert stored.keys() == {f"{WEIGHT}_blocks", f"{WEIGHT}_scales"}
    found = MXFP4.find([*stored, f"{WEIGHT}_bias"], config)
    assert found.keys() == {WEIGHT} and len(found[WEIGHT]) == 2
    again = MXFP4.read(parts, config, WEIGHT, w.dtype)
    assert again.shape == w.shape
    assert torch.equal(again.dequantize(), w.dequantize())
    values = torch.tensor(w.spec.format.values)
    codes = torch.stack([parts["_blocks"] & 15, parts["_blocks"] >> 4], -1).flatten(-2)
    by_hand = values[codes.long()] * 2.0 ** (parts["_scales"].float() - 127)[..., None]
    assert torch.equal(by_hand.flatten(2).mT.bfloat16(), w.dequantize())


@pytest.mark.parametrize("outputs", [32, 7])
def test_mxfp4_of_a_stack_that_was_quantized_as_the_model_has_it(outputs: int) -> None:
    """With the values of the same weights quantized as [E, N, K]."""
    values = torch.randn(2, 64, outputs, dtype=torch.bfloat16)
    w = AffineTensor.from_float(values, grid("mxfp4", MXFP4WeightOnly()))
    turned = AffineTensor.from_float(values.mT.contiguous(), MXFP4WeightOnly())._transposed()
    own, other = MXFP4.encode(w), MXFP4.encode(turned)  # type: ignore[arg-type]
    assert own.keys() == other.keys() and all(torch.equal(own[n], other[n]) for n in own)
    again = MXFP4.read(own, {}, WEIGHT, w.dtype)
    assert torch.equal(again.dequantize(), w.dequantize())


def test_what_mxfp4_cannot_hold() -> None:
    with pytest.raises(FormatError, match=r"the model has as \[E, K, N\]"):
        MXFP4.encode(stack()._transposed())
    with pytest.raises(FormatError, match=r"formats.grid\('mxfp4', scheme\)"):
        MXFP4.encode(AffineTensor.from_float(torch.randn(2, 64, 32), MXFP4WeightOnly()))
    int4 = AffineTensor.from_float(torch.randn(2, 8, 64), Int4WeightOnly(32))._transposed()
    with pytest.raises(FormatError, match="holds E2M1"):
        MXFP4.encode(int4)
    nearest = MXFP4.nearest(int4)
    assert nearest is not None
    rounded = MXFP4.rounded(int4.dequantize(), nearest)
    assert rounded.shape == int4.shape and MXFP4.encode(rounded)
    assert MXFP4.nearest(matrices(Int4WeightOnly(32))[0]) is None
    with pytest.raises(FormatError, match="holds stacks of experts"):
        MXFP4.stored_name("layers.0.up_proj.weight", "_blocks")


BAD = {
    "no scales": (lambda p: p.pop("_scales"), "_scales"),
    "blocks": (lambda p: p.update(_blocks=p["_blocks"].flatten(2)), r"blocks are torch.uint8"),
    "dtype": (lambda p: p.update(_blocks=p["_blocks"].int()), "torch.int32"),
    "scales": (lambda p: p.update(_scales=p["_scales"][1:]), "its scales are"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_parts_of_mxfp4(case: str) -> None:
    w = stack()
    parts = MXFP4.encode(w)
    change, why = BAD[case]
    change(parts)
    with pytest.raises(FormatError, match=why):
        MXFP4.read(parts, {}, WEIGHT, w.dtype)
    with pytest.raises(FormatError, match="no _blocks beside them"):
        MXFP4.find(["a.experts.down_proj_scales"], {})
