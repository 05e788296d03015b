"""Folders of AutoRound: the words of GPTQ and AWQ under its own settings, by their formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit import (
    Int4WeightOnly,
    MXFP4WeightOnly,
    MXFP8DynamicActivationMXFP8Weight,
    MXFP8WeightOnly,
    NVFP4WeightOnly,
)
from lowbit.formats import FormatError
from lowbit.formats.auto_round import translated
from lowbit.formats.awq import WRITTEN
from lowbit.formats.registry import by_config, by_name
from tests.formats.codec_case import NAME, weight
from tests.formats.models import TOKENS, build, low_bit, plain_folder
from tests.formats.test_gptq_awq import _packed

GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", None)
RAW = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")
AWQ = ("auto_round:auto_awq", "auto_round:awq")
FLOATS = "auto_round:llm_compressor"
LAYER = NAME.removesuffix(".weight")


def settings(packing: str | None, **own: Any) -> dict[str, Any]:
    found = {"quant_method": "auto-round", "autoround_version": "0.16.1", "bits": 4}
    found |= {"group_size": 32, "sym": True, "iters": 200, **own}
    return found if packing is None else {**found, "packing_format": packing}


def stored(
    packing: str | None, bits: int, sym: bool, rows: int = 32, columns: int = 64, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """Parts and values of a weight in groups of 32, half of whose scales are negative where it is symmetric."""
    torch.manual_seed(seed)
    q = torch.randint(0, 2**bits, (rows, columns))
    s = torch.rand(columns // 32, rows).add(0.1).div(8)
    s = (s * torch.randn_like(s).sign() if sym else s).half()
    middle = torch.full((columns // 32, rows), 2 ** (bits - 1))
    z = middle if sym else torch.randint(1, 2**bits, middle.shape)
    index = torch.arange(columns) // 32
    values = (q - z.T[:, index]) * s.T[:, index].float()
    if packing in AWQ:
        q, z = (t.unflatten(-1, (-1, 8))[..., WRITTEN].flatten(-2) for t in (q.T, z))
        return {"qweight": _packed(q, bits), "qzeros": _packed(z, bits), "scales": s}, values
    less = 1 if packing in GPTQ else 0
    words = _packed(q, bits).T.contiguous()
    return {"qweight": words, "qzeros": _packed(z - less, bits), "scales": s}, values


CASES = [(p, bits) for p in (*GPTQ, *RAW) for bits in range(2, 9)] + [(p, 4) for p in AWQ]


@pytest.mark.cover("values")
@pytest.mark.parametrize("sym", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("packing", "bits"), CASES)
def test_by_its_formula(packing: str | None, bits: int, sym: bool) -> None:
    parts, values = stored(packing, bits, sym)
    config = translated(settings(packing, bits=bits, sym=sym))
    format = by_config(config)
    wanted = "awq" if packing in AWQ else "gptq" if packing in GPTQ else "gptq_v2"
    assert format is by_name(wanted)
    found = format.read(parts, config, NAME, torch.float32)
    assert torch.equal(found.dequantize(), values)
    assert found.spec.has_zero_point != sym and (found.scale < 0).any() == sym


@pytest.mark.parametrize("packing", [*GPTQ, *RAW, *AWQ])
def test_settings_of_single_layers(packing: str | None) -> None:
    """By name before expressions; 16 bits are a plain layer."""
    parts, values = stored(packing, 4, True)
    extra = {
        ".*up_proj.*": {"bits": 8, "group_size": -1},
        LAYER: {"bits": 4, "group_size": 32, "sym": True},
        "layers.1.up_proj": {"bits": 16, "data_type": "float"},
    }
    config = translated(settings(packing, bits=2, group_size=64, sym=False, extra_config=extra))
    format = by_config(config)
    found = format.read(parts, config, NAME, torch.float32)
    assert torch.equal(found.dequantize(), values)
    with pytest.raises(FormatError, match=r"bits is 8|scales|words"):
        format.read(parts, config, "layers.2.up_proj.weight", torch.float32)
    assert format.skips(config, "layers.1.up_proj") and not format.skips(config, LAYER)


@pytest.mark.parametrize("packing", [*GPTQ, *RAW, *AWQ])
def test_folders(packing: str | None, tmp_path: Path) -> None:
    model = build(dtype=torch.float16)
    state = dict(model.state_dict())
    for i, name in enumerate(("up_proj", "down_proj")):
        rows, columns = state[f"{name}.weight"].shape
        parts, values = stored(packing, 4, True, rows, columns, seed=i)
        state.update({f"{name}.{part}": t for part, t in parts.items()})
        del state[f"{name}.weight"]
        getattr(model, name).weight.data = values.half()
    options = {"dtype": "float16", "quantization_config": settings(packing)}
    folder = plain_folder(tmp_path / "model", state, **options)
    found = lowbit.load_pretrained(folder, build(1, torch.float16))
    assert torch.equal(found.up_proj.weight.dequantize(), model.up_proj.weight)
    torch.testing.assert_close(found(TOKENS), model(TOKENS), rtol=2e-2, atol=2e-2)
    for format in ("lowbit", "gptq", "awq", "compressed-tensors"):
        report = lowbit.export(folder, tmp_path / format, format)
        assert len(report.converted) == 2 and not report.snr
        again = lowbit.load_pretrained(tmp_path / format, build(1, torch.float16))
        assert torch.equal(again(TOKENS), found(TOKENS))


IN_FLOATS = {
    "MXFP4": (MXFP4WeightOnly(), {"data_type": "mx_fp", "bits": 4, "group_size": 32}),
    "NVFP4": (NVFP4WeightOnly(), {"data_type": "nv_fp", "bits": 4, "group_size": 16}),
    "MXFP8": (MXFP8WeightOnly(), {"data_type": "mx_fp", "bits": 8, "group_size": 32}),
    "MXFP8 x MXFP8": (
        MXFP8DynamicActivationMXFP8Weight(),
        {
            "data_type": "mx_fp",
            "bits": 8,
            "group_size": 32,
            "act_bits": 8,
            "act_data_type": "mx_fp",
        },
    ),
}


def claimed(folder: Path, **own: Any) -> Path:
    """The folder with AutoRound's settings in place of its own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = settings(FLOATS, **own)
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", IN_FLOATS)
def test_floats(name: str, tmp_path: Path) -> None:
    scheme, own = IN_FLOATS[name]
    model = low_bit(scheme)
    lowbit.export(model, tmp_path / "out", "compressed-tensors")
    found = lowbit.load_pretrained(claimed(tmp_path / "out", **own), build(1))
    assert found.up_proj.weight.activation == model.up_proj.weight.activation
    assert torch.equal(found.up_proj.weight.dequantize(), model.up_proj.weight.dequantize())
    assert torch.equal(found(TOKENS), model(TOKENS))
    assert type(found.lm_head.weight) is torch.nn.Parameter


def test_inputs_in_fp4_are_not_rounded(tmp_path: Path) -> None:
    model = low_bit(NVFP4WeightOnly())
    lowbit.export(model, tmp_path / "out", "compressed-tensors")
    _, own = IN_FLOATS["NVFP4"]
    inputs = {"act_bits": 4, "act_data_type": "nv_fp4_with_static_gs"}
    folder = claimed(tmp_path / "out", **own, **inputs)
    with pytest.warns(UserWarning, match="round the inputs of these layers to FP4"):
        found = lowbit.load_pretrained(folder, build(1))
    assert torch.equal(found(TOKENS), model(TOKENS))


def test_single_layers_of_floats(tmp_path: Path) -> None:
    """A layer in 8 bits beside one in 4, by its name and by an expression; one that is plain."""
    model = build()
    lowbit.quantize_(
        model, {"up_proj": MXFP4WeightOnly(), "down_proj": MXFP8WeightOnly(), "*": None}
    )
    lowbit.export(model, tmp_path / "out", "compressed-tensors")
    _, own = IN_FLOATS["MXFP4"]
    for name in ("down_proj", ".*down.*"):
        extra = {name: {"bits": 8, "act_bits": None}, "lm_head": {"bits": 16}}
        folder = claimed(tmp_path / "out", **own, extra_config=extra)
        assert torch.equal(lowbit.load_pretrained(folder, build(1))(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"packing_format": FLOATS}, "data_type is None with 4 bits"),
        (
            {"packing_format": FLOATS, "data_type": "nv_fp", "bits": 8},
            "data_type is 'nv_fp' with 8",
        ),
        ({"packing_format": FLOATS, "data_type": "fp", "bits": 8}, "data_type is 'fp' with 8"),
        (
            {"packing_format": FLOATS, "data_type": "mx_fp", "act_bits": 6},
            "data_type is 'mx_fp' with 6",
        ),
        ({"packing_format": "auto_round:marlin_fp8"}, "packing_format is 'auto_round:marlin_fp8'"),
        ({"packing_format": 5}, "packing_format is 5"),
        ({"rotation_config": {"hadamard_type": "random"}}, "rotated"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({"act_bits": 8}, "act_bits 8"),
        ({"extra_config": {"lm_head": {"data_type": "nv_fp"}}}, "data_type is 'nv_fp'"),
    ],
)
def test_what_it_packs_otherwise(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    config = {**settings("auto_round:auto_gptq"), **change}
    with pytest.raises(FormatError, match=why):
        translated(config)
    folder = plain_folder(tmp_path / "model", build(), quantization_config=config)
    with pytest.raises(FormatError, match=why) as caught:
        lowbit.load_pretrained(folder, build())
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("format", ["gptq", "gptq_v2"])
def test_symmetric_words_of_the_other_version_are_refused(format: str) -> None:
    """Zero points of another layout would move every value by one scale."""
    own, other = by_name(format), by_name({"gptq": "gptq_v2", "gptq_v2": "gptq"}[format])
    w = weight(Int4WeightOnly(64))
    parts, config = other.encode(w), own.config({NAME: w}, ())
    assert config["sym"] is True
    with pytest.raises(FormatError, match="sym is true, and its zero points are not all 8"):
        own.read(parts, config, NAME, w.dtype)
    parts, config = own.encode(w), {**config, "rotation": "hadamard"}
    with pytest.raises(FormatError, match="rotated"):
        own.read(parts, config, NAME, w.dtype)


def test_settings_of_single_layers_of_awq() -> None:
    """GPTQModel writes them for AWQ as for GPTQ."""
    own = by_name("awq")
    w = weight(Int4WeightOnly(32))
    config = json.loads(json.dumps(own.config({"a.weight": weight(Int4WeightOnly(64))}, ())))
    config["dynamic"] = {rf"+:^{LAYER}$": {"group_size": 32}, "-:lm_head": {}}
    found = own.read(own.encode(w), config, NAME, w.dtype)
    assert torch.equal(found.dequantize(), w.dequantize())
    assert own.skips(config, "lm_head") and not own.skips(config, LAYER)
