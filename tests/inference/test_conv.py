"""Convolutions with quantized weights: they stay convolutions, and compute what the dequantized ones compute."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.tensor.frozen.conv_tensor import ConvTensor
from tests.schemes import AFFINE, over, relative_error

OPTIONS = {
    "plain": {},
    "no-bias": {"bias": False},
    "strided": {"stride": 2, "padding": 1},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilated": {"dilation": 2, "padding": 2},
    "grouped": {"groups": 3},
    "depthwise": {"groups": 6, "out_channels": 12},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "replicate-same": {"padding": "same", "padding_mode": "replicate", "kernel_size": 4},
    "pointwise": {"kernel_size": 1},
}
RANKS = [1, 2]
TENSOR = lb.Spec(lb.Int(8), lb.PerTensor(), "symmetric_no_clipping_err")
ACTIVATIONS = {
    "int8": TENSOR,
    "uint8-asymmetric": lb.Spec(lb.Int(8, signed=False), lb.PerTensor(), "asymmetric"),
    "e4m3": lb.Spec(lb.Float8(), lb.PerTensor()),
}


def is_conv(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Conv1d | nn.Conv2d)


def conv(rank: int, **options) -> nn.Module:
    torch.manual_seed(0)
    given = {"in_channels": 6, "out_channels": 9, "kernel_size": 3, **options}
    return (nn.Conv1d, nn.Conv2d)[rank - 1](**given)


def inputs(rank: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((2, 6, 11, 13)[: rank + 2], generator=generator).to(dtype)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.Conv2d(8, 5, (3, 1), stride=2, bias=False),
        nn.Flatten(2),
        nn.Conv1d(5, 7, 3),
    )


def quantized(scheme: lb.Scheme, **options) -> nn.Module:
    found = net()
    lb.quantize_(found, scheme, is_conv, **options)
    return found


def image(count=2) -> torch.Tensor:
    return torch.randn(count, 3, 12, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_every_option_of_a_convolution(options: dict, rank: int) -> None:
    module = conv(rank, **options)
    plain, x = copy.deepcopy(module), inputs(rank)
    lb.quantize_(module, lb.Int8WeightOnly(), is_conv)
    assert isinstance(module, type(plain)) and isinstance(module.weight, ConvTensor)
    y = module(x)
    assert relative_error(y, plain(x)) < 0.01
    plain.weight.data = module.weight.dequantize()
    assert torch.equal(y, plain(x)) and repr(module) == repr(plain)


@pytest.mark.cover("values")
@over(AFFINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_weight_is_quantized_as_the_matrix_of_its_rows(scheme: lb.Scheme, dtype) -> None:
    for rank, how in itertools.product(RANKS, ["from_float", "searched"]):
        w = conv(rank).weight.detach().to(dtype)
        found = getattr(ConvTensor, how)(w, scheme)
        matrix = getattr(lb.AffineTensor, how)(w.flatten(1), scheme)
        assert found.shape == w.shape and found.dtype is dtype
        for name, part in matrix.inner_tensors().items():
            assert torch.equal(getattr(found, name), part), name
        assert torch.equal(found.dequantize(), matrix.dequantize().view(w.shape))


@over(AFFINE)
def test_models(scheme: lb.Scheme) -> None:
    """Minimum and searched scales, state dicts and files of every kind, and the way back."""
    found, x = quantized(scheme, scales="searched"), image()
    y = found(x)
    other = quantized(scheme)
    other.load_state_dict(found.state_dict())
    assert torch.equal(other(x), y)
    buffer = io.BytesIO()
    torch.save(found.state_dict(), buffer)
    other = quantized(scheme)
    other.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    assert torch.equal(other(x), y)
    with torch.device("meta"):
        other = net()
    lb.quantize_(other, scheme, is_conv)
    assert other(image().to("meta")).shape == y.shape
    other.to_empty(device="cpu").load_state_dict(found.state_dict())
    assert torch.equal(other(x), y)
    with torch.inference_mode():
        assert torch.equal(found(x), y)
    report = lb.dequantize_(found)
    assert len(report.converted) == 4 and type(found[0].weight) is nn.Parameter
    assert torch.equal(found(x), y)


@over({name: AFFINE[name] for name in ("int4-g8", "float8", "int5-blocks", "int4-tensor")})
def test_files(scheme: lb.Scheme, tmp_path) -> None:
    found, x, path = quantized(scheme), image(), tmp_path / "model.safetensors"
    lb.save(found, path)
    other = net()
    other.load_state_dict(lb.load(path), assign=True)
    assert isinstance(other[0].weight, ConvTensor) and torch.equal(other(x), found(x))
    buffer = io.BytesIO()
    torch.save(found[2].weight, buffer)
    again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert torch.equal(again.dequantize(), found[2].weight.dequantize())


def test_a_damaged_file_is_refused() -> None:
    found = ConvTensor.from_float(conv(2).weight.detach(), lb.Int4WeightOnly(8))
    kwargs = {**found.inner_tensors(), "codes": found.codes[:, :-1]}
    with pytest.raises(ValueError, match="codes"):
        ConvTensor.from_inner(kwargs, found.meta(), found.shape, found.dtype).check_parts()


@pytest.mark.parametrize("activation", list(ACTIVATIONS.values()), ids=list(ACTIVATIONS))
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_dynamic_activations_round_the_input(activation: lb.Spec, options: dict) -> None:
    module, x = conv(2, **options), inputs(2)
    plain = copy.deepcopy(module)
    lb.quantize_(module, lb.Scheme(lb.Int8WeightOnly().weight, activation), is_conv)
    plain.weight.data = module.weight.dequantize()
    assert torch.equal(module(x), plain(activation.fake_quantize(x)))


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_static_activations(options: dict) -> None:
    module, x = conv(2, **options), inputs(2)
    plain, scheme = copy.deepcopy(module), lb.Int8StaticActivationInt8Weight()
    with pytest.raises(ValueError, match="no static scale yet"):
        lb.quantize_(module, scheme, is_conv)
    with lb.calibrate(module, scheme, is_conv, method="minmax") as ranges:
        module(x / 2)
        module(x)
    assert ranges["weight"] == pytest.approx((float(x.min()), float(x.max())))
    lb.quantize_(module, scheme, is_conv)
    assert "input_scale" not in module._buffers and module.weight.input_scale.shape == (1, 1)
    y = module(x)
    assert relative_error(y, plain(x)) < 0.02
    plain.weight.data = module.weight.dequantize()
    assert torch.equal(y, plain(module.weight.rounded_input(x)))
    other = copy.deepcopy(module)
    assert torch.equal(other(x), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_and_autocast(dtype) -> None:
    found, x = quantized(lb.Int4WeightOnly(8)), image()
    plain = copy.deepcopy(found)
    lb.dequantize_(plain)
    with torch.autocast("cpu", dtype):
        y = found(x)
        assert y.dtype is dtype and torch.equal(y, plain(x))
    codes = found[0].weight.codes.clone()
    found.to(dtype)
    assert found[0].weight.dtype is dtype and torch.equal(found[0].weight.codes, codes)
    assert found(x.to(dtype)).dtype is dtype
    with pytest.raises(ValueError, match=r"convolution of a torch\.float32 input"):
        found(x)


def test_memory_formats() -> None:
    """The result has the format of the input. `to(memory_format=…)` leaves codes as they are."""
    found, x = quantized(lb.Int4WeightOnly(8))[:4], image()
    y = found(x)
    last = x.to(memory_format=torch.channels_last)
    assert found(last).is_contiguous(memory_format=torch.channels_last)
    assert relative_error(found(last), y) < 1e-6
    found.to(memory_format=torch.channels_last)
    assert torch.equal(found(x), y)
    plain = net().to(memory_format=torch.channels_last)
    assert not plain[0].weight.is_contiguous()
    lb.quantize_(plain, lb.Int4WeightOnly(8), is_conv)
    assert torch.equal(plain[0].weight.codes, found[0].weight.codes)


def test_empty_batches_and_inputs_without_a_batch() -> None:
    found = quantized(lb.Scheme(lb.Int4WeightOnly(8).weight, TENSOR))
    assert found(image()[:0]).shape == (0, *found(image()).shape[1:])
    assert found[0](image()[0]).shape == (8, 12, 10)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("int4-g8", "aot_eager"),
        ("float8", "aot_eager"),
        ("int4-g16-float-zero", "aot_eager"),
        pytest.param("int4-g8", "inductor", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    torch._dynamo.reset()
    found, x = quantized(AFFINE[name]), image()
    compiled = torch.compile(found, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert relative_error(compiled(x), found(x)) < 1e-5
    torch._dynamo.reset()


def test_gradients_reach_the_input_and_the_bias() -> None:
    found = quantized(lb.Int4WeightOnly(8))
    plain = copy.deepcopy(found)
    lb.dequantize_(plain)
    plain.double()
    x = image().requires_grad_()
    found(x).square().sum().backward()
    wide = x.detach().double().requires_grad_()
    plain(wide).square().sum().backward()
    assert relative_error(x.grad, wide.grad) < 1e-5
    for name, p in found.named_parameters():
        if name.endswith("bias"):
            assert relative_error(p.grad, plain.get_parameter(name).grad) < 1e-5, name
        else:
            assert p.grad is None and not p.requires_grad, name


def test_rows_slices_and_writes() -> None:
    w = ConvTensor.from_float(conv(2).weight.detach(), lb.Int4WeightOnly(8))
    values = w.dequantize()
    assert torch.equal(w[3], values[3]) and torch.equal(w[-1], values[-1])
    assert torch.equal(w[2:5].dequantize(), values[2:5])
    assert torch.equal(torch.cat(w.split(4)).dequantize(), values)
    assert torch.equal(torch.stack(list(w.unbind())), values)
    assert torch.equal(w[torch.tensor([7, 1])].dequantize(), values[[7, 1]])
    assert torch.equal(w.view(-1).view(w.shape).dequantize(), values)
    assert torch.equal(w.norm(), values.norm()) and torch.equal(w + 1, values + 1)
    for matrix in (w.view(9, -1), w.flatten(1), w.reshape(9, 54)):
        x = torch.randn(5, 54)
        assert type(matrix) is lb.AffineTensor and torch.equal(
            matrix.dequantize(), values.view(9, 54)
        )
        exact = F.linear(x.double(), values.double().view(9, 54))
        assert relative_error(F.linear(x, matrix), exact) < 1e-6
    with pytest.warns(UserWarning, match="rounded to its own codes"):
        w += 0.1
    assert abs(float((w.dequantize() - values).mean()) - 0.1) < 0.01
    for refused in (
        lambda: w.transpose(0, 1),
        lambda: w.mT,
        lambda: w[:, 1:],
        lambda: w.view(54, 9),
        lambda: w.view(9, 6, 9),
        lambda: w.flatten(0, 1),
    ):
        with pytest.raises(NotImplementedError, match=r"ConvTensor.*dequantize"):
            refused()
    with pytest.raises(NotImplementedError, match=r"aten\.convolution"):
        F.conv_transpose2d(torch.randn(1, 9, 4, 4), w)
    with pytest.raises(NotImplementedError, match="only the weight, the second"):
        F.conv2d(w, torch.randn(2, 6, 3, 3))
    with pytest.raises(ValueError, match="linear takes a weight"):
        F.linear(torch.randn(2, 54), w)


def test_tied_convolutions_stay_tied() -> None:
    found = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    found[1].weight = found[0].weight
    report = lb.quantize_(found, lb.Int8WeightOnly(), is_conv)
    assert found[1].weight is found[0].weight and "tied to 0.weight" in str(report)


def test_the_report_and_who_chooses_convolutions() -> None:
    """The filter, or a pattern that names them, chooses convolutions, as it chooses embeddings."""
    found = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4))
    report = lb.quantize_(found, lb.Int8WeightOnly())
    assert report.converted == ["2.weight"]
    assert report.left == {"0.weight": "a convolution: a pattern that names it converts it"}
    report = lb.quantize_(found, lb.Int4WeightOnly(32), is_conv)
    assert report.converted == ["0.weight"] and "padded to 8x32, 1.19 times" in str(report)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv1d(8, 8, 3), nn.Linear(8, 4))
    schemes = {"0": lb.Int8WeightOnly(), "1": None, "*": lb.Int4WeightOnly(8)}
    report = lb.quantize_(model, schemes, lambda module, name: True)
    assert report.converted == ["0.weight", "2.weight"]
    assert report.left == {"1.weight": "no scheme for this name"}


PER_TOKEN = {
    "int8": lb.Int8DynamicActivationInt8Weight(),
    "int4": lb.Int8DynamicActivationInt4Weight(8),
    "float8": lb.Float8DynamicActivationFloat8Weight(),
    "groups": lb.Scheme(lb.Int8WeightOnly().weight, lb.Spec(lb.Int(8), lb.PerGroup(4))),
}


@over(PER_TOKEN)
def test_activations_with_scales_for_tokens_are_refused(scheme: lb.Scheme) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3))
    why = r"0.weight: the input of a convolution has no rows.*accepted: a weight-only scheme"
    for flow in (lb.quantize_, lb.qat.prepare_):
        with pytest.raises(ValueError, match=why):
            flow(model, scheme, is_conv)
    model.append(nn.Linear(8, 4))
    report = lb.quantize_(model, scheme, lambda module, name: True)
    assert report.converted == ["1.weight"] and "PerTensor()" in report.left["0.weight"]


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.Conv3d])
def test_other_convolutions_are_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.Sequential(kind(3, 3, 3), nn.Linear(3, 3))
    why = f"0.weight: no low-bit product for {kind.__name__}"
    for flow in (lb.quantize_, lb.qat.prepare_):
        with pytest.raises(ValueError, match=why):
            flow(model, lb.Int8WeightOnly(), lambda module, name: name == "0")
        with pytest.raises(ValueError, match=why):
            schemes = {"0": lb.Int8WeightOnly(), "*": lb.Int4WeightOnly(8)}
            flow(model, schemes, lambda module, name: True)
    report = lb.quantize_(model, lb.Int8WeightOnly(), lambda module, name: True)
    assert report.left == {"0.weight": why.removeprefix("0.weight: ")}


def test_training_schemes_leave_convolutions_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8))
    report = lb.train.prepare_(model, lb.train.Int8MixedPrecision(), lambda module, name: True)
    assert report.left["0.weight"] == "no low-bit product for Conv2d"


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="at least 3 dimensions"):
        lb.quantize_(conv(2), lb.Scheme(lb.Spec(lb.Int(4), lb.PerBlock(1, 3, 3))), is_conv)
    with pytest.raises(ValueError, match=r"accepted: \[N, C/groups, k\]"):
        ConvTensor.from_float(torch.randn(4, 4), lb.Int8WeightOnly())
    module = conv(2)
    with torch.no_grad():
        module.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="1 NaN or infinite values"):
        lb.quantize_(module, lb.Int8WeightOnly(), is_conv)
    with pytest.raises(ValueError, match="has no shape yet"):
        lb.quantize_(nn.Sequential(nn.LazyConv2d(4, 3)), lb.Int8WeightOnly(), is_conv)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3)
            self.experts = self.conv.weight

    with pytest.raises(ValueError, match="one weight of a convolution and of another module"):
        lb.quantize_(Shared(), lb.Int8WeightOnly(), lambda module, name: True)


def test_weights_computed_from_others_are_reported() -> None:
    parametrized = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    model = nn.Sequential(parametrized, nn.Linear(4, 4))
    report = lb.quantize_(model, lb.Int8WeightOnly(), lambda module, name: True)
    assert report.converted == ["1.weight"]
    assert report.left["0.weight"] == "computed from other parameters, so none to convert"


def test_a_parameter_beside_the_weight_is_no_weight_of_the_convolution() -> None:
    class Adapted(nn.Conv2d):
        def __init__(self) -> None:
            super().__init__(4, 4, 3)
            self.down = nn.Parameter(torch.randn(2, 16))

    model = nn.Sequential(Adapted())
    report = lb.quantize_(model, lb.Int8WeightOnly(), is_conv)
    assert report.converted == ["0.weight"] and type(model[0].down) is nn.Parameter
    lb.quantize_(model, {"0.down": lb.Int8WeightOnly()}, is_conv)
    assert type(model[0].down) is lb.AffineTensor and isinstance(model[0].weight, ConvTensor)


def test_the_trace_names_convolutions() -> None:
    found = quantized(lb.Scheme(lb.Int4WeightOnly(8).weight, TENSOR))
    products = {p.layer: p for p in lb.trace(found, image(), backward=False).products}
    first = products["0"]
    assert (first.m, first.n, first.k) == (2 * 12 * 10, 8, 27)
    assert first.weight == "int4-g8-int8-tensor" and first.ran_in == "float32"
    assert first.why == "rounded values, multiplied in high precision"
    assert products["5"].n == 7 and products["5"].k == 15
    lone = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": found[0]})
    lone.forward = lambda x: lone["used"](x)  # type: ignore[method-assign]
    rest = [p for p in lb.trace(lone, torch.randn(2, 3)).products if p.layer == "unused"]
    assert [(p.m, p.n, p.k) for p in rest] == [(0, 8, 27)]


@pytest.mark.gpu
@over(AFFINE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(scheme: lb.Scheme, dtype) -> None:
    found, x = quantized(scheme).to("cuda", dtype), image().to("cuda", dtype)
    values = quantized(scheme).to(dtype)[0].weight.dequantize()
    assert torch.equal(found[0].weight.dequantize().cpu(), values)
    plain = copy.deepcopy(found)
    lb.dequantize_(plain)
    assert torch.equal(found(x), plain(x))
    last = x.to(memory_format=torch.channels_last)
    assert relative_error(found(last), plain(x)) < 2e-2
    with pytest.raises(ValueError, match="an input on cpu with a weight on cuda"):
        found(x.cpu())
