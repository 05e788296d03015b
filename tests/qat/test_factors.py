"""Learned scales as factors of the present ones, which follow the weight; and those of packed weights, which do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit import IntxWeightOnly, qat, quantize_
from lowbit.linear.fused_rounding import present_parameters
from lowbit.numerics.learned_scales import (
    RATE,
    _starts_at_largest,
    following,
    learned_fake_quantize,
    learns_zero,
    parameters_for,
    rate_of,
)
from lowbit.schemes.scheme import Scheme
from lowbit.tensor import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import LearnedScales, starting_parameters
from tests.qat.test_learned_scales import (
    CHOSEN,
    DTYPES,
    OF_INTEGERS,
    SPECS,
    model,
    reference_gradients,
    tokens,
    values,
)

EVERY = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def rounded_by_factors(w, factor, offset, spec):
    """ŵ by learned scales that follow w, differentiable in all arguments."""
    present = present_parameters(w, spec, factor.dtype)
    return learned_fake_quantize(w, *following(factor, offset, present), spec)


def reference_gradients_of_factors(w, factor, offset, spec, grad):
    """Those of scales that follow w, in float64: the present scale times `factor`, and the present zero point plus
    `offset` such scales, in units of the parameters."""
    present, point = spec.choose_qparams(spec.pad(w), factor.dtype)
    unit, zero = present.double() / rate_of(spec), None
    scale = (unit * factor.double()).to(factor.dtype)
    if offset is not None:
        value = point if spec.zero_point_is_value else -point.double() * present.double()
        zero = (value.double() / RATE + unit * offset.double()).to(offset.dtype)
    of_weight, of_scale, of_zero = reference_gradients(w, scale, zero, spec, grad)
    return of_weight, of_scale * unit, of_zero * unit


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_gradients_of_scales_that_follow(name):
    """Of weight, factor and offset by name, for a product and for the rounded weight alone."""
    spec = SPECS[name]
    layer = nn.Linear(64, 8, bias=False)
    qat.prepare_(nn.Sequential(layer), Scheme(spec), scales="learned")
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name != "weight":
                p += 0.2 * values(*p.shape, seed=5) - 0.3
    own = [layer._parameters[n] for n in ("weight_scale", "weight_zero")]
    w, x, upstream = layer.weight.master(), values(16, 64, seed=3), values(16, 8, seed=4)
    expected = reference_gradients_of_factors(
        w, *(None if p is None else p.detach() for p in own), spec, upstream.T.double() @ x.double()
    )
    assert (expected[0] == 0).any() and (expected[0] != 0).any(), "some clip, some do not"
    layer(x).backward(upstream)
    grads = {n: p.grad for n, p in layer.named_parameters()}
    seen = layer.weight.quantized_by(*own)
    alone = torch.autograd.grad(seen, [*layer.parameters()], upstream.T @ x)
    pairs = zip(grads, expected, alone, strict=False)
    assert (own[1] is not None) == learns_zero(spec)
    for name, right, other in pairs:
        for found in (grads[name], other):
            assert (found - right).norm() <= 1e-4 * right.norm().clamp(min=1e-30), name


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_of_one_is_the_present_scale(spec, dtype):
    """To the bit in products and after conversion, also when the weight has changed. Scales that start elsewhere are
    what was asked, to an error of rounding."""
    models = [model().to(dtype) for _ in range(2)]
    for each, scales in zip(models, ("present", "learned"), strict=True):
        qat.prepare_(each, Scheme(spec), CHOSEN, scales=scales)
    if spec.rounds_minimum or (spec.scale_dtype is not None and dtype is torch.bfloat16):
        return  # present scales keep the smallest value; the parameters have the dtype of the weight
    starts = _starts_at_largest(spec) or spec.has_few_codes
    for name, p in models[1].named_parameters():
        if name.endswith(("_scale", "_zero")):
            assert starts or bool((p == name.endswith("_scale")).all()), name
            p.data.fill_(name.endswith("_scale"))
    for _ in range(2):
        assert torch.equal(*(each(tokens()) for each in models))
        for each in models:
            for p in each.parameters():
                if isinstance(p, FakeQuantizedTensor):
                    p.data.copy_(values(*p.shape, seed=p.numel(), dtype=dtype))
    present, learned = (qat.convert_(each) and each for each in models)
    for name in ("0.weight", "1.weight"):
        own, other = (each.get_parameter(name).dequantize() for each in (present, learned))
        assert torch.equal(own, other), name


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_starts_of_factors(spec, dtype):
    """Blocks of zeros too. The factor rounds to its dtype, so the scale differs by a bit or two."""
    w = values(24, 96, dtype=dtype)
    w[3] = 0
    weight = FakeQuantizedTensor(w, Scheme(spec), quantizer=LearnedScales())
    for searched in (False, True):
        factor, offset = starting_parameters(weight, searched=searched)
        scale, zero = weight.quantizer.scales_at(w, spec, (factor, offset, None))[:2]
        wanted = parameters_for(w, spec, dtype, searched)
        assert factor.isfinite().all() and factor.abs().max() < 4
        bound = 2 * torch.finfo(dtype).eps
        assert ((scale - wanted[0]).abs() <= bound * wanted[0].abs()).all()
        if zero is not None:
            steps = (zero - wanted[1]).float().abs() * RATE / (scale.float().abs() * rate_of(spec))
            assert steps.max() <= bound * (spec.format.quant_max - spec.format.quant_min + 1)


@pytest.mark.parametrize("name", ["int4-g32", "int4-row", "int3-asymmetric", "float8-row"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_a_packed_weight_start_as_they_are_stored(name, dtype):
    """To the bit, of groups of zeros too, and then train. Their state dict is of another form."""
    packed = model().to(dtype)
    with torch.no_grad():
        packed[1].weight[:2] = 0
    scheme = Scheme(SPECS[name])
    quantize_(packed, scheme, scales="searched")
    packed[1].weight.scale.mul_(1 + 2**-5)
    found = copy.deepcopy(packed)
    qat.prepare_(found, scales="learned")
    assert found[1].weight.quantizer.absolute
    assert torch.equal(found[1].weight.dequantize(), packed[1].weight.dequantize())
    state = found.state_dict()
    converted = copy.deepcopy(found)
    qat.convert_(converted)
    for own, kept in ((converted[i].weight, packed[i].weight) for i in (1, 3, 4)):
        assert torch.equal(own.scale, kept.scale) and torch.equal(own.codes, kept.codes)
    plain = model().to(dtype)
    qat.prepare_(plain, scheme, scales="learned")
    forms = r"that do not follow the weight.*that follow the weight.*start anew"
    with pytest.raises(RuntimeError, match=forms):
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"that follow the weight.*that do not follow"):
        found.load_state_dict(plain.state_dict())


def test_factors_of_the_other_symmetric_mapping_are_refused():
    """They are factors of another scale; stored scales mean the same in both mappings."""
    made = []
    for mapping in ("symmetric", "symmetric_no_clipping_err"):
        made.append(model())
        qat.prepare_(made[-1], IntxWeightOnly(4, 32, mapping), CHOSEN, scales="learned")
    with pytest.raises(RuntimeError, match=r"has learned scales of .*'symmetric'.*no_clipping"):
        made[1].load_state_dict(made[0].state_dict())


def test_a_sparse_lookup_takes_the_scale_of_the_whole_table():
    """Not that of the rows that are looked up, of which none has the largest value."""
    layer = nn.Embedding(50, 96, sparse=True)
    with torch.no_grad():
        layer.weight[40] *= 10
    qat.prepare_(nn.Sequential(layer), Scheme(SPECS["int4-tensor"]), CHOSEN, scales="learned")
    index = torch.tensor([[3, 7, 7], [49, 0, 3]])
    own = layer(index)
    assert torch.equal(own, layer.weight.quantized_by(layer.weight_scale)[index])
    own.sum().backward()
    assert layer.weight.grad.is_sparse
