"""Every format holds its schemes to the bit, and refuses the others with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lowbit import (
    AffineTensor,
    Float8DynamicActivationFloat8Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8StaticActivationInt8Weight,
    IntxWeightOnly,
    PerBlock,
)
from lowbit.formats import FormatError
from lowbit.formats.registry import by_name
from lowbit.numerics.granularity import PerGroup, PerRow
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.mixed_precision import BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION, UE8M0_BLOCK_WEIGHT
from lowbit.schemes.scheme import Scheme
from tests.formats import codec_case
from tests.formats.codec_case import NAME, assert_same, through
from tests.formats.models import SCHEMES

CT, FP8, OWN = (by_name(name) for name in ("compressed-tensors", "fp8", "lowbit"))


def weight(scheme: Scheme, rows: int = 256, columns: int = 128, **options: object) -> AffineTensor:
    return codec_case.weight(scheme, rows, columns, **options)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("shape", [(256, 128), (13, 128), (1, 192)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("format", [CT, OWN], ids=lambda f: f.name)
def test_values_are_kept_to_the_bit(format, name: str, shape: tuple[int, int]) -> None:
    w = weight(SCHEMES[name], *shape)
    again = through(format, w)
    assert_same(again, w)
    assert again.activation == w.activation


@pytest.mark.parametrize("columns", [36, 33, 7])
@pytest.mark.parametrize("bits", range(1, 9))
def test_odd_sizes(bits: int, columns: int) -> None:
    """Rows of packed codes, and columns of packed zero points, end within a word."""
    w = weight(IntxWeightOnly(bits, None, "asymmetric"), 11, columns)
    assert_same(through(CT, w), w)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_of_the_model(dtype: torch.dtype) -> None:
    w = AffineTensor.from_float(torch.randn(16, 64, dtype=dtype), IntxWeightOnly(4, 32))
    assert_same(through(CT, w), w)


def test_negative_scales_and_tiny_ones() -> None:
    values = torch.randn(32, 64) * torch.logspace(-30, 3, 32)[:, None]
    w = AffineTensor.searched(values, Int4WeightOnly(32))
    assert (w.scale < 0).any()
    assert_same(through(CT, w), w)


@pytest.mark.parametrize(
    "scheme", [Int8StaticActivationInt8Weight(), Float8StaticActivationFloat8Weight()], ids=str
)
def test_static_scales_of_inputs(scheme: Scheme) -> None:
    w = weight(scheme, input_qparams=(torch.tensor([0.25]), None))
    assert CT.encode(w)["input_scale"].tolist() == [0.25]
    again = through(CT, w)
    assert again.activation == w.activation
    assert again.input_scale.tolist() == [[0.25]]
    assert_same(again, w)


def test_blocks_that_end_within_the_weight() -> None:
    """compressed-tensors holds them; transformers would read them wrongly as "fp8"."""
    w = weight(Float8DynamicActivationFloat8Weight(PerBlock(128, 128)), 200, 130)
    parts = CT.encode(w)
    assert parts["weight"].shape == (200, 130) and parts["weight_scale"].shape == (2, 2)
    assert_same(through(CT, w), w)
    with pytest.raises(FormatError, match="not a multiple of 128"):
        FP8.encode(w)


@pytest.mark.parametrize("scales", ["float32", "float8_e8m0fnu", "uint8"])
def test_scales_of_float8_blocks(scales: str) -> None:
    """Powers of two as float8_e8m0fnu, or its bytes, mean what they mean as float32."""
    w = weight(Float8DynamicActivationFloat8Weight(PerBlock(128, 128)), 256, 256)
    w.scale = torch.tensor([[0.5, 2.0], [0.25, 2.0**-20]])
    assert_same(through(FP8, w), w)
    parts, config = FP8.encode(w), FP8.config({NAME: w}, ())
    if scales != "float32":
        parts["weight_scale_inv"] = parts["weight_scale_inv"].to(torch.float8_e8m0fnu)
    if scales == "uint8":
        parts["weight_scale_inv"] = parts["weight_scale_inv"].view(torch.uint8)
    assert_same(FP8.read(parts, config, NAME, w.dtype), w)


def test_blocks_that_stay_powers_of_two() -> None:
    w = weight(Scheme(UE8M0_BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION), 256, 256)
    config = FP8.config({NAME: w}, ())
    assert (
        config["scale_fmt"] == "ue8m0" and FP8.encode(w)["weight_scale_inv"].dtype is torch.float32
    )
    again = through(FP8, w)
    assert_same(again, w)
    assert (again.spec, again.activation) == (w.spec, w.activation)
    other = weight(Float8DynamicActivationFloat8Weight(PerBlock(128, 128)), 256, 256)
    with pytest.raises(FormatError, match="powers of two, as scale_fmt says, or of none"):
        FP8.config({NAME: w, "other.weight": other}, ())
    with pytest.raises(FormatError, match="the weight was made for"):
        FP8.encode(weight(Scheme(BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION), 256, 256))


REFUSED = {
    "float zero points": (Scheme(Spec(Int(4), PerGroup(32), "float_zero_point")), "are values"),
    "ragged groups": (Int4WeightOnly(96), "not a multiple of the group size 96"),
    "e5m2": (Scheme(Spec(Float8(torch.float8_e5m2), PerRow())), "float8_e5m2"),
    "int blocks": (Scheme(Spec(Int(8), PerBlock(16, 16))), "no int weights with PerBlock"),
    "float8 groups": (Float8WeightOnly(PerGroup(32)), "no float weights with PerGroup"),
    "half-integers of 8 bits": (Scheme(Spec(Int(8), PerRow(), "half_integer")), "9 bits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_compressed_tensors_cannot_hold(case: str) -> None:
    scheme, why = REFUSED[case]
    w = weight(scheme)
    with pytest.raises(FormatError, match=why):
        CT.encode(w)
    nearest = CT.nearest(w)
    assert nearest is not None
    rounded = AffineTensor.searched(w.dequantize(), nearest)
    assert_same(through(CT, rounded), rounded)


def test_trained_half_integer_zero_points_are_refused() -> None:
    w = weight(SCHEMES["int2 half-integer"])
    w.zero_point = w.zero_point * 1.5
    with pytest.raises(FormatError, match="not half of its scales"):
        CT.encode(w)


def test_stacks_of_experts_are_refused_but_by_lowbits_own_format() -> None:
    w = AffineTensor.from_float(torch.randn(3, 16, 64), Int4WeightOnly(32))
    with pytest.raises(FormatError, match=r"matrices \[N, K\]"):
        CT.encode(w)
    assert CT.nearest(w) is None
    assert_same(through(OWN, w), w)


def test_float8_blocks_hold_nothing_else() -> None:
    for name in ("int4 g64", "float8"):
        with pytest.raises(FormatError, match="fp8 holds"):
            FP8.encode(weight(SCHEMES[name]))


def test_groups_of_a_model_with_several_schemes() -> None:
    weights = {
        "a.weight": weight(SCHEMES["int4 g64"]),
        "b.weight": weight(SCHEMES["int8 x int8"]),
        "c.weight": weight(SCHEMES["int4 g64"]),
    }
    config = CT.config(weights, {"lm_head"})
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert targets == [["a", "c"], ["b"]]
    for name, w in weights.items():
        assert_same(CT.read(CT.encode(w), config, name, w.dtype), w)


def test_layers_that_servers_merge_are_listed_by_both_names() -> None:
    """SGLang looks for `gate_up_proj` in the list of plain layers where a model's class does not say of what it is."""
    plain = {"lm_head", "0.mlp.gate_proj", "0.mlp.up_proj", "1.mlp.gate_proj", "q_proj", "k_proj"}
    config = CT.config({"a.weight": weight(SCHEMES["int4 g64"])}, plain)
    assert set(config["ignore"]) == {*plain, "0.mlp.gate_up_proj"}
    assert "qkv_proj" in CT.config({}, {*plain, "v_proj"})["ignore"]


def test_targets_are_matched_as_the_package_does() -> None:
    """Exact names before expressions, both before the class."""
    w = weight(SCHEMES["int4 g64"])
    config = CT.config({NAME: w}, ())
    group = config["config_groups"]["group_0"]
    other = {**group, "weights": {**group["weights"], "num_bits": 8}}
    parts = CT.encode(w)
    for target in ("layers.0.up_proj", "re:.*up_proj$"):
        groups = {"all": {**other, "targets": ["Linear"]}, "own": {**group, "targets": [target]}}
        assert_same(CT.read(parts, {**config, "config_groups": groups}, NAME, w.dtype), w)
    with pytest.raises(FormatError, match="among its targets"):
        CT.read(parts, {**config, "config_groups": {}}, NAME, w.dtype)
    groups = {
        "all": {**other, "targets": ["Linear"]},
        "own": {**group, "targets": ["Embedding"]},
    }
    name = "model.embed_tokens.weight"
    assert_same(CT.read(parts, {**config, "config_groups": groups}, name, w.dtype), w)


CHANGED = {
    "missing": (lambda p: p.pop("weight_shape"), "has no weight_shape"),
    "short": (lambda p: p.update(weight_packed=p["weight_packed"][:, 1:]), "words of int32"),
    "dtype": (lambda p: p.update(weight_packed=p["weight_packed"].short()), "words of int32"),
    "rows": (lambda p: p.update(weight_packed=p["weight_packed"][1:]), "codes"),
    "scale": (lambda p: p.update(weight_scale=p["weight_scale"][1:]), "shape"),
    "order": (lambda p: p.update(weight_g_idx=torch.zeros(128)), "weight_g_idx"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_damaged_parts(case: str) -> None:
    w = weight(SCHEMES["int4 g64"])
    parts, config = CT.encode(w), CT.config({NAME: w}, ())
    change, why = CHANGED[case]
    change(parts)
    with pytest.raises(FormatError, match=why):
        CT.read(parts, config, NAME, w.dtype)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_bits": 4, "type": "float"}, "float of 4 bits"),
        ({"strategy": "tensor_group"}, "not settings that lowbit represents"),
        ({"actorder": "group"}, "actorder"),
        ({"strategy": "group", "group_size": None}, "not settings that lowbit represents"),
    ],
)
def test_settings_that_lowbit_does_not_know(settings: dict[str, object], why: str) -> None:
    w = weight(SCHEMES["int4 g64"])
    config = CT.config({NAME: w}, ())
    config["config_groups"]["group_0"]["weights"] |= settings
    with pytest.raises(FormatError, match=why):
        CT.read(CT.encode(w), config, NAME, w.dtype)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ],
)
def test_folders_with_more_than_codes(settings: dict[str, object], why: str) -> None:
    w = weight(SCHEMES["int4 g64"])
    config = CT.config({NAME: w}, ())
    with pytest.raises(FormatError, match=why):
        CT.read(CT.encode(w), {**config, **settings}, NAME, w.dtype)
    config["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    with pytest.raises(FormatError, match="outputs are rounded"):
        CT.read(CT.encode(w), config, NAME, w.dtype)


def test_parts_without_a_weight_are_refused() -> None:
    config = CT.config({NAME: weight(SCHEMES["int4 g64"])}, ())
    with pytest.raises(FormatError, match="no weight_scale beside them"):
        CT.find(["a.weight_packed", "a.weight_shape"], config)


def test_the_own_format_describes_each_scheme_once() -> None:
    weights = {f"{i}.weight": weight(SCHEMES["int4 g64"]) for i in range(5)}
    config = OWN.config(weights, ())
    assert len(config["kinds"]) == 1 and len(config["tensors"]) == 5
    newer = {**config, "format_version": 99}
    with pytest.raises(FormatError, match="format_version 99"):
        OWN.find([], newer)
    with pytest.raises(FormatError, match="no shard holds its parts"):
        OWN.find([], config)
    with pytest.raises(FormatError, match=r"describes no tensor for x\.codes"):
        OWN.find([*(f"{i}.weight.codes" for i in range(5)), "x.codes"], config)


def test_asymmetric_inputs() -> None:
    """A spec of the activation with zero points is written as asymmetric."""
    scheme = SCHEMES["int8 x int8"]
    asymmetric = replace(scheme.activation, mapping="asymmetric")
    w = weight(Scheme(scheme.weight, asymmetric))
    assert through(CT, w).activation == asymmetric


def test_dynamic_inputs_of_another_symmetric_scale() -> None:
    """The file says "symmetric" alone, and readers choose the scale that does not clip."""
    scheme = SCHEMES["int8 x int8"]
    clipping = Scheme(scheme.weight, replace(scheme.activation, mapping="symmetric"))
    w = weight(clipping)
    with pytest.raises(FormatError, match="inputs have mapping 'symmetric'"):
        CT.encode(w)
    nearest = CT.nearest(w)
    assert nearest is not None and nearest.activation == scheme.activation
