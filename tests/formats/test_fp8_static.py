"""Float8 weights with one scale, and a static scale of inputs, as AutoFP8, vLLM and transformers have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit
from lowbit.formats import FormatError
from lowbit.formats.registry import by_name
from lowbit.numerics.granularity import PerRow, PerTensor, PerToken
from lowbit.tensor.frozen.float8_tensor import Float8Tensor
from tests.formats.codec_case import NAME, assert_same, through
from tests.formats.models import TOKENS, build, plain_folder

FP8 = by_name("fp8")
E4M3 = torch.float8_e4m3fn
NAMES = {
    "vllm": ("weight_scale", "input_scale"),
    "transformers": ("weight_scale_inv", "activation_scale"),
}
SHAPES = {"0-d": (), "1-d": (1,), "2-d": (1, 1), "rows": (64, 1), "flat rows": (64,)}


def settings(scheme: str = "static", **own: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": scheme, **own}


def stored(shape: tuple[int, ...] = (), rows: int = 64, columns: int = 96) -> dict[str, Tensor]:
    torch.manual_seed(0)
    codes = torch.randn(rows, columns).mul(100).clamp(-448, 448).to(E4M3)
    scale = torch.rand(shape).add(0.5).div(1000)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.03])}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_values_and_products(scheme: str, shape: str) -> None:
    """By the formula: inputs are rounded to float8 with the scale of the file, products are scaled."""
    parts = stored(SHAPES[shape])
    scale = parts["weight_scale"].reshape(-1, 1)
    if scheme == "dynamic":
        del parts["input_scale"]
    found = FP8.read(parts, settings(scheme), NAME, torch.float32)
    assert type(found) is Float8Tensor
    assert found.spec.granularity == (PerRow() if "rows" in shape else PerTensor())
    weight = parts["weight"].float() * scale
    assert torch.equal(found.dequantize(), weight)
    assert_same(through(by_name("lowbit"), found), found)
    assert_same(through(by_name("compressed-tensors"), found), found)
    x = torch.randn(5, 96)
    if scheme == "dynamic":
        assert found.activation.granularity == PerToken()
        own = x.abs().amax(1, keepdim=True) / 448
    else:
        assert found.input_scale.tolist() == [[pytest.approx(0.03)]]
        own = parts["input_scale"]
    rounded = (x / own).clamp(-448, 448).to(E4M3).float() * own
    torch.testing.assert_close(F.linear(x, found), rounded @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_folders(scheme: str, names: str, tmp_path: Path) -> None:
    model, scales = build(), NAMES[names]
    state, wanted = dict(model.state_dict()), {}
    for name in ("up_proj", "down_proj"):
        parts = stored((), *state[f"{name}.weight"].shape)
        wanted[name] = (parts["weight"].float() * parts["weight_scale"]).bfloat16()
        state[f"{name}.weight"] = parts["weight"]
        state[f"{name}.{scales[0]}"] = parts["weight_scale"]
        if scheme == "static":
            state[f"{name}.{scales[1]}"] = parts["input_scale"]
    state["layers.0.self_attn.k_scale"] = torch.ones(1)
    config = settings(scheme, ignored_layers=["lm_head"])
    folder = plain_folder(tmp_path / "model", state, quantization_config=config)
    with pytest.warns(UserWarning, match="1 scales of a KV cache"):
        found = lowbit.load_pretrained(folder, build(1))
    for name, values in wanted.items():
        assert torch.equal(getattr(found, name).weight.dequantize(), values)
    for format in ("lowbit", "compressed-tensors"):
        report = lowbit.export(folder, tmp_path / format, format)
        assert report.converted and not report.snr and "k_scale" in report.notes[0]
        again = lowbit.load_pretrained(tmp_path / format, build(2))
        assert torch.equal(again(TOKENS), found(TOKENS))
    with torch.no_grad():
        found.up_proj.weight.copy_(-wanted["up_proj"])  # type: ignore[operator]
    report = lowbit.export(found, tmp_path / "back", like=folder)
    count = len(state)  # its codes and its scale change
    assert report.notes[0].startswith(f"{count - 2} of {count} stored tensors have the bytes")
    again = lowbit.load_pretrained(tmp_path / "back", build(2))
    assert torch.equal(again(TOKENS), found(TOKENS))


REFUSED = {
    "no scale of inputs": (lambda p: p.pop("input_scale"), {}, "has no input_scale"),
    "a scale of inputs": (lambda p: None, {"activation_scheme": "dynamic"}, "has an input_scale"),
    "scales of nothing": (lambda p: p.update(weight_scale=torch.ones(3)), {}, "shape \\(3,\\)"),
    "a negative scale": (lambda p: p.update(input_scale=torch.tensor(-1.0)), {}, "one number > 0"),
    "two scales": (lambda p: p.update(input_scale=torch.ones(2)), {}, "one number > 0"),
    "e5m2": (lambda p: p.update(weight=p["weight"].to(torch.float8_e5m2)), {}, "e5m2, not"),
    "another rule": (lambda p: None, {"activation_scheme": "block"}, "'block'; accepted: dynamic"),
    "blocks": (lambda p: None, {"weight_block_size": [16, 16]}, "accepted with blocks: 'dynamic'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    change, own, why = REFUSED[case]
    parts = stored()
    change(parts)
    with pytest.raises(FormatError, match=why):
        FP8.read(parts, {**settings(), **own}, NAME, None)


def test_parts_that_belong_together() -> None:
    with pytest.raises(FormatError, match=r"b.input_scale has no weight and weight_scale"):
        FP8.find(["a.weight", "a.weight_scale", "b.input_scale"], settings())
    with pytest.raises(FormatError, match="one part"):
        FP8.find(["a.weight", "a.weight_scale", "a.weight_scale_inv"], settings())
