"""QAT with static scales of activations: calibrated, then frozen or learned, and converted to what was trained."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import lowbit
from lowbit import (
    Float8,
    Float8StaticActivationFloat8Weight,
    Int,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    IntxWeightOnly,
    PerTensor,
    Scheme,
    Spec,
    qat,
)
from lowbit.layers import static_input
from lowbit.layers.frozen import shown_class
from lowbit.layers.stand_in import without
from lowbit.layers.static_input import StaticInput
from lowbit.linear.frozen.dequantized import plain_linear
from lowbit.numerics.learned_scales import RATE, qparams

ACTIVATIONS = {
    "int8": Spec(Int(8), PerTensor(), "symmetric_no_clipping_err", static=True),
    "int8-asymmetric": Spec(Int(8), PerTensor(), "asymmetric", static=True),
    "uint8-asymmetric": Spec(Int(8, signed=False), PerTensor(), "asymmetric", static=True),
    "int4": Spec(Int(4), PerTensor(), static=True),
    "int4-float-zero": Spec(Int(4), PerTensor(), "float_zero_point", static=True),
    "e4m3": Spec(Float8(), PerTensor(), static=True),
}
SCALES = ["present", "learned"]
over_activations = pytest.mark.parametrize(
    "activation", list(ACTIVATIONS.values()), ids=list(ACTIVATIONS)
)
over_scales = pytest.mark.parametrize("scales", SCALES)


def scheme_of(activation):
    return Scheme(Int4WeightOnly(32).weight, activation)


INT4 = scheme_of(ACTIVATIONS["int8-asymmetric"])


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 97), nn.GELU(), nn.Linear(97, 33)).to(dtype)


def calibrated(scheme, scales="present", dtype=torch.float32, **options):
    found = model(dtype)
    qat.prepare_(found, scheme, scales=scales)
    with lowbit.calibrate(found, **options):
        for seed in range(3):
            found(values(20, 64, seed=seed, dtype=dtype))
    return found


def train(found, steps=3, lr=1e-3):
    optimizer = torch.optim.AdamW(found.parameters(), lr=lr)
    for seed in range(steps):
        y = found(values(20, 64, seed=seed, dtype=next(found.parameters()).dtype))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@over_scales
@over_activations
def test_a_trained_model_equals_the_converted_one(activation, scales):
    """To the bit: int4 weights in float32 on a CPU run the plain product."""
    found = train(calibrated(scheme_of(activation), scales)).eval()
    x = values(3, 7, 64, seed=9)
    expected = found(x)
    report = qat.convert_(found)
    assert "static" in str(report)
    assert torch.equal(found(x), expected)
    assert [shown_class(m) for m in found] == [nn.Linear, nn.GELU, nn.Linear]
    assert {*found.state_dict()} & {"0.weight.input_scale", "0.input_scale"} == {
        "0.weight.input_scale"
    }
    assert expected.isfinite().all()


@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    bits=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scales=st.sampled_from(SCALES),
)
def test_products_equal_converted_ones(seed, name, bits, dtype, scales):
    """Whatever training made of the scales, negative ones included, on the plain path."""
    linear = nn.Linear(40, 5)
    with torch.no_grad():
        linear.weight.copy_(values(5, 40, seed=seed))
    found = nn.Sequential(linear).to(dtype)
    scheme = Scheme(IntxWeightOnly(bits, 8).weight, ACTIVATIONS[name])
    qat.prepare_(found, scheme, scales=scales)
    x = values(6, 40, seed=seed + 1, dtype=dtype) * 2.0 ** (seed % 17 - 8)
    with lowbit.calibrate(found, method="minmax"):
        found(x)
    with torch.no_grad():
        for t in static_input.inputs_of(linear):
            if t is not None:
                t.mul_(values(1, seed=seed + 2))
    expected = found(x)
    qat.convert_(found)
    weight, bias = found[0].weight, found[0].bias
    assert torch.equal(plain_linear(x, weight, bias), expected)


def reference(x, scale, zero, spec, grad):
    """Gradients of x and of the parameters, by the formulas of `lowbit.numerics.learned_scales`, in float64."""
    low, high = spec.format.quant_min, spec.format.quant_max
    _, point = qparams(spec, scale, zero)
    s = float(scale) * RATE
    found = [torch.zeros_like(x, dtype=torch.float64), 0.0, 0.0]
    middle = (int(low) + int(high) + 1) // 2
    for at in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        value, g = float(x[tuple(at)]), float(grad[tuple(at)])
        if spec.mapping == "float_zero_point":
            start = float(point) - middle * s
            code, base = round((value - start) / s), middle
            rounded = float(point) + (min(max(code, low), high) - middle) * s
        else:
            z = 0 if point is None else int(point)
            code, base = round(value / s) + z, 0 if spec.mapping == "asymmetric" else z
            rounded = (min(max(code, low), high) - z) * s
        if low <= code <= high:
            found[0][tuple(at)] = g
            found[1] += g * (rounded - value) / s
        else:
            found[1] += g * (min(max(code, low), high) - base)
            found[2] += g
    return found[0], found[1] * RATE, found[2] * RATE


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "e4m3"])
def test_gradients(name):
    """An input of any rank, its scale and its zero point get the gradients of the formulas, also where codes clip."""
    spec = ACTIVATIONS[name]
    found = nn.Sequential(nn.Linear(12, 12, bias=False))
    with torch.no_grad():
        found[0].weight.copy_(torch.eye(12))
    scheme = Scheme(Spec(Int(8), lowbit.PerRow(), "symmetric_no_clipping_err"), spec)
    qat.prepare_(found, scheme, scales="learned")
    x, grad = values(2, 5, 12, seed=3), values(2, 5, 12, seed=4)
    x[0, 0] += 3.0
    with lowbit.calibrate(found, method="minmax"):
        found(x * 0.6)
    own = {n: p for n, p in found.named_parameters() if n.startswith("0.input")}
    scale, zero = own["0.input_scale"], own.get("0.input_zero")
    expected = reference(x, scale.detach(), None if zero is None else zero.detach(), spec, grad)
    x.requires_grad_()
    found[0].rounded(x).backward(grad)
    outside = (x.grad == 0).float().mean()
    assert 0.01 < outside < 0.9
    torch.testing.assert_close(x.grad.double(), expected[0])
    assert scale.grad.item() == pytest.approx(expected[1], rel=1e-4)
    assert (zero is None) == ("0.input_zero" not in own)
    if zero is not None:
        assert zero.grad.item() == pytest.approx(expected[2], rel=1e-4)


def test_float8_gradients():
    """(x̂ − x)/s within the range and the largest value outside of it."""
    found = calibrated(Float8StaticActivationFloat8Weight(), "learned")
    with torch.no_grad():
        found[0].input_scale.mul_(0.2)
    x, grad = values(9, 64, seed=3).requires_grad_(), values(9, 64, seed=4)
    found[0].rounded(x).backward(grad)
    s = found[0].input_scale.detach().double() * RATE
    scaled = x.detach().double() / s
    rounded = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    inside = scaled.abs() < 464  # what rounds to 448 is inside, as for integers
    each = torch.where(inside, rounded - scaled, rounded)
    assert (~inside).any()
    expected = (grad.double() * each).sum() * RATE
    assert found[0].input_scale.grad.item() == pytest.approx(expected.item(), rel=1e-3)
    torch.testing.assert_close(x.grad, torch.where(inside, grad, 0.0))


@over_scales
def test_gradients_of_all_parameters_arrive(scales):
    found = calibrated(INT4, scales)
    found(9 * values(4, 64)).square().mean().backward()
    names = {n for n, p in found.named_parameters() if p.grad is not None and p.grad.any()}
    learned = {"0.input_scale", "0.input_zero", "2.input_scale", "2.input_zero"}
    assert names & learned == (learned if scales == "learned" else set())
    assert {"0.weight", "2.weight"} <= names
    assert {*found.state_dict()} >= learned


def test_learned_scales_leave_a_bad_start():
    """A range a third of the inputs' clips most of them. Training widens it."""
    found = calibrated(INT4, "learned")
    teacher = model()
    with torch.no_grad():
        for layer in (found[0], found[2]):
            layer.input_scale.mul_(0.3)
    before = found[0].input_scale.item()
    x = values(200, 64, seed=5)
    own = [p for n, p in found.named_parameters() if "input_" in n]
    optimizer = torch.optim.Adam(own, lr=3e-3)
    losses = []
    for _ in range(60):
        loss = (found(x) - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert found[0].input_scale.item() > 1.5 * before


def test_frozen_scales_stay():
    found = calibrated(INT4)
    before = {n: t.clone() for n, t in found.named_buffers()}
    train(found)
    assert len(before) == 4
    assert all(torch.equal(t, before[n]) for n, t in found.named_buffers())


# ---- calibration --------------------------------------------------------------------------------------------------


def test_inputs_pass_unrounded_during_the_calibration():
    found = model()
    qat.prepare_(found, INT4)
    plain = model()
    qat.prepare_(plain, Int4WeightOnly(32))
    x = values(5, 64)
    with lowbit.calibrate(found) as ranges:
        y = found(x)
        assert not ranges
    assert torch.equal(y, plain(x))
    assert not torch.equal(found(x), y)
    assert [*ranges] == ["0", "2"]
    low, high = ranges["0"]
    assert low < -1 and high > 1


def test_training_inside_the_calibration_and_evaluation_without_effect():
    found = model()
    qat.prepare_(found, INT4, scales="learned")
    optimizer = torch.optim.SGD(found.parameters(), lr=0.01)
    held = [*found.parameters()]
    with lowbit.calibrate(found, method="minmax") as ranges:
        for seed in range(3):
            found(values(5, 64, seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.eval()
        found(1000 * values(5, 64))
        found.train()
    assert max(map(abs, ranges["0"])) < 10
    assert all(a is b for a, b in zip(held, found.parameters(), strict=True))
    assert found[0].input_scale.isfinite().all()


def test_without_a_calibration():
    found = model()
    qat.prepare_(found, INT4)
    with pytest.raises(ValueError, match=r"the input of a linear of 64 inputs has no static scale"):
        found(values(5, 64))
    with pytest.raises(ValueError, match=r"the input of 0\.weight has no static scale yet"):
        qat.convert_(found)
    with pytest.raises(ValueError, match="is static: its scale belongs to the layer"):
        nn.functional.linear(values(5, 64), found[0].weight)


def test_a_scale_that_training_made_infinite():
    found = calibrated(INT4, "learned")
    with torch.no_grad():
        found[0].input_scale.fill_(torch.inf)
    with pytest.raises(ValueError, match=r"0\.weight is infinite: go back"):
        qat.convert_(found)


def test_a_second_calibration_replaces_the_first():
    found = calibrated(INT4, method="minmax")
    first = found[0].input_scale.clone()
    with lowbit.calibrate(found, method="minmax"):
        found(3 * values(5, 64))
    assert not torch.equal(found[0].input_scale, first)


def test_an_exception_leaves_scales_as_they_were():
    found = calibrated(INT4)
    before = found(values(5, 64))
    with pytest.raises(KeyError), lowbit.calibrate(found):
        found(100 * values(5, 64))
        raise KeyError
    assert torch.equal(found(values(5, 64)), before)
    assert [*dict(found.named_modules())] == ["", "0", "1", "2"]


@over_scales
def test_prepare_takes_an_earlier_calibration(scales):
    plain = model()
    with lowbit.calibrate(plain, INT4):
        plain(values(20, 64))
    expected = copy.deepcopy(plain)
    lowbit.quantize_(expected, INT4)
    qat.prepare_(plain, INT4, scales=scales)
    for layer, other in ((plain[0], expected[0]), (plain[2], expected[2])):
        scale, zero_point = static_input.input_qparams(layer, INT4.activation)
        assert torch.equal(scale, other.weight.input_scale.view(1))
        assert torch.equal(zero_point, other.weight.input_zero_point.view(1))
    assert plain(values(5, 64)).isfinite().all()
    held = plain.named_parameters() if scales == "learned" else plain.named_buffers()
    assert sum("input_" in name for name, _ in held) == 4


# ---- modules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undo", [qat.undo_, qat.convert_])
def test_a_scheme_without_static_inputs_leaves_an_earlier_calibration(undo):
    m = nn.Linear(64, 64)
    with lowbit.calibrate(m, INT4):
        m(values(8, 64))
    held = copy.deepcopy(dict(m.named_buffers()))
    assert set(held) == {"input_scale", "input_zero"}
    qat.prepare_(m, Int4WeightOnly(32))
    with (
        pytest.raises(ValueError, match="no prepared weight with a static activation"),
        lowbit.calibrate(m),
    ):
        pass
    undo(m)
    assert without(shown_class(m), StaticInput) is nn.Linear
    assert all(torch.equal(getattr(m, name), value) for name, value in held.items())


@over_scales
def test_a_weight_that_a_parametrization_computes_is_not_converted(scales):
    m = calibrated(INT4, scales)
    parametrize.register_parametrization(m[0], "weight", nn.Identity())
    with pytest.raises(NotImplementedError, match="remove_parametrizations"):
        qat.convert_(m)
    assert m[0].parametrizations.weight.original.requires_grad


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@over_scales
def test_a_tied_head(scales):
    found, tokens = Tied(), torch.arange(40)
    report = qat.prepare_(
        found,
        INT4,
        lambda m, name: isinstance(m, nn.Linear | nn.Embedding),
        scales=scales,
    )
    assert len(report.converted) == 2
    with lowbit.calibrate(found) as ranges:
        found(tokens)
    assert [*ranges] == ["head"]
    expected = found(tokens)
    qat.convert_(found)
    assert found.head.weight is found.embedding.weight
    assert torch.equal(found(tokens), expected)


def test_linears_that_share_a_weight_share_a_scale():
    found = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    found[1].weight = found[0].weight
    qat.prepare_(found, INT4, scales="learned")
    assert found[0].input_scale is found[1].input_scale
    with lowbit.calibrate(found, method="minmax") as ranges:
        found(values(5, 32))
    assert ranges["0"] == ranges["1"]
    expected = found(values(5, 32))
    qat.convert_(found)
    assert torch.equal(found(values(5, 32)), expected)


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x * 2)


def test_modules_that_cannot_round_their_input():
    with pytest.raises(ValueError, match=r"0\.weight belongs to a Own, which multiplies by itself"):
        qat.prepare_(nn.Sequential(Own(32, 32)), INT4)
    with (
        pytest.raises(ValueError, match=r"0\.weight belongs to a Own, whose forward\(\) may"),
        lowbit.calibrate(nn.Sequential(Own(32, 32)), INT4),
    ):
        pass
    layers = nn.ModuleDict({"a": nn.MultiheadAttention(32, 2), "b": nn.Linear(32, 32)})
    report = qat.prepare_(layers, INT4)
    assert "no nn.Linear" in report.left["a.out_proj.weight"]
    assert report.converted == ["b.weight"]
    with pytest.raises(ValueError, match=r"no nn\.Linear, whose input"):
        qat.prepare_(nn.Sequential(nn.Embedding(8, 32)), INT4, lambda m, n: True)


def test_a_plan_of_several_schemes():
    found = model()
    qat.prepare_(found, {"0": INT4, "2": Int8DynamicActivationInt4Weight(32)})
    with lowbit.calibrate(found) as ranges:
        found(values(5, 64))
    assert [*ranges] == ["0"]
    expected = found(values(5, 64))
    qat.convert_(found)
    assert torch.equal(found(values(5, 64)), expected)
