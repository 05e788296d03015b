"""GPTQ and AWQ: values to the bit, the layout by its formula, and what they cannot hold."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import (
    AffineTensor,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8WeightOnly,
    IntxWeightOnly,
)
from lowbit.formats import FormatError
from lowbit.formats.awq import WRITTEN
from lowbit.formats.registry import by_name
from lowbit.numerics.granularity import PerGroup, PerRow, PerTensor
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.ordered_tensor import OrderedTensor
from tests.formats.codec_case import NAME, assert_same, through, weight
from tests.formats.models import TOKENS, build, low_bit

V1, V2, AWQ = (by_name(name) for name in ("gptq", "gptq_v2", "awq"))
SYMMETRIC = {
    "int4 g64": Int4WeightOnly(64),
    "int4 rows": IntxWeightOnly(4),
    "int4 tensor": Scheme(Spec(Int(4), PerTensor())),
    "int3 half-integer": Scheme(Spec(Int(3), PerGroup(32), "half_integer")),
}
WIDTHS = {
    **{f"int{b} g32": IntxWeightOnly(b, 32, "symmetric") for b in (2, 3, 8)},
    "int8": Int8WeightOnly(),
}
ZERO_POINTS = {
    "int4 asymmetric": IntxWeightOnly(4, 32, "asymmetric"),
    "uint4": Scheme(Spec(Int(4, signed=False), PerGroup(32), "asymmetric")),
    "int4 asymmetric rows": IntxWeightOnly(4, None, "asymmetric"),
}
WIDE_ZERO_POINTS = {f"int{b} zero": IntxWeightOnly(b, 32, "asymmetric") for b in (2, 3, 8)}
HELD = [
    *((V1, name) for name in {**SYMMETRIC, **WIDTHS}),
    *((V2, name) for name in {**SYMMETRIC, **WIDTHS, **ZERO_POINTS, **WIDE_ZERO_POINTS}),
    *((AWQ, name) for name in {**SYMMETRIC, **ZERO_POINTS}),
]
SCHEMES = {**SYMMETRIC, **WIDTHS, **ZERO_POINTS, **WIDE_ZERO_POINTS}


@pytest.mark.parametrize("shape", [(64, 128), (32, 192)], ids=str)
@pytest.mark.parametrize(("format", "name"), HELD, ids=lambda v: getattr(v, "name", v))
def test_values_are_kept_to_the_bit(format, name: str, shape: tuple[int, int]) -> None:
    w = weight(SCHEMES[name], *shape)
    assert_same(through(format, w), w)


@pytest.mark.parametrize("format", [V1, V2, AWQ], ids=lambda f: f.name)
def test_inner_tensors_are_kept_too(format) -> None:
    w = weight(Int4WeightOnly(64))
    again = through(format, w)
    assert again.spec.same_values(w.spec)
    for name, t in w.inner_tensors().items():
        assert torch.equal(again.inner_tensors()[name], t), name


def test_zero_points_of_v1_that_stay_above_zero() -> None:
    w = weight(ZERO_POINTS["int4 asymmetric"])
    w.zero_point = w.zero_point.clamp(min=-7)
    assert_same(through(V1, w), w)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_by_its_formula(bits: int) -> None:
    w = weight(IntxWeightOnly(bits, 32, "asymmetric"), 32, 64)
    parts = V2.encode(w)
    q = _codes(parts["qweight"].T, bits)  # [N, K]
    z = _codes(parts["qzeros"], bits)  # [G, N]
    index = parts["g_idx"].long()
    assert index.tolist() == [k // 32 for k in range(64)]
    values = (q - z.T[:, index]) * parts["scales"].T[:, index].float()
    assert torch.equal(values.bfloat16(), w.dequantize())


def _codes(words: Tensor, bits: int) -> Tensor:
    """Code i of a row: bits i·b … of its words, the lowest first. One bit after another, as slow as it is plain."""
    streams = words.long() & 0xFFFFFFFF
    bit = (streams[..., None] >> torch.arange(32)) & 1
    return (bit.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)


def test_v1_stores_one_less() -> None:
    w = weight(Int4WeightOnly(64))
    assert (V1.encode(w)["qzeros"] == 0x77777777).all()
    assert (V2.encode(w)["qzeros"] == 0x88888888 - 2**32).all()


def test_awq_by_its_formula() -> None:
    w = weight(ZERO_POINTS["int4 asymmetric"], 16, 64)
    parts = AWQ.encode(w)
    for word in range(2):
        for i, output in enumerate(WRITTEN):
            q = (parts["qweight"][:, word] >> (4 * i)) & 15
            z = ((parts["qzeros"][:, word] >> (4 * i)) & 15).repeat_interleave(32)
            s = parts["scales"][:, 8 * word + output].repeat_interleave(32).float()
            assert torch.equal(((q - z) * s).bfloat16(), w.dequantize()[8 * word + output])


REFUSED = {
    "a zero point of 0": (V1, IntxWeightOnly(4, 32, "asymmetric"), "format='gptq_v2'"),
    "5 bits": (V2, IntxWeightOnly(5), "bits, got 5"),
    "8 bits": (AWQ, Int8WeightOnly(), "4 bits, got 8"),
    "inputs": (V2, Int8DynamicActivationInt4Weight(32), "rounds no inputs"),
    "inputs of awq": (AWQ, Int8DynamicActivationInt4Weight(32), "rounds no inputs"),
    "float8": (V2, Float8WeightOnly(), "holds integers"),
    "float zero points": (AWQ, Scheme(Spec(Int(4), PerGroup(32), "float_zero_point")), "values"),
    "ragged groups": (AWQ, Int4WeightOnly(96), "not a multiple of the group size 96"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_they_cannot_hold(case: str) -> None:
    format, scheme, why = REFUSED[case]
    w = weight(scheme)
    if "zero point of 0" in case:
        w.zero_point[3, 2] = -8
    with pytest.raises(FormatError, match=why):
        format.encode(w)
    nearest = format.nearest(w)
    assert nearest is not None
    rounded = format.rounded(w.dequantize(), nearest)
    assert_same(through(format, rounded), rounded)


@pytest.mark.parametrize("format", [V1, V2, AWQ], ids=lambda f: f.name)
def test_outputs_that_fill_no_words(format) -> None:
    w = weight(Int4WeightOnly(32), 13)
    with pytest.raises(FormatError, match="whole words"):
        format.encode(w)
    assert format.nearest(w) is None


@pytest.mark.parametrize("format", [V2, AWQ], ids=lambda f: f.name)
def test_scales_that_float16_does_not_represent(format) -> None:
    values = torch.randn(32, 64)
    w = AffineTensor.from_float(values, Int4WeightOnly(32))
    with pytest.raises(FormatError, match=r"float16, which cannot represent \d+ of 64 scales"):
        format.encode(w)
    rounded = format.rounded(w.dequantize(), format.nearest(w))
    assert_same(through(format, rounded), rounded)
    error = (rounded.dequantize() - w.dequantize()).norm() / w.dequantize().norm()
    assert error < 1e-3
    with pytest.raises(FormatError, match="scales"):
        format.rounded(values * 1e30, format.nearest(w))


def test_negative_scales() -> None:
    w = AffineTensor.searched(torch.randn(32, 64, dtype=torch.bfloat16), Int4WeightOnly(32))
    assert (w.scale < 0).any()
    for format in (V1, V2, AWQ):
        assert_same(through(format, w), w)


def test_natural_groups_are_read_however_they_are_flagged() -> None:
    w = weight(Int4WeightOnly(64))
    parts, config = V1.encode(w), {**V1.config({NAME: w}, ()), "desc_act": True}
    assert_same(V1.read(parts, config, NAME, w.dtype), w)
    parts.pop("g_idx")
    with pytest.raises(FormatError, match="desc_act is true, and it has no g_idx"):
        V1.read(parts, config, NAME, w.dtype)
    again = V1.read(parts, {**config, "desc_act": False}, NAME, w.dtype)
    assert type(again) is AffineTensor
    assert_same(again, w)


@pytest.mark.parametrize("format", [V1, V2], ids=lambda f: f.name)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_act_order_by_its_formula(format, bits: int) -> None:
    """Values as the programs compute them, of groups of any inputs, in and out."""
    w = weight(IntxWeightOnly(bits, 32, "symmetric"), 32, 128)
    parts, config = format.encode(w), {**format.config({NAME: w}, ()), "desc_act": True}
    torch.manual_seed(1)
    index = torch.randperm(128) // 32
    parts["g_idx"] = index.int()
    again = format.read(parts, config, NAME, w.dtype)
    assert type(again) is OrderedTensor
    q, z = _codes(parts["qweight"].T, bits), _codes(parts["qzeros"], bits) + format.less
    values = (q - z.T[:, index]) * parts["scales"].T[:, index].float()
    assert torch.equal(values.bfloat16(), again.dequantize())
    written = format.encode(again)
    for name, t in parts.items():
        assert torch.equal(written[name], t), name
    assert format.config({NAME: again}, ())["desc_act"] is True
    assert_same(through(format, again), again)
    assert_same(through(by_name("lowbit"), again), again)


def test_act_order_goes_to_other_formats_with_its_loss_stated(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = low_bit(Int4WeightOnly(64))
    for t in (model.up_proj.weight, model.down_proj.weight):
        t.scale = t.scale.half().bfloat16()
    lowbit.export(model, tmp_path / "natural", "gptq")
    path = tmp_path / "natural" / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith("g_idx")]:
        tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, {"format": "pt"})
    found = lowbit.load_pretrained(tmp_path / "natural", build(seed=1))
    assert type(found.up_proj.weight) is OrderedTensor
    plain = lowbit.dequantize_(copy.deepcopy(found))
    assert plain.converted == ["up_proj.weight", "down_proj.weight"]
    with pytest.raises(FormatError, match="got a OrderedTensor"):
        lowbit.export(tmp_path / "natural", tmp_path / "awq", "awq")
    report = lowbit.export(tmp_path / "natural", tmp_path / "awq", "awq", lossy=True)
    assert all(ratio > 15 for ratio in report.snr.values()) and len(report.snr) == 2
    lowbit.export(tmp_path / "natural", tmp_path / "again", "gptq")
    again = lowbit.load_pretrained(tmp_path / "again", build(seed=1))
    assert torch.equal(again(TOKENS), found(TOKENS))


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (torch.zeros(128), "each group 64 inputs"),
        (torch.arange(128) % 3, "each group 64 inputs"),
        (torch.arange(64) // 32, "not a group for each of 128 inputs"),
    ],
)
def test_a_damaged_order(index: Tensor, why: str) -> None:
    w = weight(Int4WeightOnly(64))
    parts, config = V1.encode(w), V1.config({NAME: w}, ())
    parts["g_idx"] = index.int()
    with pytest.raises(FormatError, match=why):
        V1.read(parts, config, NAME, w.dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `_codes`: codes [R, K] as words [R, ⌈K·b/32⌉], the last one filled up with zeros."""
    columns = codes.shape[1]
    bit = ((codes.long()[..., None] >> torch.arange(bits)) & 1).flatten(1)
    bit = torch.nn.functional.pad(bit, (0, -columns * bits % 32)).unflatten(1, (-1, 32))
    words = (bit << torch.arange(32)).sum(-1)
    return (words - 2**32 * (words >> 31)).int()


def _ragged(
    format, bits: int, columns: int, sym: bool, mixed: bool
) -> tuple[dict[str, Tensor], dict[str, object], Tensor]:
    """Parts, settings and values of a weight in groups of 128 whose last one is not full, as the programs have it."""
    torch.manual_seed(0)
    rows, index = 32, torch.arange(columns) // 128
    index = index[torch.randperm(columns)] if mixed else index
    q = torch.randint(0, 2**bits, (rows, columns))
    middle = torch.full((2, rows), 2 ** (bits - 1))
    z = middle if sym else torch.randint(1, 2**bits, (2, rows))
    s = torch.randn(2, rows).half()  # of both signs, as AutoRound writes them
    values = (q - z.T[:, index]) * s.T[:, index].float()
    config = {"quant_method": "gptq", "bits": bits, "group_size": 128, "sym": sym}
    if format is AWQ:
        ordered = [t.unflatten(-1, (-1, 8))[..., WRITTEN].flatten(-2) for t in (q.T, z)]
        parts = {"qweight": _packed(ordered[0], 4), "qzeros": _packed(ordered[1], 4), "scales": s}
        return parts, {**config, "quant_method": "awq", "zero_point": not sym}, values.bfloat16()
    parts = {
        "qweight": _packed(q, bits).T.contiguous(),
        "qzeros": _packed(z - format.less, bits),
        "scales": s,
        "g_idx": index.int(),
    }
    config |= {"checkpoint_format": format.name, "desc_act": mixed}
    return parts, config, values.bfloat16()


RAGGED = [(f, bits, k) for f in (V1, V2) for bits in (2, 3, 4, 8) for k in (200, 224, 129)]
RAGGED += [(AWQ, 4, 200), (AWQ, 4, 129)]


@pytest.mark.parametrize("sym", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("format", "bits", "columns"), RAGGED, ids=lambda v: getattr(v, "name", v))
def test_a_last_group_that_is_not_full(format, bits: int, columns: int, sym: bool) -> None:
    """200 inputs in groups of 128 have two rows of scales."""
    for mixed in (False, True) if format is not AWQ else (False,):
        parts, config, values = _ragged(format, bits, columns, sym, mixed)
        found = format.read(parts, config, NAME, torch.bfloat16)
        assert type(found) is (OrderedTensor if mixed else AffineTensor)
        assert torch.equal(found.dequantize(), values)
        assert_same(through(by_name("lowbit"), found), found)
        if format is AWQ or columns * bits % 32:
            with pytest.raises(FormatError, match=r"not a multiple of the group|whole words"):
                format.encode(found)
            continue
        written = format.encode(found)
        assert written.keys() == parts.keys()
        assert all(torch.equal(written[name], t) for name, t in parts.items())
        assert format.notes({NAME: found})[0].startswith(f"the last group of {NAME} has fewer")
    if (
        columns * bits % 32 == 0 and format is not AWQ
    ):  # without g_idx the words say how many inputs there are
        parts, config, values = _ragged(format, bits, columns, sym, False)
        del parts["g_idx"]
        assert torch.equal(format.read(parts, config, NAME, torch.bfloat16).dequantize(), values)


def test_a_folder_whose_last_groups_are_not_full(tmp_path: Path) -> None:
    """128 and 256 inputs in groups of 96, which run in lowbit's products."""
    model = low_bit(Int4WeightOnly(96))
    for t in (model.up_proj.weight, model.down_proj.weight):
        t.scale = t.scale.half().bfloat16()
    report = lowbit.export(model, tmp_path / "out", "gptq")
    assert "vLLM refuses it" in str(report)
    other = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("format", "change"),
    [
        ("gptq", {"checkpoint_format": None, "format": "gptq_p"}),
        ("gptq", {"is_marlin_format": True}),
        ("awq", {"version": None, "checkpoint_format": "gemv"}),
        ("awq", {"version": None, "format": "llm-awq"}),
    ],
)
def test_layouts_that_only_another_key_names(format: str, change: dict[str, object]) -> None:
    """Their words would be read as other values."""
    own = by_name(format)
    w = weight(Int4WeightOnly(64))
    config = {**own.config({NAME: w}, ()), **change}
    (found,) = [f for f in (V1, V2, AWQ) if f.reads(config)]
    with pytest.raises(FormatError, match="accepted"):
        found.read(own.encode(w), config, NAME, w.dtype)
    config = {**V2.config({NAME: w}, ()), "checkpoint_format": None, "format": "gptq_v2"}
    assert V2.reads(config) and not V1.reads(config)


def test_settings_of_single_layers() -> None:
    w = weight(IntxWeightOnly(8, 32, "symmetric"))
    config = {**V1.config({"a.weight": weight(Int4WeightOnly(64))}, ())}
    config["dynamic"] = {r"+:layers\.0\.": {"bits": 8, "group_size": 32}, "-:lm_head": {}}
    assert_same(V1.read(V1.encode(w), config, NAME, w.dtype), w)


def test_one_config_for_a_model() -> None:
    weights = {"a.weight": weight(Int4WeightOnly(64)), "b.weight": weight(Int4WeightOnly(32))}
    for format in (V1, AWQ):
        with pytest.raises(FormatError, match="one group size"):
            format.config(weights, ())
    w = weight(Int4WeightOnly(64))
    found = V1.config({"m.layers.0.mlp.up.weight": w}, {"lm_head", "m.layers.0.mlp.down"})
    assert found["modules_in_block_to_quantize"] == [["mlp.up"]]
    assert found["dynamic"] == {r"-:^m\.layers\.0\.mlp\.down$": {}}


DAMAGED = {
    "missing": (lambda p: p.pop("scales"), "no scales"),
    "short": (lambda p: p.update(qweight=p["qweight"][:, 1:]), "outputs|words"),
    "dtype": (lambda p: p.update(qzeros=p["qzeros"].short()), "words of int32"),
    "groups": (lambda p: p.update(scales=p["scales"][1:]), "shape"),
}


@pytest.mark.parametrize("format", [V1, V2, AWQ], ids=lambda f: f.name)
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_parts(case: str, format) -> None:
    w = weight(Int4WeightOnly(64))
    parts, config = format.encode(w), format.config({NAME: w}, ())
    change, why = DAMAGED[case]
    change(parts)
    with pytest.raises(FormatError, match=why):
        format.read(parts, config, NAME, w.dtype)


@pytest.mark.parametrize(
    ("format", "change"),
    [
        (V1, {"bits": 5}),
        (V1, {"group_size": 0}),
        (V1, {"checkpoint_format": "marlin"}),
        (AWQ, {"bits": 8}),
        (AWQ, {"version": "gemv"}),
    ],
)
def test_settings_that_lowbit_does_not_read(format, change: dict[str, object]) -> None:
    w = weight(Int4WeightOnly(64))
    config = {**format.config({NAME: w}, ()), **change}
    assert format.reads(config)
    with pytest.raises(FormatError, match=next(iter(change))):
        format.read(format.encode(w), config, NAME, w.dtype)


def test_a_damaged_v1_file_is_not_read() -> None:
    w = weight(Int4WeightOnly(64))
    parts = V1.encode(w)
    parts["qzeros"] = torch.full_like(parts["qzeros"], -1)
    with pytest.raises(FormatError, match="stored as -1"):
        V1.read(parts, V1.config({NAME: w}, ()), NAME, w.dtype)


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq"])
def test_folders(format: str, tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(64))
    lowbit.export(model, tmp_path / "out", format)
    other = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(other(TOKENS), model(TOKENS))
    with pytest.raises(FormatError, match="lossy=True"):
        lowbit.export(low_bit(IntxWeightOnly(5)), tmp_path / "five", format)
    report = lowbit.export(low_bit(IntxWeightOnly(5, 32)), tmp_path / "five", format, lossy=True)
    assert len(report.snr) == 2 and min(report.snr.values()) > 12


@pytest.mark.parametrize("format", [V1, V2, AWQ], ids=lambda f: f.name)
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_lossy_half_integers_lose_no_more_than_their_scales(format, bits: int) -> None:
    """They are integers of one bit more, so that float16 rounds the scales and nothing else."""
    if format is AWQ and bits != 3:
        pytest.skip("4 bits hold these values at scales outside the range that a search covers")
    scheme = Scheme(Spec(Int(bits), PerGroup(32), "half_integer"))
    w = AffineTensor.from_float(torch.randn(64, 128), scheme)
    rounded = format.rounded(w.dequantize(), format.nearest(w))
    assert_same(through(format, rounded), rounded)
    error = (rounded.dequantize() - w.dequantize()).norm() / w.dequantize().norm()
    assert error < 1e-3


@pytest.mark.parametrize("name", ["gptq", "awq", "gguf", "compressed-tensors"])
def test_lossy_weights_are_not_too_small(name: str) -> None:
    values = torch.randn(64, 128)
    format = by_name(name)
    rounded = format.rounded(values, Scheme(Spec(Int(4), PerGroup(32)))).dequantize()
    assert float((values * rounded).sum() / values.square().sum()) == pytest.approx(1, abs=5e-4)


def test_rows_are_one_group() -> None:
    assert V1.config({NAME: weight(IntxWeightOnly(4))}, ())["group_size"] == -1
    again = through(AWQ, weight(IntxWeightOnly(4)))
    assert again.spec.granularity == PerRow()


def _with_more(folder: Path, more: dict[str, Tensor]) -> None:
    """Add tensors to the one shard of a folder."""
    from safetensors.torch import load_file, save_file

    (shard,) = folder.glob("*.safetensors")
    save_file({**load_file(shard), **more}, shard, {"format": "pt"})


def _beside(value: float) -> dict[str, Tensor]:
    """What AutoGPTQ and Neural Compressor store beside the words of down_proj, which has no bias."""
    bias = torch.full((128,), value, dtype=torch.float16)
    return {"down_proj.bias": bias, "down_proj.scale_bf16_to_fp8": torch.zeros(1).bfloat16()}


def test_biases_of_zeros_that_the_model_lacks_are_left_out(tmp_path: Path) -> None:
    model = low_bit(Int4WeightOnly(64))
    folder = tmp_path / "out"
    lowbit.export(model, folder, "gptq")
    _with_more(folder, _beside(0))
    with pytest.warns(UserWarning, match="2 tensors, such as down_proj"):
        other = lowbit.load_pretrained(folder, build(1))
    assert torch.equal(other(TOKENS), model(TOKENS))
    lowbit.export(other, tmp_path / "again", like=folder)
    again = lowbit.load_pretrained(tmp_path / "again", build(1))
    assert torch.equal(again(TOKENS), model(TOKENS))

    roomy = build(1)
    roomy.down_proj = torch.nn.Linear(256, 128).bfloat16()
    with pytest.warns(UserWarning, match="1 tensors, such as down_proj.scale_bf16_to_fp8"):
        lowbit.load_pretrained(folder, roomy)
    assert not roomy.down_proj.bias.any()


def test_a_bias_that_the_model_lacks_and_that_is_not_zero(tmp_path: Path) -> None:
    lowbit.export(low_bit(Int4WeightOnly(64)), tmp_path / "out", "gptq")
    _with_more(tmp_path / "out", _beside(0.5))
    with pytest.raises(FormatError, match="holds 1 tensors that Tied lacks, such as down_proj"):
        lowbit.load_pretrained(tmp_path / "out", build(1))
