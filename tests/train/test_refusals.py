"""Wrong uses of training schemes: the error names the value, and the model is unchanged."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import lowbit
from lowbit import train
from lowbit.train import BitNet, Float8MixedPrecision, Int4Weight, Int8MixedPrecision, Int8Weight
from lowbit_kernels.runtime import nvrtc
from tests.train.problems import SCHEMES, linear, prepared

INT8 = SCHEMES["int8"]


@pytest.mark.parametrize("model", [None, "model", [torch.zeros(8, 8)]], ids=["none", "str", "list"])
def test_values_that_are_no_module_are_refused_by_name(model):
    for call in (
        lambda: train.prepare_(model, INT8),
        lambda: train.restore_(model),
        lambda: train.convert_(model),
        lambda: lowbit.trace(model, torch.zeros(2, 8)),
        lambda: train.locate_(model),
        lambda: train.precompute_bitnet_scale(model),
        lambda: lowbit.quantize_(model, lowbit.Int8WeightOnly()),
    ):
        with pytest.raises(TypeError, match=f"nn.Module, got {type(model).__name__}"):
            call()


@pytest.mark.parametrize("filter_fn", ["up", {"up": True}, False, 3], ids=str)
def test_a_filter_that_is_none_is_refused(filter_fn):
    model = linear(8, 16)
    with pytest.raises(TypeError, match=r"filter_fn must be a function.*got.*patterns"):
        train.prepare_(model, INT8, filter_fn)
    assert type(model.weight) is nn.Parameter and type(model) is nn.Linear


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("scheme", [INT8, Int8Weight(), BitNet()], ids=["int8", "weight", "bitnet"])
def test_a_weight_of_another_shape_is_refused(scheme, assign):
    """Also one of which a copy would fill all rows."""
    model = prepared(linear(24, 64), scheme)
    before = model.weight.master().clone()
    for shape in ((1, 64), (24, 1), (64, 24), (64,)):
        state = {"weight": torch.zeros(shape), "bias": torch.zeros(24)}
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            model.load_state_dict(state, assign=assign)
    assert torch.equal(model.weight.master(), before)
    if scheme != Int8Weight():
        with pytest.raises(ValueError, match=r"shape \(1, 64\) in place of one of \(24, 64\)"):
            model.weight.over(torch.zeros(1, 64))


@pytest.mark.parametrize("leading", [(3,), (2, 3)], ids=["2d", "3d"])
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Int8Weight(), Int4Weight(), BitNet(), None])
def test_a_bias_of_another_shape_is_refused(scheme, leading):
    """Also one that PyTorch would broadcast; its gradient would have the shape of another one. A weight that knows the
    product refuses it as well. None: a weight under QAT."""
    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    if scheme is None:
        lowbit.qat.prepare_(model, lowbit.Int4WeightOnly(32))
    else:
        train.prepare_(model, scheme, lambda module, name: True)
    weight, x = model[0].weight, torch.randn(*leading, 128)
    for _ in range(2):
        y = nn.functional.linear(x, weight, torch.zeros(64))
        for shape in ((1,), (1, 64), (*leading, 64), (), (3, 1), (3,)):
            with pytest.raises(ValueError, match=r"takes a bias of shape \(64,\), got"):
                nn.functional.linear(x, weight, torch.zeros(shape))
    assert y.shape == (*leading, 64)


@pytest.mark.parametrize("capability,fits", [((7, 5), 0), ((8, 6), 1), ((9, 0), 2)])
def test_weights_on_gpus_without_units_are_refused(monkeypatch, capability, fits):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc, "capability", lambda device: capability)
    weight = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    for scheme, needs in (
        (Int8MixedPrecision(), 1),
        (Float8MixedPrecision(), 2),
        (Int8Weight(output=True), 1),
        (Int4Weight(output=True), 1),
        (BitNet(), 1),
    ):
        if fits < needs:
            with pytest.raises(ValueError, match=rf"{type(scheme).__name__} on cuda:0.*below"):
                scheme.check(weight)
        else:
            scheme.check(weight)
    for scheme in (Int8Weight(), Int4Weight()):
        scheme.check(weight)  # which asks for no products in int8
    weight.device = torch.device("mps")
    with pytest.raises(ValueError, match=r"BitNet on mps: it is not an NVIDIA GPU.*accepted"):
        BitNet().check(weight)


@pytest.mark.parametrize("scheme", [INT8, Int8Weight(), BitNet()], ids=["int8", "weight", "bitnet"])
def test_an_input_on_another_device_or_of_no_dimensions_is_refused(scheme):
    """By the products: a kernel would take the address of one memory for one of the other."""
    model = prepared(linear(24, 64), scheme)
    with pytest.raises(ValueError, match=r"input on meta with a weight on cpu; accepted: .*\.to\("):
        model(torch.zeros(2, 64, device="meta"))
    with pytest.raises(ValueError, match=r"input \(\) with weight \(24, 64\): K differs"):
        model(torch.tensor(1.0))
