"""QAT of convolutions: trained values equal converted ones to the bit, gradients are those of the formulas."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import lowbit as lb
from lowbit import IntxWeightOnly, Scheme, Spec, qat
from lowbit.layers import static_input
from lowbit.layers.frozen import shown_class
from lowbit.numerics.learned_scales import learns_zero
from lowbit.tensor import FakeQuantizedTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from lowbit.tensor.trained.learned_scales import is_learned
from tests.inference.test_conv import (
    OPTIONS,
    RANKS,
    TENSOR,
    conv,
    image,
    inputs,
    is_conv,
    net,
)
from tests.qat.lora_layers import LoraLayer
from tests.qat.test_factors import reference_gradients_of_factors
from tests.qat.test_learned_scales import (
    SPECS,
    moved,
    reference_gradients,
    values,
)
from tests.schemes import over, relative_error, weight_specs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALES = pytest.mark.parametrize("scales", ["present", "learned"])
WITH_INPUTS = {
    "int4-g8": lb.Int4WeightOnly(8),
    "int2": lb.Int2WeightOnly(16),
    "int3-float-zero": IntxWeightOnly(3, 16, "float_zero_point"),
    "int8xint8": Scheme(lb.Int8WeightOnly().weight, TENSOR),
    "int8xint8-static": lb.Int8StaticActivationInt8Weight(),
    "uint8xint4-static": Scheme(
        lb.Int4WeightOnly(8).weight,
        Spec(lb.Int(8, signed=False), lb.PerTensor(), "asymmetric", static=True),
    ),
    "float8-static": lb.Float8StaticActivationFloat8Weight(),
}


def prepared(scheme: Scheme, scales: str = "present", dtype=torch.float32) -> nn.Module:
    model = net().to(dtype)
    qat.prepare_(model, scheme, is_conv, scales=scales)
    if scheme.is_static:
        with lb.calibrate(model):
            model(image().to(dtype))
    return model


def train(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
    for _ in range(steps):
        model(image().to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


OF_SMALL_SCALES = lb.Spec(lb.Float8(), lb.PerTensor(), scale_dtype=torch.bfloat16)
"""The least scale of bfloat16 is zero in float16."""

# ---- exactness ------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    weight_specs(2).filter(lambda spec: not isinstance(spec.format, lb.LookupTable)),
    st.lists(st.integers(1, 7), min_size=3, max_size=4),
    st.sampled_from(DTYPES),
    st.floats(-8, 3),
    st.sampled_from(["present", "learned"]),
    st.integers(0, 2**31),
)
@example(OF_SMALL_SCALES, [1, 1, 1], torch.float16, 0.0, "learned", 0)
def test_trained_values_equal_converted_ones(spec, shape, dtype, magnitude, scales, seed) -> None:
    """For every scheme, scales of any sign and size included, to the bit."""
    n, c, *kernel = shape
    if spec.scales is not None:  # stored in 8 bits, and never learned
        scales = "present"
    module = (nn.Conv1d, nn.Conv2d)[len(kernel) - 1](c, n, tuple(kernel), bias=False)
    module = module.to(dtype)
    module.weight.data = (values(*shape, seed=seed) * 10**magnitude).to(dtype)
    qat.prepare_(module, Scheme(spec), is_conv, scales=scales)
    if scales == "learned":
        changed = moved((module.weight_scale.detach(), getattr(module, "weight_zero", None)), seed)
        for name, value in zip(("weight_scale", "weight_zero"), changed, strict=True):
            if value is not None:
                getattr(module, name).data = value.detach()
        before = module.weight.quantized_by(module.weight_scale, module.weight_zero)
    else:
        before = module.weight.fake_quantized()
        assert torch.equal(before, module.weight.dequantize())
    x = values(2, c, *(k + 3 for k in kernel), seed=seed + 1, dtype=dtype)
    y = module(x)
    qat.convert_(module)
    assert isinstance(module.weight, ConvTensor) and shown_class(module) in (nn.Conv1d, nn.Conv2d)
    assert torch.equal(module.weight.dequantize(), before)
    assert torch.equal(module(x), y) or not y.isfinite().all()


@pytest.mark.cover("pairs")
@SCALES
@over(WITH_INPUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_converts_to_what_was_trained(scheme, scales, dtype) -> None:
    model = train(prepared(scheme, scales, dtype)).eval()
    x = image().to(dtype)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(x)
    report = qat.convert_(model)
    assert len(report.converted) == 4
    assert [shown_class(m) for m in model] == [type(m) for m in net()]
    assert torch.equal(model(x), expected) and expected.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), cast)
    assert not any("scale" in name for name, _ in model.named_parameters())


@pytest.mark.cover("pairs")
@SCALES
@pytest.mark.parametrize("name", ["int8xint8", "uint8xint4-static"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_option_of_a_convolution(options, rank, name, scales) -> None:
    """Also the padding modes: prepared modules round before they pad, and converted weights after it."""
    module, x, scheme = conv(rank, **options), inputs(rank), WITH_INPUTS[name]
    plain = copy.deepcopy(module)
    qat.prepare_(module, scheme, is_conv, scales=scales)
    if scheme.is_static:
        with lb.calibrate(module):
            module(x)
    y = module(x)
    assert relative_error(y, plain(x)) < 0.2
    y.sum().backward()
    for p_name, p in module.named_parameters():
        assert p.grad is not None and p.grad.shape == p.shape, p_name
    qat.convert_(module)
    assert torch.equal(module(x), y)


# ---- gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", ["int4-g8", "int2", "int3-float-zero"])
def test_gradients_with_present_scales(name: str, rank: int) -> None:
    module, scheme = conv(rank, groups=3, stride=2, padding=1), WITH_INPUTS[name]
    wide = copy.deepcopy(module).double()
    qat.prepare_(module, scheme, is_conv)
    wide.weight.data = module.weight.dequantize().double()
    x = inputs(rank).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, y64 = module(x), wide(x64)
    grad = values(*y.shape, seed=7)
    y.backward(grad)
    y64.backward(grad.double())
    assert relative_error(x.grad, x64.grad) < 1e-5
    assert relative_error(module.bias.grad, wide.bias.grad) < 1e-5
    spec, matrix = scheme.weight, module.weight.master().flatten(1)
    codes, _, _ = spec.unclamped_codes(matrix, torch.float32)
    fmt = spec.format
    inside = ((codes >= fmt.quant_min) & (codes <= fmt.quant_max))[:, : matrix.shape[1]]
    expected = wide.weight.grad * inside.view(wide.weight.shape)
    assert relative_error(module.weight.grad, expected) < 1e-5


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", [n for n in SPECS if isinstance(SPECS[n].format, lb.Int)])
def test_gradients_of_learned_scales(name: str, rank: int) -> None:
    """Weight, scale, zero point, input and bias, with some weights outside of the range."""
    spec = SPECS[name]
    module = conv(rank, groups=3, padding="same", padding_mode="reflect")
    wide = copy.deepcopy(module).double()
    qat.prepare_(module, Scheme(spec), is_conv, scales="learned")
    scale, zero = module.weight_scale, module.weight_zero
    assert (zero is not None) == learns_zero(spec)
    with torch.no_grad():
        for p in (scale, zero):
            if p is not None:
                p.mul_(0.6)
    wide.weight.data = module.weight.quantized_by(scale, zero).detach().double()
    x = inputs(rank).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, y64 = module(x), wide(x64)
    grad = values(*y.shape, seed=7)
    y.backward(grad)
    y64.backward(grad.double())
    matrix, seen = module.weight.master().detach().flatten(1), wide.weight.grad.flatten(1)
    # padding of a row has no gradient, and the reference knows no padding
    columns = spec.padded_shape(matrix.shape)[1]
    rows = spec.padded_shape(matrix.shape)[0]
    matrix = torch.nn.functional.pad(
        matrix, (0, columns - matrix.shape[1], 0, rows - matrix.shape[0])
    )
    own = torch.zeros(matrix.shape, dtype=torch.float64)
    own[: seen.shape[0], : seen.shape[1]] = seen
    own_weight, own_scale, own_zero = reference_gradients_of_factors(
        matrix, scale.detach(), None if zero is None else zero.detach(), spec, own
    )
    own_weight = own_weight[: seen.shape[0], : seen.shape[1]].view(module.weight.shape)
    assert 0 < (own_weight == 0).sum() < own_weight.numel()
    assert relative_error(module.weight.grad, own_weight) < 1e-5
    assert relative_error(scale.grad, own_scale) < 1e-4
    if zero is not None:
        assert relative_error(zero.grad, own_zero) < 1e-4
    assert relative_error(x.grad, x64.grad) < 1e-5
    assert relative_error(module.bias.grad, wide.bias.grad) < 1e-5


@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric"])
def test_gradients_of_a_learned_input_scale(mapping: str) -> None:
    activation = Spec(lb.Int(4), lb.PerTensor(), mapping, static=True)
    module, x = conv(2, padding=1), inputs(2)[:, :, :5, :5].contiguous().requires_grad_()
    wide = copy.deepcopy(module).double()
    scheme = Scheme(lb.Int8WeightOnly().weight, activation)
    qat.prepare_(module, scheme, is_conv, scales="learned")
    with lb.calibrate(module, method="minmax"):
        module(x.detach())
    with torch.no_grad():
        module.input_scale.mul_(0.5)
    scale, zero = (
        None if t is None else t.detach().view(1, 1) for t in static_input.inputs_of(module)
    )
    wide.weight.data = module.weight.quantized_by(module.weight_scale, None).detach().double()
    x64 = module.rounded(x).detach().double().requires_grad_()
    y, y64 = module(x), wide(x64)
    grad = values(*y.shape, seed=7)
    y.backward(grad)
    y64.backward(grad.double())
    flat, dynamic = x.detach().view(1, -1), Spec(lb.Int(4), lb.PerTensor(), mapping)
    expected = reference_gradients(flat, scale, zero, dynamic, x64.grad.view(1, -1))
    assert relative_error(x.grad, expected[0].view(x.shape)) < 1e-5
    assert relative_error(module.input_scale.grad, expected[1].view(1)) < 1e-4
    if mapping == "asymmetric":
        assert relative_error(module.input_zero.grad, expected[2].view(1)) < 1e-4


# ---- the flow -------------------------------------------------------------------------------------------------


@SCALES
@over(WITH_INPUTS)
def test_switched_off_and_undone_it_is_the_plain_model(scheme, scales) -> None:
    plain, x = net(), image()
    expected = plain(x)
    expected.sum().backward()
    model = prepared(scheme, scales)
    rounded = model(x)
    qat.disable_(model)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, expected) and not torch.equal(rounded, expected)
    for name, p in plain.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, p.grad), name
    qat.enable_(model)
    assert torch.equal(model(x), rounded)
    qat.enable_(model, activations=False)
    assert torch.equal(model(x), rounded) == (scheme.activation is None)
    with qat.high_precision(model):
        assert torch.equal(model(x), expected)
    memory = model[0].weight.master().data_ptr()
    report = qat.undo_(model)
    assert len(report.converted) == 4 and model[0].weight.data_ptr() == memory
    assert [shown_class(m) for m in model] == [type(m) for m in plain]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(x), expected)


@SCALES
def test_copies_files_and_meta(scales: str) -> None:
    scheme = IntxWeightOnly(3, 16, "asymmetric")
    model, x = train(prepared(scheme, scales)), image()
    y = model(x)
    assert torch.equal(copy.deepcopy(model)(x), y)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    plain = set(net().state_dict())
    assert {name for name in state if "_scale" not in name and "_zero" not in name} == plain
    other = prepared(scheme, scales)
    other.load_state_dict(state)
    assert torch.equal(other(x), y)
    with torch.device("meta"):
        other = net()
    qat.prepare_(other, scheme, is_conv, scales=scales)
    assert other(x.to("meta")).shape == y.shape
    other.to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(other(x), y)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)(x), y)


@pytest.mark.cover("values")
@SCALES
@pytest.mark.parametrize("name", ["int4-g8", "int8xint8", "uint8xint4-static"])
def test_compiled(name: str, scales: str) -> None:
    torch._dynamo.reset()
    model, x = prepared(WITH_INPUTS[name], scales)[:3], image()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for a, b in zip(*results, strict=True):
        assert relative_error(a, b) < 1e-5
    torch._dynamo.reset()


@SCALES
def test_casts_memory_formats_and_empty_batches(scales: str) -> None:
    model, x = prepared(WITH_INPUTS["int8xint8-static"], scales), image()
    y = model(x)
    assert model(x[:0]).shape == (0, *y.shape[1:])
    model(x[:0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    last = x.to(memory_format=torch.channels_last)
    assert model[:4](last).is_contiguous(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    assert torch.equal(model(x), y)
    model.to(torch.bfloat16)
    final = copy.deepcopy(model)
    qat.convert_(final)
    assert final[0].weight.dtype is torch.bfloat16
    assert torch.equal(final(x.bfloat16()), model(x.bfloat16()))
    plain = net().to(memory_format=torch.channels_last)
    expected = plain(last)
    qat.prepare_(plain, lb.Int4WeightOnly(8), is_conv, scales=scales)
    qat.disable_(plain)
    assert relative_error(plain(last), expected) < 1e-6


def test_schemes_by_pattern() -> None:
    mixed = net()
    qat.prepare_(mixed, {"0": lb.Int8WeightOnly(), "5": None, "*": lb.Int4WeightOnly(8)}, is_conv)
    assert mixed[0].weight.scheme == lb.Int8WeightOnly() and type(mixed[5].weight) is nn.Parameter


def test_learned_scales_are_those_of_the_matrix() -> None:
    model = prepared(lb.Int4WeightOnly(8), "learned")
    assert is_learned(model[0].weight)
    assert isinstance(model[0].weight, FakeQuantizedTensor)
    assert model[0].weight.shape == (8, 3, 3, 3) and model[0].weight_scale.shape == (8, 4)
    layer = model[0]
    alone = nn.functional.conv2d(image(), layer.weight, layer.bias, layer.stride, layer.padding)
    assert torch.equal(alone, layer(image()))
    with pytest.raises(NotImplementedError, match="without its scales"):
        nn.functional.conv2d(image(), layer.weight[:4])


def test_tied_convolutions_stay_tied() -> None:
    for scales in ("present", "learned"):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
        model[1].weight = model[0].weight
        qat.prepare_(model, lb.Int8StaticActivationInt8Weight(), is_conv, scales=scales)
        with lb.calibrate(model):
            model(values(2, 4, 9, 9))
        assert model[0].weight is model[1].weight and model[0].input_scale is model[1].input_scale
        y = model(values(2, 4, 9, 9))
        qat.convert_(model)
        assert model[0].weight is model[1].weight
        assert torch.equal(model(values(2, 4, 9, 9)), y)


@SCALES
def test_refused(scales: str) -> None:
    model = net()
    qat.prepare_(model, lb.Int8StaticActivationInt8Weight(), is_conv, scales=scales)
    with pytest.raises(ValueError, match=r"no static scale yet.*calibrate"):
        model(image())
    with pytest.raises(ValueError, match=r"0.weight has no static scale yet"):
        qat.convert_(model)

    class Own(nn.Conv2d):
        def forward(self, x):
            return super().forward(x * 2)

    own = nn.Sequential(Own(3, 4, 3))
    with pytest.raises(ValueError, match="belongs to a Own, which multiplies by itself"):
        qat.prepare_(own, lb.Int8StaticActivationInt8Weight(), is_conv, scales=scales)
    with (
        pytest.raises(ValueError, match=r"Own, whose forward\(\) may change its input"),
        lb.calibrate(own, lb.Int8StaticActivationInt8Weight(), is_conv),
    ):
        pass
    report = qat.prepare_(own, lb.Int4WeightOnly(8), is_conv, scales=scales)
    assert ("present scales, as Own multiplies by itself" in str(report)) == (scales == "learned")
    x = values(2, 3, 6, 6)
    y = own(x)
    qat.convert_(own)
    assert torch.equal(own(x), y)


def test_adapters_of_a_convolution_are_refused_by_name() -> None:
    layer = LoraLayer(nn.Linear(4, 4))
    layer.base_layer = nn.Conv2d(4, 4, 3)
    model = nn.Sequential(layer)
    with pytest.raises(NotImplementedError, match=r"LoRA of a Conv2d.*adapters=\"keep\""):
        qat.prepare_(model, lb.Int4WeightOnly(8), is_conv)


@pytest.mark.gpu
@SCALES
@over({name: WITH_INPUTS[name] for name in ("int4-g8", "int8xint8", "uint8xint4-static")})
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(scheme, scales, dtype) -> None:
    """The product is torch's own on both sides, so a deterministic algorithm gives equal bits."""
    torch.backends.cudnn.deterministic = True
    try:
        model = net().to("cuda", dtype)
        x = image().to("cuda", dtype)
        qat.prepare_(model, scheme, is_conv, scales=scales)
        if scheme.is_static:
            with lb.calibrate(model):
                model(x)
        y = model(x)
        y.float().square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        weights = {i: model[i].weight for i in (0, 2, 3, 5)}
        if scales == "present":
            values_before = {i: w.dequantize() for i, w in weights.items()}
        qat.convert_(model)
        if scales == "present":
            for i, before in values_before.items():
                assert torch.equal(model[i].weight.dequantize(), before)
        assert torch.equal(model(x), y)
    finally:
        torch.backends.cudnn.deterministic = False
