"""Static scales of activations: observers, calibration, conversion, products and checkpoints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.layers.static_input import StaticInput
from lowbit.linear.frozen import choose_linear
from lowbit.linear.frozen.eight_bits import static_linear
from lowbit.numerics.granularity import PerGroup, PerRow, PerTensor
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tracing.observer import BINS, Observer
from lowbit_kernels.runtime import launches
from tests.schemes import relative_error

INT8 = lb.Int8StaticActivationInt8Weight()
FLOAT8 = lb.Float8StaticActivationFloat8Weight()
ROW8 = Spec(Int(8), PerRow(), "symmetric_no_clipping_err")


def static(fmt, mapping="symmetric"):
    return Spec(fmt, PerTensor(), mapping, static=True)


SCHEMES = {
    "int8xint8": INT8,
    "int8xint8-asymmetric": Scheme(ROW8, static(Int(8), "asymmetric")),
    "int4xint8": Scheme(ROW8, static(Int(4), "asymmetric")),
    "uint8xint8": Scheme(ROW8, static(Int(8, signed=False), "asymmetric")),
    "int8xint8-float-zero": Scheme(ROW8, static(Int(8), "float_zero_point")),
    "int8xint4": Scheme(lb.Int4WeightOnly(32).weight, static(Int(8), "asymmetric")),
    "float8xfloat8": FLOAT8,
    "e5m2xe4m3": Scheme(FLOAT8.weight, static(Float8(torch.float8_e5m2))),
}
IN_INT8 = ["int8xint8", "int8xint8-asymmetric", "int4xint8"]
over_schemes = pytest.mark.parametrize("scheme", list(SCHEMES.values()), ids=list(SCHEMES))
METHODS = ["minmax", "squared_error"]


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model(k=64, n=33, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, 40), nn.ReLU(), nn.Linear(40, n)).to(dtype)


def quantized(scheme, k=64, n=33, dtype=torch.float32, **options):
    found = model(k, n, dtype)
    with lb.calibrate(found, scheme, **options):
        for seed in range(3):
            found(values(30, k, seed=seed, dtype=dtype))
    lb.quantize_(found, scheme)
    return found


def observed(batches, spec=INT8.activation, method="minmax", **options):
    found = Observer(spec, method, **options)
    for x in batches:
        found.observe(x)
    return found


# ---- observers --------------------------------------------------------------------------------------------------


def test_minmax():
    found = observed([values(7, 5), 3 * values(2, 3, 4, seed=1)])
    every = torch.cat([values(7, 5).flatten(), 3 * values(2, 3, 4, seed=1).flatten()])
    assert found.range().tolist() == [every.min().item(), every.max().item()]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("mapping", ["symmetric_no_clipping_err", "asymmetric"])
def test_squared_error(bits, mapping):
    """No range of a fine brute-force search is better by more than 2%, and outliers do not widen the range."""
    spec = static(Int(bits), mapping)
    x = values(50_000) + 0.3
    x[:5] *= 60

    def error(ends):
        found = Spec(spec.format, PerTensor(), mapping).choose_qparams(ends, torch.float32)
        return (spec.fake_quantize_by(x, *found) - x).double().square().sum().item()

    ends = torch.stack([x.min(), x.max()])
    found = error(observed([x], spec, "squared_error").range())
    best = min(error(ends * r) for r in torch.linspace(0.005, 1, 400))
    assert found <= 1.02 * best
    assert found < 0.95 * error(ends)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1.0, 1e30])
def test_order_and_division_of_batches_do_not_matter(method, size):
    x = size * values(96, 7)
    whole = observed([x], method=method).range()
    parts = observed(list(x.flip(0).split(5)), method=method).range()
    assert torch.equal(whole, parts)
    assert whole[0] < 0 < whole[1]


def test_a_histogram_counts_every_finite_value():
    found = observed([values(100), torch.zeros(5), torch.tensor([torch.inf, torch.nan, 1.0])],
                     method="squared_error")  # fmt: skip
    assert found.counts.sum() == 106 and len(found.counts) == BINS
    assert found.nonfinite == 2 and found.batches == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spec", [INT8.activation, static(Int(4), "asymmetric")], ids=str)
def test_zeros_constants_and_nothing(method, spec):
    assert observed([torch.zeros(9)], spec, method).range().tolist() == [0, 0]
    low, high = observed([torch.full((9,), 2.5)], spec, method).range().tolist()
    assert low == 0 and high == pytest.approx(2.5, rel=0.05)
    assert observed([torch.empty(0, 3)], spec, method).batches == 0


def test_other_dtypes_and_strides():
    x = values(8, 6)
    for given in (x.t(), x[:, ::2], x.double(), x.bfloat16(), x.half()):
        ends = torch.stack([given.min(), given.max()]).float()
        assert torch.equal(observed([given]).range(), ends)


def test_an_unknown_method():
    message = "unknown method 'max'; accepted: 'minmax', 'squared_error'"
    with pytest.raises(ValueError, match=message), lb.calibrate(model(), INT8, method="max"):
        pass


# ---- calibration ------------------------------------------------------------------------------------------------


def test_a_layer_that_saw_no_batch():
    found = model()
    with (
        pytest.raises(ValueError, match=r"inputs of 2 \(1 of 2 layers\) .* saw no batch"),
        lb.calibrate(found, INT8),
    ):
        found[0](values(3, 64))
    assert not [*found.buffers()] and len([*found.modules()]) == 4
    with pytest.raises(ValueError, match=r"the input of 0\.weight has no static scale yet"):
        lb.quantize_(found, INT8)
    assert type(found[0].weight) is nn.Parameter


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("method", METHODS)
def test_nan_and_infinite_inputs(bad, method):
    found, x = model(), values(3, 64)
    x[1, 2] = bad
    with (
        pytest.raises(ValueError, match=r"inputs of 0.*saw NaN or infinite values. Find the batch"),
        lb.calibrate(found, INT8, method=method),
    ):
        found(x)


def test_quantized_by_another_scheme_than_calibrated():
    found = model()
    with lb.calibrate(found, INT8):
        found(values(3, 64))
    with pytest.raises(ValueError, match=r"0\.weight was calibrated for another scheme"):
        lb.quantize_(found, FLOAT8)
    lb.quantize_(found, INT8)
    assert not [*found.buffers()]


def test_a_dynamic_scheme_and_a_plain_model_without_one():
    with (
        pytest.raises(ValueError, match="has no static activation to calibrate"),
        lb.calibrate(model(), lb.Int8DynamicActivationInt8Weight()),
    ):
        pass
    with (
        pytest.raises(ValueError, match="Sequential has no prepared weight with a static"),
        lb.calibrate(model()),
    ):
        pass


def test_one_calibration_at_a_time():
    found = model()
    with lb.calibrate(found, INT8):
        found(values(3, 64))
        with pytest.raises(ValueError, match="is being calibrated already"), lb.calibrate(
            found, INT8
        ):  # fmt: skip
            pass


def test_patterns_and_keywords():
    found = model()
    schemes = {"0": INT8, "2": lb.Int4WeightOnly(32)}
    with lb.calibrate(found, schemes) as ranges:
        found[0](input=values(3, 64))
    assert [*ranges] == ["0"]
    report = lb.quantize_(found, schemes)
    assert "static" in report.entries[0].note and "static" not in report.entries[1].note


def test_eval_and_inference_mode():
    found = model().eval()
    with lb.calibrate(found, INT8) as ranges, torch.inference_mode():
        found(values(3, 64))
    assert len(ranges) == 2
    lb.quantize_(found, INT8)
    assert found(values(3, 64)).isfinite().all()


# ---- products -----------------------------------------------------------------------------------------------------


def reference(x, weight, bias):
    """The rounded input times the dequantized weight, in float64."""
    spec, scale = weight.activation, weight.input_scale
    codes = spec.quantize(x, qparams=(scale, weight.input_zero_point))[0]
    rounded = spec.dequantize(codes, scale, weight.input_zero_point, x.shape, torch.float64)
    wide = weight._with(dtype=torch.float64).dequantize()
    return F.linear(rounded, wide, bias.double())


@pytest.mark.cover("pairs")
@over_schemes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [64, 67, 1])
def test_products(scheme, dtype, k):
    layer = quantized(scheme, k, dtype=dtype)[0]
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for shape in [(3, k), (2, 5, k), (k,), (0, k), (4, 3, 0, k)]:
        x = values(*shape, seed=7, dtype=dtype)
        expected = reference(x, layer.weight, layer.bias) if x.numel() else x.new_empty(0)
        y = layer(x)
        assert y.dtype is dtype and y.shape == (*shape[:-1], 40)
        if x.numel():
            assert relative_error(y, expected) < tolerance
    x = values(k, 9, seed=8, dtype=dtype).t()
    assert relative_error(layer(x), reference(x, layer.weight, layer.bias)) < tolerance


@over_schemes
def test_values_far_outside_of_the_range_and_nan(scheme):
    layer = quantized(scheme)[0]
    x = values(4, 64)
    x[0] *= 1e6
    assert relative_error(layer(x), reference(x, layer.weight, layer.bias)) < 1e-6
    assert layer(0 * x).isfinite().all()


@over_schemes
@pytest.mark.parametrize("prepared", [None, "present", "learned"])
def test_a_nan_stays_in_its_token(scheme, prepared):
    """No integer code says NaN, and an output of 0 would hide it. Converted and prepared layers agree."""
    found = model()
    with lb.calibrate(found, scheme):
        found(values(30, 64))
    if prepared is None:
        lb.quantize_(found, scheme)
    else:
        lb.qat.prepare_(found, scheme, scales=prepared)
    x = values(2, 3, 64)
    expected = found(x)
    x[0, 1, 5] = torch.nan
    y = found(x)
    assert y[0, 1].isnan().all()
    for row in [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]:
        assert torch.equal(y[row], expected[row])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["int8xint8", "float8xfloat8"])
def test_a_nan_stays_in_its_token_on_a_gpu(name, dtype):
    found = quantized(SCHEMES[name], n=48, dtype=dtype).cuda()
    x = values(40, 64, dtype=dtype).cuda()
    expected = found(x)
    x[7, 5] = torch.nan
    y = found(x)
    assert y[7].isnan().all() and not y[8:].isnan().any()
    torch.testing.assert_close(y[8:], expected[8:])


@pytest.mark.parametrize("name", IN_INT8)
def test_int8_products_run_in_int8(name):
    found = quantized(SCHEMES[name])
    found = [p for p in lb.trace(found, values(5, 64)).products if p.product == "output"]
    assert len(found) == 2
    assert {p.ran_in for p in found} == {"int8"}
    assert {p.implementation for p in found} == {"int8_static_linear"}
    assert found[0].weight.startswith("int8-row-int") and "-static" in found[0].weight


def test_sums_that_int32_does_not_hold():
    """With a zero point two sums are subtracted, so that half as many terms fit."""
    most_k = 131_071
    for scheme, k, row in [
        (INT8, most_k, "int8_static_linear"),
        (INT8, most_k + 1, "cpu_linear"),
        (SCHEMES["int8xint8-asymmetric"], most_k // 2, "int8_static_linear"),
        (SCHEMES["int8xint8-asymmetric"], most_k // 2 + 1, "cpu_linear"),
    ]:
        zero = torch.tensor([127], dtype=torch.int8) if scheme.activation.has_zero_point else None
        w = torch.ones(1, k)
        weight = lb.AffineTensor.from_float(w, scheme, input_qparams=(torch.ones(1), zero))
        x = torch.full((1, k), -1e4)
        assert choose_linear(x, weight).name == row
        bias = torch.zeros(1)
        assert relative_error(F.linear(x, weight, bias), reference(x, weight, bias)) < 1e-5


@over_schemes
def test_gradients_reach_the_input(scheme):
    layer = quantized(scheme)[0]
    x = values(5, 64).requires_grad_()
    layer(x).backward(grad := values(5, 40, seed=2))
    torch.testing.assert_close(x.grad, grad @ layer.weight.dequantize())


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("int8xint8", "aot_eager", marks=pytest.mark.exhaustive),
        ("int8xint8-asymmetric", "inductor"),
        ("float8xfloat8", "aot_eager"),
    ],
)
def test_compiled(name, backend):
    found = quantized(SCHEMES[name])
    torch._dynamo.reset()
    compiled = torch.compile(found, fullgraph=True, backend=backend)
    x = values(6, 64)
    assert relative_error(compiled(x), found(x)) < 1e-5


@pytest.mark.parametrize("name", ["int8xint8", "float8xfloat8", "e5m2xe4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_product_of_gpus(name, dtype):
    """Its op runs on a CPU too."""
    weight, bias = quantized(SCHEMES[name], dtype=dtype)[0].parameters()
    for shape in [(3, 64), (2, 5, 64), (64,)]:
        x = values(*shape, seed=7, dtype=dtype)
        with launches.counted() as calls, torch.no_grad():
            y = static_linear(x, weight, bias)
        assert sum(n for (op, _), n in calls.items() if op == "scaled_mm") == 1
        assert y.dtype is dtype and y.shape == (*shape[:-1], 40)
        bound = 1e-6 if dtype is torch.float32 else 5e-3
        assert relative_error(y, reference(x, weight, bias)) < bound


@pytest.mark.gpu
@over_schemes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_on_a_gpu(scheme, dtype):
    found = quantized(scheme, n=48, dtype=dtype).cuda()
    is_float8 = scheme.weight == FLOAT8.weight
    tolerance = {torch.float32: 1e-3 if is_float8 else 1e-5, torch.float16: 2e-3}.get(dtype, 2e-2)
    for layer, k in ((found[0], 64), (found[2], 40)):
        for shape in [(3, k), (2, 33, k), (k,), (0, k)]:
            x = values(*shape, seed=7, dtype=dtype).cuda()
            y = layer(x)
            assert y.shape == (*shape[:-1], layer.out_features)
            if x.numel():
                assert relative_error(y, reference(x, layer.weight, layer.bias)) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "format"), [(INT8, "int8"), (FLOAT8, "e4m3")])
def test_static_products_run_in_low_bits_on_a_gpu(scheme, format):
    if format == "e4m3" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs float8 units")
    found, x = nn.Linear(64, 48).cuda().bfloat16(), values(20, 64).cuda().bfloat16()
    with lb.calibrate(found, scheme):
        found(x)
    lb.quantize_(found, scheme)
    with launches.counted() as calls:
        found(x)
    assert sum(n for (op, _), n in calls.items() if op == "scaled_mm") == 1
    trace = lb.trace(found, x)
    assert trace.products[0].ran_in == format
    assert trace.products[0].implementation.startswith("static_linear")


# ---- stored weights ---------------------------------------------------------------------------------------------


@over_schemes
def test_checkpoints(scheme, tmp_path):
    found = quantized(scheme)
    path = tmp_path / "model.safetensors"
    lb.save(found, path)
    again = model()
    again.load_state_dict(lb.load(path), assign=True)
    x = values(5, 64)
    assert torch.equal(again(x), found(x))
    assert again[0].weight.activation == scheme.activation


def test_state_dicts():
    found = quantized(SCHEMES["int8xint8-asymmetric"])
    state = found.state_dict()
    names = {"codes", "scale", "input_scale", "input_zero_point"}
    assert {k for k in state if k.startswith("0.w")} == {f"0.weight.{name}" for name in names}
    other = quantized(SCHEMES["int8xint8-asymmetric"], method="minmax")
    other.load_state_dict(state)
    x = values(5, 64)
    assert torch.equal(other(x), found(x))
    del state["0.weight.input_scale"]
    with pytest.raises(RuntimeError, match="lacks input_scale"):
        other.load_state_dict(state)


def test_a_file_without_the_scale_is_refused(tmp_path):
    found = quantized(INT8)
    torch.save(found.state_dict(), tmp_path / "state.pt")
    weight = found[0].weight
    with pytest.raises(ValueError, match="has no input_scale"):
        weight._with({"codes": weight.codes, "scale": weight.scale}).check_parts()
    with pytest.raises(ValueError, match=r"no scale of the input is given: call lowbit\.calibrate"):
        lb.AffineTensor.from_float(values(4, 8), INT8)


def test_moves_casts_and_slices_keep_the_scale():
    weight = quantized(INT8)[0].weight.detach()
    for other in (
        weight.to(torch.bfloat16),
        weight.clone(),
        weight[3:7],
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        weight.new_zeros((5, 64)),
        torch.cat([weight[:8], weight[8:]]),
    ):
        assert torch.equal(other.input_scale, weight.input_scale)
        assert other.input_scale.dtype is torch.float32
    other = lb.AffineTensor.from_float(values(4, 64), INT8, input_qparams=(torch.ones(1), None))
    with pytest.raises(NotImplementedError, match="different static scales of their inputs"):
        torch.cat([weight, other])


# ---- schemes ------------------------------------------------------------------------------------------------------


@over_schemes
def test_schemes_as_json(scheme):
    assert Scheme.from_dict(scheme.to_dict()) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert scheme.is_static and scheme.to_dict()["activation"]["static"] is True


def test_schemes_of_earlier_files():
    dynamic = Scheme(ROW8, Spec(Int(8), PerTensor()))
    described = dynamic.to_dict()
    assert "static" not in described["activation"] and "static" not in described["weight"]
    assert Scheme.from_dict(described) == dynamic
    state = {k: v for k, v in dynamic.activation.__dict__.items() if k != "static"}
    old = Spec.__new__(Spec)
    old.__dict__.update(state)  # as an earlier pickle does
    assert old == dynamic.activation and hash(old) == hash(dynamic.activation)


def test_specs_that_are_refused():
    with pytest.raises(ValueError, match=r"must be PerTensor\(\), got PerGroup"):
        Spec(Int(8), PerGroup(32), static=True)
    with pytest.raises(TypeError, match="static must be True or False, got 1"):
        Spec(Int(8), PerTensor(), static=1)
    with pytest.raises(ValueError, match="static=True is for activations"):
        Scheme(INT8.activation)
    with pytest.raises(ValueError, match="is static: its scale belongs to the layer"):
        INT8.activation.fake_quantize(values(3, 4))


def cast(net):
    """A copy in bfloat16, whose buffers of floats have the bits and the dtype that they had."""
    held = {n: b.clone() for n, b in net.named_buffers() if b.is_floating_point()}
    assert len(held) >= 2 and all(b.dtype is torch.float32 for b in held.values())
    low = pickle.loads(pickle.dumps(copy.deepcopy(net))).to(torch.bfloat16)
    assert low[0].weight.dtype is torch.bfloat16
    found = dict(low.named_buffers())
    for name, buffer in held.items():  # NaN before the end of a calibration
        torch.testing.assert_close(found[name], buffer, rtol=0, atol=0, equal_nan=True)
    return low


@pytest.mark.parametrize("mapping", ["symmetric", "float_zero_point"])
@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
def test_casts_leave_static_scales_in_float32(is_prepared, mapping):
    """And what observers saw. A model that is cast before its conversion gets the scales of one that is not."""
    scheme = Scheme(ROW8, static(Int(8), mapping))
    net = model()
    if is_prepared:
        lb.qat.prepare_(net, scheme)
    with lb.calibrate(net, None if is_prepared else scheme):
        net(values(30, 64))
        cast(net)
    low = cast(net)
    for one in (net, low):
        lb.qat.convert_(one) if is_prepared else lb.quantize_(one, scheme)
        assert not [*one.named_buffers()] and not isinstance(one[0], StaticInput)
    for own, other in ((net[0].weight, low[0].weight), (net[2].weight, low[2].weight)):
        assert own.input_scale.dtype is other.input_scale.dtype is torch.float32
        assert torch.equal(own.input_scale, other.input_scale)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_casts_leave_learned_scales_of_inputs_in_float32(cast):
    """As a model that is cast before `prepare_` has them, with their gradients; both of them start alike."""
    scheme = Scheme(ROW8, static(Int(8), "float_zero_point"))
    net = model()
    lb.qat.prepare_(net, scheme, scales="learned")
    with lb.calibrate(net):
        net(values(30, 64))
    net(values(30, 64)).square().sum().backward()
    own = {n: p for n, p in net.named_parameters() if "input_" in n}
    before = {n: (p.detach().clone(), p.grad.clone()) for n, p in own.items()}
    assert len(before) == 4
    getattr(net, cast)()
    assert net[0].weight_scale.dtype is net[0].weight.dtype is net[0].weight.grad.dtype
    assert net[0].weight.dtype is not torch.float32
    for name, p in own.items():
        assert net.get_parameter(name) is p and p.dtype is p.grad.dtype is torch.float32
        assert torch.equal(p, before[name][0]) and torch.equal(p.grad, before[name][1])
    lb.qat.convert_(net)
    assert net[0].weight.input_scale.dtype is torch.float32


class Tagged(nn.Linear):
    """A layer whose subclasses need an argument, so that it gets no stand-in class."""

    def __init_subclass__(cls, *, tag, **others):
        super().__init_subclass__(**others)


def test_a_layer_that_refuses_subclasses():
    net = nn.Sequential(Tagged(64, 33))
    with lb.calibrate(net, INT8):
        net(values(30, 64))
    assert type(net[0]) is Tagged
    lb.quantize_(net, INT8)
    assert net[0].weight.input_scale.item() > 0 and net(values(3, 64)).shape == (3, 33)


def test_weights_in_learned_scales_beside_a_scale_of_inputs():
    """The scale of a calibration that the scheme of `prepare_` does not use stays, and hides no layer from it."""
    net = model()
    with lb.calibrate(net, INT8):
        net(values(30, 64))
    lb.qat.prepare_(net, lb.Int4WeightOnly(8), scales="learned")
    assert {"weight_scale"} <= {*dict(net[0].named_parameters())}
    expected = net(values(3, 64))
    lb.qat.convert_(net)
    torch.testing.assert_close(net(values(3, 64)), expected)
