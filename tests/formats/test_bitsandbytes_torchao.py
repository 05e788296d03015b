"""bitsandbytes' int8 and torchao's safetensors: values to the bit, the layout, and what they cannot hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit import (
    AffineTensor,
    Float8DynamicActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    IntxWeightOnly,
    PerBlock,
    PerTensor,
)
from lowbit.formats import FormatError
from lowbit.formats.registry import by_name
from lowbit.numerics.granularity import PerGroup, PerToken
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from tests.formats.codec_case import NAME, assert_same, through, weight
from tests.formats.models import TOKENS, build, low_bit

BNB, AO = by_name("bitsandbytes-int8"), by_name("torchao")
ROWS = {"int8": Int8WeightOnly(), "int8 x int8": Int8DynamicActivationInt8Weight()}
HELD_BY_AO = {
    **ROWS,
    "int8 g32": Int8WeightOnly(32),
    "int4 g64": Int4WeightOnly(64),
    "int4 x int8": Scheme(Int4WeightOnly(32).weight, Spec(Int(8), PerToken(), "asymmetric")),
    "uint4": Scheme(Spec(Int(4, signed=False), PerGroup(32), "asymmetric")),
    **{f"int{b} asymmetric": IntxWeightOnly(b, 32, "asymmetric") for b in range(1, 9)},
    "float8": Float8WeightOnly(),
    "float8 tensor": Float8WeightOnly(PerTensor()),
    "float8 blocks": Float8WeightOnly(PerBlock(32, 64)),
}


@pytest.mark.parametrize("shape", [(64, 128), (13, 64)], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_bitsandbytes_keeps_values(name: str, shape: tuple[int, int]) -> None:
    w = weight(ROWS[name], *shape)
    again = through(BNB, w)
    assert_same(again, w)
    assert torch.equal(again.scale, w.scale) and torch.equal(again.codes, w.codes)
    assert again.activation == w.activation


def test_bitsandbytes_by_its_formula() -> None:
    w = weight(Int8WeightOnly(), 16, 64)
    parts = BNB.encode(w)
    assert parts["SCB"].shape == (16,) and parts["SCB"].dtype is torch.float32
    values = parts["weight"] * parts["SCB"][:, None] * 7.874015718698502e-3
    assert torch.equal(values.bfloat16(), w.dequantize())


def test_scales_of_bfloat16_keep_every_code() -> None:
    """All codes of all scales of bfloat16 between 1 and 2, as the package computes them."""
    scale = (torch.arange(128) / 128 + 1).bfloat16()[:, None]
    codes = torch.arange(-128, 128).to(torch.int8).expand(128, 256).contiguous()
    w = AffineTensor(codes, scale, None, Int8WeightOnly().weight, (128, 256), torch.bfloat16)
    assert_same(through(BNB, w), w)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_one_bit_whose_zero_points_are_all_zero(sign: float) -> None:
    w = AffineTensor.from_float(sign * torch.rand(8, 64), IntxWeightOnly(1, 32, "asymmetric"))
    assert_same(through(AO, w), w)


REFUSED = {
    "groups": (BNB, Int8WeightOnly(32), "symmetric rows of 8 bits"),
    "4 bits": (BNB, IntxWeightOnly(4), "symmetric rows of 8 bits"),
    "zero points": (BNB, IntxWeightOnly(8, None, "asymmetric"), "symmetric rows"),
    "inputs": (BNB, Int8DynamicActivationInt4Weight(32), "symmetric rows"),
    "float8": (BNB, Float8WeightOnly(), "holds integers"),
    "float8 inputs": (AO, Float8DynamicActivationFloat8Weight(), "weight-only"),
    "symmetric inputs": (AO, Int8DynamicActivationInt4Weight(32), "rounds the inputs"),
    "float zero points": (AO, Scheme(Spec(Int(4), PerGroup(32), "float_zero_point")), "values"),
    "ragged blocks": (AO, Float8WeightOnly(PerBlock(48, 48)), "whole blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_they_cannot_hold(case: str) -> None:
    format, scheme, why = REFUSED[case]
    w = weight(scheme)
    with pytest.raises(FormatError, match=why):
        format.encode(w)
    nearest = format.nearest(w)
    assert nearest is not None
    rounded = format.rounded(w.dequantize(), nearest)
    assert_same(through(format, rounded), rounded)


def test_float32_scales_need_rounding() -> None:
    w = AffineTensor.from_float(torch.randn(64, 64), Int8WeightOnly())
    with pytest.raises(FormatError, match="multiples of 1/127"):
        BNB.encode(w)
    rounded = BNB.rounded(w.dequantize(), BNB.nearest(w))
    assert_same(through(BNB, rounded), rounded)


def test_one_threshold_for_a_model() -> None:
    weights = {f"{i}.weight": weight(scheme) for i, scheme in enumerate(ROWS.values())}
    with pytest.raises(FormatError, match="one threshold"):
        BNB.config(weights, ())
    assert BNB.config({"a.weight": weights["0.weight"]}, ())["llm_int8_threshold"] == 6.0


@pytest.mark.parametrize("shape", [(64, 128), (96, 64)], ids=str)
@pytest.mark.parametrize("name", HELD_BY_AO)
def test_torchao_keeps_values(name: str, shape: tuple[int, int]) -> None:
    w = weight(HELD_BY_AO[name], *shape)
    again = through(AO, w)
    assert_same(again, w)
    assert again.activation == w.activation


def test_torchao_describes_each_weight() -> None:
    w = weight(Int4WeightOnly(64))
    text = AO.metadata({NAME: w}, ["lm_head.weight"])
    assert json.loads(text["tensor_names"]) == [NAME, "lm_head.weight"]
    assert json.loads(text["lm_head.weight"]) == {"_type": "Tensor"}
    assert json.loads(text[NAME]) == {
        "_type": "IntxUnpackedToInt8Tensor",
        "_data": {
            "target_dtype": {"_type": "torch.dtype", "_data": "int4"},
            "block_size": [1, 64],
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
            "activation_quantization": None,
        },
        "_tensor_data_names": ["qdata", "scale", "zero_point"],
    }
    with pytest.raises(FormatError, match="one configuration"):
        AO.config({"a.weight": w, "b.weight": weight(Float8WeightOnly())}, ())


CHANGED = {
    "no description": (lambda d, p: d.clear(), "no shard describes it"),
    "scale": (lambda d, p: p.pop("_weight_scale"), "no _weight_scale"),
    "blocks": (lambda d, p: d[NAME].update(block_size=[2, 64]), "rows or groups"),
    "ragged": (lambda d, p: d[NAME].update(block_size=[1, 48]), "scales are|multiple"),
    "class": (lambda d, p: d[NAME].update(_type="Int4Tensor"), "it is a Int4Tensor"),
    "inputs": (lambda d, p: d[NAME].update(activation_quantization="float8"), "inputs float8"),
    "zeros": (lambda d, p: p.update(_weight_zero_point=torch.ones(64, 2)), "zero points are"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_damaged_torchao(case: str) -> None:
    w = weight(Int4WeightOnly(64))
    parts = AO.encode(w)
    config = AO.settings(AO.config({NAME: w}, ()), AO.metadata({NAME: w}, ()))
    change, why = CHANGED[case]
    change(config["tensors"], parts)
    with pytest.raises(FormatError, match=why):
        AO.read(parts, config, NAME, w.dtype)


def test_damaged_bitsandbytes() -> None:
    w = weight(Int8WeightOnly())
    config = BNB.config({NAME: w}, ())
    for change, why in (
        ({"weight": torch.zeros(64, 128)}, "accepted: int8"),
        ({"SCB": torch.ones(3)}, "3 values for 64 rows"),
        ({"weight_format": torch.tensor(1)}, "row-major"),
    ):
        with pytest.raises(FormatError, match=why):
            BNB.read({**BNB.encode(w), **change}, config, NAME, w.dtype)


@pytest.mark.parametrize("format", ["bitsandbytes-int8", "torchao"])
@pytest.mark.parametrize("name", ROWS)
def test_folders(format: str, name: str, tmp_path: Path) -> None:
    model = low_bit(ROWS[name])
    lowbit.export(model, tmp_path / "out", format, max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    other = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(other(TOKENS), model(TOKENS))
