"""The format "modelopt": NVFP4 with a scale that multiplies, float8 beside it, and hf_quant_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit import NVFP4WeightOnly
from lowbit.formats import FormatError
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.scale_format import SCALE_FORMATS
from tests.schemes import relative_error

load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file
SCHEME = lowbit.formats.grid("modelopt", NVFP4WeightOnly())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(48, 33, bias=False), nn.Linear(33, 7)


def written(folder: Path, scheme: Any = SCHEME) -> nn.Module:
    model = Model().bfloat16()
    lowbit.quantize_(model, {"first": scheme, "*": None})
    lowbit.export(model, folder, "modelopt")
    return model


def change(folder: Path, parts: dict[str, Tensor], **settings: Any) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{f"first.{n}": t for n, t in parts.items()}}, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


def opened(folder: Path) -> Model:
    made: Any = lowbit.load_pretrained(folder, Model().bfloat16())
    return made


def test_a_new_folder(tmp_path: Path) -> None:
    """By the formula of the format, in float64."""
    model: Any = written(tmp_path / "out")
    own = opened(tmp_path / "out").first.weight
    assert torch.equal(own.dequantize(), model.first.weight.dequantize())
    stored = {
        n.removeprefix("first."): t
        for n, t in load_file(tmp_path / "out/model.safetensors").items()
    }
    packed, second = stored["weight"], stored["weight_scale_2"]
    assert (packed.shape, stored["weight_scale"].shape, second.shape) == ((33, 24), (33, 3), ())
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    values = torch.tensor(E2M1.values, dtype=torch.float64)[codes.long()].unflatten(1, (3, 16))
    values *= (stored["weight_scale"].double() * second.double()).unsqueeze(-1)
    assert relative_error(own.dequantize(), values.flatten(1)) < 2**-8
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert settings["quant_algo"] == "W4A16_NVFP4" and settings["ignore"] == ["lm_head", "second"]


def test_mxfp8(tmp_path: Path) -> None:
    """Written, read and written back, by the formula of the format."""
    model = Model().bfloat16()
    first = nn.Linear(64, 33, bias=False).bfloat16()
    model.first = first
    lowbit.quantize_(model, {"first": lowbit.MXFP8DynamicActivationMXFP8Weight(), "*": None})
    (note,) = lowbit.export(model, tmp_path / "out", "modelopt").notes
    assert "from_pretrained warns and takes the MXFP8 codes for values" in note
    settings = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert (settings["quant_algo"], settings["group_size"]) == ("MXFP8", 32)
    stored = load_file(tmp_path / "out/model.safetensors")
    codes, scale = stored["first.weight"], stored["first.weight_scale"]
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
    values = codes.double().unflatten(1, (2, 32)) * 2.0 ** (scale.double() - 127).unsqueeze(-1)
    assert torch.equal(first.weight.dequantize().double(), values.flatten(1))
    blank: Any = Model().bfloat16()
    blank.first = nn.Linear(64, 33, bias=False).bfloat16()
    made: Any = lowbit.load_pretrained(tmp_path / "out", blank)
    assert made.first.weight.activation == first.weight.activation  # type: ignore[union-attr]
    assert torch.equal(made.first.weight.dequantize(), first.weight.dequantize())
    lowbit.export(made, tmp_path / "back", like=tmp_path / "out")
    again = load_file(tmp_path / "back/model.safetensors")
    assert all(
        torch.equal(again[n].view(torch.uint8), t.view(torch.uint8)) for n, t in stored.items()
    )


def test_a_global_scale_has_an_exact_reciprocal() -> None:
    """1 / (1 / (1 / m)) is 1 / m for every mantissa, and a new scale is such a reciprocal."""
    m = (torch.arange(2**23, dtype=torch.int32) | 0x3F800000).view(torch.float32)
    once = 1 / m
    assert torch.equal(1 / (1 / once), once)
    assert not torch.equal(1 / once, m)
    largest = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 10
    found, plain = (SCALE_FORMATS[n].joint_part(largest, E2M1) for n in ("e4m3_inverse", "e4m3"))
    assert torch.equal(1 / (1 / found), found) and not torch.equal(1 / (1 / plain), plain)
    assert relative_error(found, plain) < 2**-23
    assert SCALE_FORMATS["e4m3_inverse"].joint_part(torch.zeros(1), E2M1) == 1


def test_nvfp4_of_another_program(tmp_path: Path) -> None:
    """Refused where the global scale has no reciprocal; read from a ModelOpt folder, compressed-tensors holds it."""
    model = Model().bfloat16()
    lowbit.quantize_(model, {"first": NVFP4WeightOnly(), "*": None})
    with torch.no_grad():
        model.first.weight.global_scale.fill_(1 + 2**-23).mul_(1.5)  # type: ignore[operator]
        whole = model.first.weight.global_scale
        while torch.equal(1 / (1 / whole), whole):
            whole.mul_(1 + 2**-23)
    with pytest.raises(
        FormatError, match=r"not the reciprocal of a float32 number.*grid\('modelopt'"
    ):
        lowbit.export(model, tmp_path / "out", "modelopt")
    written(tmp_path / "modelopt")
    lowbit.export(tmp_path / "modelopt", tmp_path / "ct", "compressed-tensors")
    assert torch.equal(
        opened(tmp_path / "ct").first.weight.dequantize(),
        opened(tmp_path / "modelopt").first.weight.dequantize(),
    )


@pytest.mark.filterwarnings("ignore:other programs round the inputs")
def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    """hf_quant_config.json, and a scale of inputs that is copied."""
    folder = tmp_path / "out"
    model: Any = written(folder)
    change(folder, {"input_scale": torch.tensor(0.5)})
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError):
        opened(folder)
    text = {"quant_algo": "NVFP4", "exclude_modules": settings["ignore"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": text}))
    made = opened(folder)
    assert torch.equal(made.first.weight.dequantize(), model.first.weight.dequantize())
    lowbit.export(made, tmp_path / "back", like=folder)
    own, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "back", folder))
    assert own.keys() == theirs.keys() and all(torch.equal(own[n], theirs[n]) for n in own)
    assert (tmp_path / "back/hf_quant_config.json").is_file()


def test_a_cache_in_float8_leaves_the_weights_plain(tmp_path: Path) -> None:
    model = Model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    text = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": text}))
    made = opened(tmp_path)
    assert torch.equal(made.first.weight, model.first.weight)


@pytest.mark.parametrize(("static", "rows"), [(True, 1), (False, 1), (False, 33)])
def test_float8_layers(static: bool, rows: int, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written(folder)
    codes = torch.randn(33, 48).to(torch.float8_e4m3fn)
    tensors = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith("first.")}
    own = {"weight": codes, "weight_scale": torch.full((rows,), 0.25).squeeze(0)}
    own |= {"input_scale": torch.tensor(0.5)} if static else {}
    save_file(kept, folder / "model.safetensors")
    change(folder, own, quant_algo="FP8" if rows == 1 else "FP8_PER_CHANNEL_PER_TOKEN")
    made = opened(folder)
    assert torch.equal(made.first.weight.dequantize().float(), codes.float() / 4)
    inputs: Any = made.first.weight.activation  # type: ignore[union-attr]
    assert inputs.static == static
    lowbit.export(made, tmp_path / "back", like=folder)
    again = load_file(tmp_path / "back/model.safetensors")
    for name, t in own.items():
        assert torch.equal(again[f"first.{name}"].float(), t.float()), name


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"weight": torch.zeros(33, 24)}, r"its codes are torch.float32 .*accepted: uint8 \[N, K/2\]"),
        ({"weight_scale": torch.zeros(33, 3)}, r"its weight_scale is torch.float32"),
        ({"weight_scale": torch.zeros(33, 2).to(torch.float8_e4m3fn)}, r"accepted: .* \(33, 3\)"),
        ({"weight_scale_2": torch.tensor(0.0)}, r"its weight_scale_2 is \[0.0\]; .*left in high precision"),
        ({"weight_scale_2": torch.tensor(float("nan"))}, r"its weight_scale_2 is \[nan\]"),
        ({"weight_scale_2": torch.ones(33)}, r"its weight_scale_2 is \[1.0, 1.0"),
        ({"pre_quant_scale": torch.full((48,), 2.0)}, "it has a pre_quant_scale, which lowbit does not"),
        ({"svdquant_lora_a": torch.ones(4, 48)}, "it has a svdquant_lora_a, .*without AWQ, SmoothQ"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(parts: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    written(tmp_path / "out")
    change(tmp_path / "out", parts, quant_algo="MIXED_PRECISION")
    with pytest.raises(FormatError, match=message):
        opened(tmp_path / "out")
    with pytest.raises(FormatError, match=message):
        lowbit.export(tmp_path / "out", tmp_path / "again", "compressed-tensors")


def test_other_algorithms(tmp_path: Path) -> None:
    written(tmp_path / "out")
    change(tmp_path / "out", {}, quant_algo="NVFP4_AWQ")
    with pytest.raises(FormatError, match=r"quant_algo is 'NVFP4_AWQ'; accepted: NVFP4, W4A16"):
        opened(tmp_path / "out")


def test_weights_that_it_does_not_hold(tmp_path: Path) -> None:
    for scheme, why in (
        (lowbit.Int4WeightOnly(16), "modelopt holds NVFP4 and MXFP8, got int4"),
        (lowbit.MXFP4WeightOnly(), "modelopt holds NVFP4 and MXFP8, got e2m1"),
        (lowbit.MXFP8WeightOnly(), "modelopt rounds the inputs of MXFP8 weights to MXFP8"),
    ):
        with pytest.raises(FormatError, match=why):
            written(tmp_path / "out", scheme)
