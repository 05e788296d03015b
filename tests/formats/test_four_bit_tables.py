"""NF4, FP4, MXFP4, MXFP8 and NVFP4 through the formats that hold them: values to the bit, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

import lowbit
from lowbit import (
    AffineTensor,
    Float8DynamicActivationMXFP4Weight,
    Float8DynamicActivationNVFP4Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    MXFP4WeightOnly,
    MXFP8DynamicActivationMXFP8Weight,
    MXFP8WeightOnly,
    NF4WeightOnly,
    NVFP4WeightOnly,
)
from lowbit.formats import FormatError
from lowbit.formats.bitsandbytes_4bit import FP4, STATE
from lowbit.formats.registry import by_name
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.lookup_table import E2M1, LookupTable
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from tests.formats.codec_case import NAME, assert_same, assert_same_model, through, weight
from tests.formats.models import build, low_bit

BNB, CT, OWN = (by_name(name) for name in ("bitsandbytes-4bit", "compressed-tensors", "lowbit"))
OF_BNB = {
    "nf4": NF4WeightOnly(),
    "nf4 g32": NF4WeightOnly(32),
    "nf4 double": NF4WeightOnly(double_quantization=True),
    "fp4": Scheme(Spec(FP4, PerGroup(64))),
    "fp4 double": Scheme(Spec(FP4, PerGroup(64), scale_format="double")),
}
OF_CT = {
    "mxfp4": MXFP4WeightOnly(),
    "mxfp4 floor": MXFP4WeightOnly("symmetric"),
    "mxfp4 x int8": Scheme(MXFP4WeightOnly().weight, Int8DynamicActivationInt8Weight().activation),
    "nvfp4": NVFP4WeightOnly(),
    "mxfp4 x float8": Float8DynamicActivationMXFP4Weight(),
    "nvfp4 x float8": Float8DynamicActivationNVFP4Weight(),
}
OF_MXFP8 = {
    "mxfp8": MXFP8WeightOnly(),
    "mxfp8 floor": MXFP8WeightOnly("symmetric"),
    "mxfp8 x mxfp8": MXFP8DynamicActivationMXFP8Weight(),
}
CASES = [
    *((CT, scheme) for scheme in OF_MXFP8.values()),
    *((BNB, scheme) for scheme in OF_BNB.values()),
    *((CT, scheme) for scheme in OF_CT.values()),
    *((OWN, scheme) for scheme in (*OF_BNB.values(), *OF_CT.values())),
]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 128), (13, 192), (1, 64), (6, 64 * 300)], ids=str)
@pytest.mark.parametrize(("format", "scheme"), CASES, ids=lambda c: getattr(c, "name", None))
def test_values_are_kept_to_the_bit(format, scheme, shape, dtype) -> None:
    torch.manual_seed(0)
    values = torch.randn(*shape) * torch.logspace(-3, 1, shape[0])[:, None]
    w = AffineTensor.from_float(values.to(dtype), scheme)
    again = through(format, w)
    assert type(again) is type(w) and again.activation == w.activation
    assert_same(again, w)
    assert torch.equal(again.codes.view(torch.uint8), w.codes.view(torch.uint8))


@pytest.mark.parametrize("format", [BNB, CT], ids=lambda f: f.name)
def test_zeros_and_tiny_values(format) -> None:
    values = torch.zeros(4, 128)
    values[1] = 2.0**-120
    values[2, 3] = 1e4
    for scheme in (OF_BNB if format is BNB else OF_CT).values():
        w = AffineTensor.from_float(values, scheme)
        assert_same(through(format, w), w)


def test_the_layout_of_bitsandbytes() -> None:
    """By the formulas of the module, not by lowbit's own code."""
    w = weight(OF_BNB["nf4 double"], 8, 4096)
    parts = BNB.encode(w)
    state = json.loads(bytes(parts[STATE + "nf4"].tolist()))
    assert state["shape"] == [8, 4096] and state["dtype"] == "bfloat16"
    assert parts["weight"].shape == (8 * 4096 // 2, 1)
    codes = torch.stack([parts["weight"] >> 4, parts["weight"] & 15], 1).flatten().long()
    outer = parts["weight.nested_quant_map"][parts["weight.absmax"].long()]
    absmax = outer * parts["weight.nested_absmax"].repeat_interleave(256) + state["nested_offset"]
    values = parts["weight.quant_map"][codes] * absmax.repeat_interleave(64)
    assert torch.equal(values.view(8, 4096).bfloat16(), w.dequantize())


REFUSED = {
    "int4": (BNB, Int4WeightOnly(64), 128, "holds NF4"),
    "mxfp4 by bitsandbytes": (BNB, MXFP4WeightOnly(), 128, "holds NF4"),
    "another table": (
        BNB,
        Scheme(Spec(LookupTable(tuple(i / 8 - 1 for i in range(16))), PerGroup(64))),
        128,
        "the tables of NF4",
    ),
    "blocks of 16": (BNB, NF4WeightOnly(16), 128, "holds blocks of 32"),
    "ragged blocks": (BNB, NF4WeightOnly(64), 96, "divide the 96 inputs"),
    "nf4 by compressed-tensors": (CT, NF4WeightOnly(), 128, "holds FP4"),
    "e2m1 with float scales": (CT, Scheme(Spec(E2M1, PerGroup(16))), 128, "holds FP4"),
    "ragged groups": (CT, NVFP4WeightOnly(), 40, "not a multiple of the group size 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_hold(case: str) -> None:
    """The reason is given, and the nearest scheme is held, where there is one."""
    format, scheme, columns, why = REFUSED[case]
    w = weight(scheme, 16, columns)
    with pytest.raises(FormatError, match=why):
        format.encode(w)
    nearest = format.nearest(w)
    if nearest is not None:
        rounded = format.rounded(w.dequantize(), nearest)
        assert_same(through(format, rounded), rounded)
    assert (nearest is None) == (case == "ragged blocks")


def test_a_slice_of_doubly_quantized_rows_is_refused() -> None:
    w = weight(
        OF_BNB["nf4 double"], 64, 1088
    )  # 17 scales a row, so that one absmax serves several rows
    with pytest.raises(FormatError, match="differs within 256 scales"):
        BNB.encode(w[1:])


DAMAGED = {
    "no state": (lambda p: p.pop(STATE + "nf4"), "no quant_state"),
    "no absmax": (lambda p: p.pop("weight.absmax"), "no weight.absmax"),
    "no table": (lambda p: p.pop("weight.nested_quant_map"), "no weight.nested_quant_map"),
    "table": (lambda p: p["weight.quant_map"].mul_(2), "quant_map"),
    "state": (lambda p: p[STATE + "nf4"].fill_(7), "is not JSON"),
    "codes": (lambda p: p.update(weight=p["weight"][2:]), "bytes of codes"),
    "absmax": (lambda p: p.update({"weight.absmax": p["weight.absmax"][1:]}), "shape"),
    "nested": (lambda p: p.update({"weight.nested_absmax": torch.ones(9)}), "nested_blocksize"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_parts_of_bitsandbytes(case: str) -> None:
    w = weight(OF_BNB["nf4 double"])
    parts, config = BNB.encode(w), BNB.config({NAME: w}, ())
    change, why = DAMAGED[case]
    change(parts)
    with pytest.raises(FormatError, match=why):
        BNB.read(parts, config, NAME, w.dtype)


def test_blocks_that_cross_rows_are_refused() -> None:
    w = weight(OF_BNB["nf4"])
    parts, config = BNB.encode(w), BNB.config({NAME: w}, ())
    state = {**json.loads(bytes(parts[STATE + "nf4"].tolist())), "shape": [256, 32]}
    parts[STATE + "nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
    with pytest.raises(FormatError, match="cross the ends of its rows of 32"):
        BNB.read(parts, config, NAME, w.dtype)


def test_codes_stored_as_another_dtype() -> None:
    """bnb_4bit_quant_storage, which FSDP needs in the dtype of the other parameters."""
    w = weight(OF_BNB["nf4"])
    parts, config = BNB.encode(w), BNB.config({NAME: w}, ())
    parts["weight"] = parts["weight"].flatten().view(torch.bfloat16)[:, None]
    assert_same(BNB.read(parts, config, NAME, w.dtype), w)


def test_parts_without_a_state_are_refused() -> None:
    with pytest.raises(FormatError, match=r"quant_state\S* beside them"):
        BNB.find(["a.weight", "a.weight.absmax", "b.weight"], {})


CHANGED = {
    "missing": (lambda p: p.pop("weight_global_scale"), "has no weight_global_scale"),
    "no scale": (lambda p: p.pop("weight_scale"), "has no weight_scale"),
    "codes": (lambda p: p.update(weight_packed=p["weight_packed"].int()), "codes are torch.int32"),
    "scales": (lambda p: p.update(weight_scale=p["weight_scale"][1:]), "shape"),
    "scale dtype": (lambda p: p.update(weight_scale=p["weight_scale"].float()), "float"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_damaged_parts_of_nvfp4(case: str) -> None:
    w = weight(OF_CT["nvfp4"])
    parts, config = CT.encode(w), CT.config({NAME: w}, ())
    change, why = CHANGED[case]
    change(parts)
    with pytest.raises(FormatError, match=why):
        CT.read(parts, config, NAME, w.dtype)


def test_inputs_in_fp4_are_left_as_they_are_with_a_warning() -> None:
    w = weight(OF_CT["nvfp4"])
    parts, config = CT.encode(w), CT.config({NAME: w}, ())
    group = config["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    parts["input_global_scale"] = torch.ones(1)
    with pytest.warns(UserWarning, match="inputs of these layers to FP4"):
        again = CT.read(parts, config, NAME, w.dtype)
    assert again.activation is None
    assert_same(again, w)


@pytest.mark.parametrize(
    "groups", [{"group_size": 32}, {"strategy": "group"}, {"symmetric": False}]
)
def test_other_fp4_is_refused(groups: dict[str, object]) -> None:
    w = weight(OF_CT["nvfp4"])
    config = CT.config({NAME: w}, ())
    config["config_groups"]["group_0"]["weights"] |= groups
    with pytest.raises(FormatError, match="float of 4 bits"):
        CT.read(CT.encode(w), config, NAME, w.dtype)


@pytest.mark.parametrize(
    ("format", "scheme"),
    [("bitsandbytes-4bit", s) for s in OF_BNB.values()]
    + [("compressed-tensors", s) for s in OF_CT.values()],
)
def test_folders(format: str, scheme: Scheme, tmp_path) -> None:
    model = low_bit(scheme)
    report = lowbit.export(model, tmp_path / "out", format, max_shard_size="40KB")
    assert report.converted == ["up_proj.weight", "down_proj.weight"]
    assert_same_model(lowbit.load_pretrained(tmp_path / "out", build(seed=1)), model)
    lowbit.export(tmp_path / "out", tmp_path / "own", "lowbit")
    assert_same_model(lowbit.load_pretrained(tmp_path / "own", build(seed=1)), model)


def test_the_loss_of_another_table_is_stated(tmp_path) -> None:
    model = low_bit(Int4WeightOnly(64))
    with pytest.raises(FormatError, match="holds NF4"):
        lowbit.export(model, tmp_path / "out", "bitsandbytes-4bit")
    report = lowbit.export(model, tmp_path / "out", "bitsandbytes-4bit", lossy=True)
    assert report.snr.keys() == {"up_proj.weight", "down_proj.weight"}
    assert all(ratio > 15 for ratio in report.snr.values())
