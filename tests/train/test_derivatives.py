"""Derivatives: saved tensors, second derivatives, and the transforms of torch.func."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowbit
from lowbit import train
from lowbit.train import (
    BitNet,
    Float8BlockMixedPrecision,
    Int4Weight,
    Int8MixedPrecision,
    Int8Weight,
    MXFP8MixedPrecision,
)
from tests.train.problems import SCHEMES, linear, outcome, prepared, snr, values


@pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["int8"],
        Int8Weight(),
        Int8Weight(True, True, True, always=True),
        Int4Weight(output=True, grad_input=True, always=True),
        BitNet(),
    ],
    ids=["int8", "weight", "weight-products", "int4-products", "bitnet"],
)
def test_second_derivatives_are_refused(scheme):
    """They would be silently wrong: rounding has no derivative, and the weight's term would be missing."""
    low, x = prepared(linear(24, 64), scheme), values(16, 64).requires_grad_()
    kind = type(low.weight).__name__
    with pytest.raises(NotImplementedError, match=rf"{kind}.*second derivatives.*create_graph"):
        torch.autograd.grad(low(x).square().sum(), x, create_graph=True)
    low(x).square().sum().backward()


@pytest.mark.parametrize("scheme", [Int8Weight(), BitNet()], ids=["weight", "bitnet"])
def test_second_derivatives_through_frozen_weights(scheme):
    low, plain = prepared(linear(24, 64), scheme).requires_grad_(False), linear(24, 64)
    with torch.no_grad():
        plain.weight.copy_(low.weight.dequantize())
    found = []
    for model in (low, plain):
        x = values(16, 64).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append(x.grad)
    assert snr(*found) > 30


@pytest.mark.parametrize(
    "scheme", [SCHEMES["int8"], Int8Weight(), BitNet()], ids=["int8", "weight", "bitnet"]
)
def test_transforms_of_torch_func_are_refused_by_name(scheme):
    model = prepared(linear(24, 64), scheme)
    kind = type(model.weight).__name__
    for run in (
        lambda: torch.func.grad(lambda x: model(x).sum())(values(5, 64)),
        lambda: torch.vmap(model)(values(3, 5, 64)),
    ):
        with pytest.raises(NotImplementedError, match=rf"{kind}.*torch\.func.*autograd\.grad"):
            run()


@pytest.mark.parametrize(
    "scheme, kinds",
    [
        (Int8Weight(), {torch.int8}),
        (Int4Weight(), set()),
        (Int4Weight(output=True, grad_input=True, always=True), set()),
    ],
    ids=["int8", "int4", "int4-products"],
)
def test_compiled_backward_passes_keep_codes_not_values(scheme, kinds):
    """The backward pass of an int8 weight reads codes that the forward pass kept; values would take 2 bytes an element
    more. That of an int4 weight reads the packed weight, and makes its int8 codes again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(torch.bfloat16)
    train.prepare_(model, scheme)
    kept = []
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = compiled(x)
    weights = {(96, 64), (64, 96)}
    assert {t.dtype for t in kept if tuple(t.shape) in weights} == kinds
    packed = {tuple(t.shape) for t in kept if t.dtype is torch.uint8}
    assert packed == (set() if kinds else {(96, 32), (64, 48)})
    (own,) = torch.autograd.grad(y.sum(), x)
    (eager,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(own, eager)


@pytest.mark.parametrize(
    "scheme",
    [
        *(BitNet(), Int8Weight(), Int4Weight(group_size=32)),
        *(Float8BlockMixedPrecision(always=True), MXFP8MixedPrecision(always=True)),
        Int8MixedPrecision(always=True, stochastic_rounding=False, grad_input=False),
        Int8MixedPrecision(always=True, stochastic_rounding=False),
        *(lowbit.Int4WeightOnly(group_size=32), lowbit.Int8DynamicActivationInt8Weight()),
    ],
    ids=str,
)
def test_weights_that_hooks_of_saved_tensors_make_plain(scheme):
    """As `save_on_cpu(pin_memory=True)` and offloading wrappers of activations do."""
    model = nn.Sequential(linear(96, 64), nn.GELU(), linear(64, 96))
    prepare = lowbit.qat.prepare_ if isinstance(scheme, lowbit.Scheme) else train.prepare_
    prepare(model, scheme)
    x = values(16, 64)

    def offloaded(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(x)

    expected = outcome(model, x)
    for name, found in outcome(model, x, run=offloaded).items():
        assert torch.equal(found, expected[name]), name


def test_a_kept_weight_that_hooks_make_plain_may_be_gone():
    model = nn.Sequential(linear(96, 64)).requires_grad_(False)
    train.prepare_(model, BitNet())
    x = values(4, 64).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = model(x)
    model[0].weight = nn.Parameter(torch.zeros(96, 64))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


@pytest.mark.parametrize(
    "scheme",
    [
        *(BitNet(), Int8Weight(), Int8MixedPrecision(always=True)),
        Int8MixedPrecision(always=True, grad_input=False, grad_weight=False),
        *(lowbit.Int4WeightOnly(group_size=32), lowbit.Int8DynamicActivationInt8Weight()),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_model_is_cast_while_a_loss_is_alive(scheme, has_stepped):
    """torch swaps the tensors of a weight, and swaps none that another object refers to."""
    model = nn.Sequential(linear(64, 64), nn.GELU(), linear(64, 64))
    prepare = lowbit.qat.prepare_ if isinstance(scheme, lowbit.Scheme) else train.prepare_
    prepare(model, scheme)
    loss = model(values(4, 64)).square().mean()
    if has_stepped:
        loss.backward()
    assert model.to("cpu") is model and model.share_memory() is model
    model.bfloat16()
    assert model(values(4, 64).bfloat16()).dtype is torch.bfloat16 and loss.isfinite()
