"""MXFP8 against torchao and compressed-tensors: casts, training and files, to the bit, and where torchao differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import train
from lowbit.formats.registry import by_name
from tests.schemes import relative_error

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
MODES = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
E4M3 = torch.float8_e4m3fn
MAPPINGS = {"symmetric": MODES.FLOOR, "symmetric_no_clipping_err": MODES.RCEIL}
each_mapping = pytest.mark.parametrize("mapping", MAPPINGS)
SMALLEST = 2.0**-118
"""Blocks whose largest value is smaller have the byte 0 in torchao, and 1 in lowbit."""
LARGEST = 1.9375 * 2.0**127
"""From here on powers that are rounded up give 2^128, which is infinite. lowbit refuses such weights."""


def own(x: Tensor, mapping: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes of scales, bytes of codes, and values in float32."""
    t = lb.AffineTensor.from_float(x, lb.MXFP8WeightOnly(mapping))
    spec = t.spec
    values = spec.dequantize(t.codes, t.scale_values(), None, x.shape, torch.float32)
    return t.scale, t.codes.view(torch.uint8), values


def theirs(x: Tensor, mapping: str) -> tuple[Tensor, Tensor, Tensor]:
    scale, codes = mx.to_mx(x, E4M3, 32, MAPPINGS[mapping])
    values = mx.to_dtype(codes, scale, E4M3, 32, torch.float32)
    return scale.view(torch.uint8), codes.view(torch.uint8), values


def of_largest(largest: Tensor) -> Tensor:
    """Blocks with these largest values, and smaller ones of both signs."""
    parts = torch.linspace(-0.99, 0.97, 31)
    return torch.cat([largest.float()[:, None], largest.float()[:, None] * parts], 1).to(
        largest.dtype
    )


def blocks() -> dict[str, Tensor]:
    torch.manual_seed(0)
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    size = every.float().abs()
    return {
        "random": torch.randn(64, 256),
        "bfloat16": torch.randn(64, 256).bfloat16(),
        "huge": torch.randn(64, 64).clamp(-1.9, 1.9) * 2.0**127,
        "tiny": (torch.randn(64, 64).double() * 2.0**-110).float(),
        "every bfloat16": of_largest(every[(size >= SMALLEST) & (size < LARGEST)]),
    }


@each_mapping
@pytest.mark.parametrize("name", blocks())
def test_casts_are_those_of_torchao(name: str, mapping: str) -> None:
    x = blocks()[name]
    for a, b in zip(own(x, mapping), theirs(x, mapping), strict=True):
        assert torch.equal(a, b)


def test_the_largest_values_are_refused() -> None:
    x = of_largest(torch.tensor([LARGEST], dtype=torch.bfloat16))
    assert theirs(x, "symmetric_no_clipping_err")[2].isinf().any()
    with pytest.raises(ValueError, match="round to infinity"):
        own(x, "symmetric_no_clipping_err")


@each_mapping
def test_the_smallest_blocks(mapping: str) -> None:
    """Zeros are zeros in both. In other blocks torchao rounds by 2^-126 or 1 and decodes by 2^-127."""
    scale, codes, values = theirs(torch.zeros(2, 64), mapping)
    assert not scale.any() and not codes.any() and not values.any()
    assert not own(torch.zeros(2, 64), mapping)[2].any()
    x = of_largest(torch.tensor([2.0**-119, 2.0**-126]) * 0.9)
    assert relative_error(own(x, mapping)[2], x) < 0.04
    found = theirs(x, mapping)[2]
    assert torch.equal(found, own(x, mapping)[2] / 2 if mapping == "symmetric" else 0 * found)


@each_mapping
def test_values_that_are_not_finite(mapping: str) -> None:
    """A NaN makes a block NaN in both. An infinity makes the rest of its block 0 in torchao, and NaN in lowbit, whose
    activations show it; weights with either are refused."""
    spec = lb.MXFP8WeightOnly(mapping).weight
    x = torch.randn(3, 32)
    x[0, 3], x[1, 7] = torch.nan, torch.inf
    found = spec.fake_quantize(x)
    assert found[:2].isnan().all() and torch.equal(found[2], own(x[2:], mapping)[2][0])
    values = theirs(x, mapping)[2]
    assert values[0].isnan().all() and values[1].isinf().sum() == 1
    assert not values[1][values[1].isfinite()].any()


def test_float32_beside_a_power_of_two() -> None:
    """torchao rounds log2(max / 448) in float32 before it rounds up, so that float32 values just above 448 · 2^k keep
    the smaller scale. The code is 448 either way."""
    x = torch.zeros(40, 32)
    x[:, 0] = torch.nextafter(448 * 2.0 ** torch.arange(-20, 20), torch.tensor(torch.inf))
    scale, _, values = own(x, "symmetric_no_clipping_err")
    other, _, same = theirs(x, "symmetric_no_clipping_err")
    assert scale.flatten().tolist() == list(range(108, 148))  # 2^-19 to 2^20
    assert int((scale - other.view(scale.shape)).amax()) == 1 and torch.equal(values, same)


def test_training_by_the_formulas_of_torchao() -> None:
    """Each operand by torchao's cast along the dimension that the product sums over."""
    torch.manual_seed(0)
    layer, x, upstream = nn.Linear(96, 64), torch.randn(160, 96), torch.randn(160, 64)

    def cast(t: Tensor) -> Tensor:
        scale, codes = mx.to_mx(t.contiguous(), E4M3, 32, MODES.RCEIL)
        return mx.to_dtype(codes, scale, E4M3, 32, torch.float32).double()

    w = layer.weight.detach()
    expected = {
        "output": cast(x) @ cast(w).t() + layer.bias.detach().double(),
        "input": cast(upstream) @ cast(w.t()).t(),
        "weight": cast(upstream.t()) @ cast(x.t()).t(),
    }
    model = nn.Sequential(layer)
    train.prepare_(model, lb.MXFP8MixedPrecision(always=True))
    x.requires_grad_()
    y = model(x)
    y.backward(upstream)
    found = {"output": y, "input": x.grad, "weight": layer.weight.grad}
    for name, value in expected.items():
        assert relative_error(found[name], value) < 1e-6, name


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(200, 160), (128, 128), (1, 32)], ids=str)
def test_checkpoints_of_torchao(shape: tuple[int, int], swizzled: bool) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    x, format = torch.randn(shape).bfloat16(), by_name("torchao")
    inputs = mx.QuantizeTensorToMXKwargs(scaling_mode=MODES.RCEIL, is_swizzled_scales=swizzled)
    stored = mx.MXTensor.to_mx(
        x, E4M3, 32, MODES.RCEIL, act_quant_kwargs=inputs, is_swizzled_scales=swizzled
    )
    tensors, metadata = support.flatten_tensor_state_dict({"l.weight": stored})
    parts = {name.removeprefix("l."): t for name, t in tensors.items()}
    config = format.settings({"quant_method": "torchao"}, metadata)
    read: Any = format.decode(parts, config, "l.weight", None)
    quantized = lb.AffineTensor.from_float(x, lb.MXFP8DynamicActivationMXFP8Weight())
    assert torch.equal(read.scale, quantized.scale) and read.activation == quantized.activation
    assert torch.equal(read.codes.view(torch.uint8), quantized.codes.view(torch.uint8))
    assert torch.equal(read.dequantize(), stored.dequantize())
    again = {f"l.{name}": t for name, t in format.encode(read).items()}
    back = support.unflatten_tensor_state_dict(again, format.metadata({"l.weight": read}, []))
    made = (back[0] if isinstance(back, tuple) else back)["l.weight"]
    assert made.is_swizzled_scales and torch.equal(made.dequantize(), stored.dequantize())
    from_dict = pytest.importorskip("torchao.core.config").config_from_dict
    made = from_dict(format.config({"l.weight": read}, [])["quant_type"]["default"])
    assert made.scaling_mode == MODES.RCEIL and made.weight_dtype == E4M3


def test_compressed_tensors_reads_the_weights() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    format = by_name("compressed-tensors")
    t = lb.AffineTensor.from_float(torch.randn(48, 96).bfloat16(), lb.MXFP8WeightOnly())
    config = format.config({"l.weight": t}, [])
    assert config["format"] == "mxfp8-quantized"
    scheme = quantization.QuantizationScheme(**config["config_groups"]["group_0"])
    kind = compressors.MXFP8QuantizationCompressor
    assert kind.can_compress(nn.Linear, scheme)
    state = kind.decompress(format.encode(t), scheme)
    assert torch.equal(state["weight"].float(), t.dequantize().float())
    packed = kind.compress({**state, "weight_scale": t.scale_values()}, scheme)
    again: Any = format.decode(packed, config, "l.weight", torch.bfloat16)
    assert torch.equal(again.dequantize(), t.dequantize()) and torch.equal(again.scale, t.scale)
