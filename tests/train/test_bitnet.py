"""BitNet b1.58: products against float64, gradients by name, conversion to 2 bits that changes no bit, refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import lowbit
from lowbit import BitNet, BitNetTensor, TernaryTensor, train
from lowbit.tensor.frozen.ternary import pack_ternary, unpack_ternary
from tests.scaled_products import scaled_products
from tests.traced import low_bit
from tests.train.problems import (
    HOW,
    Model,
    int8_products,
    linear,
    outcome,
    prepared,
    relative,
    tokens,
    train_step,
    values,
)

SCHEMES = {"plain": BitNet(), "int8": BitNet(grad_input=True, grad_weight=True)}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def ternary(weight):
    """The paper's rounding of a weight: float64."""
    weight = weight.detach().double()
    scale = weight.abs().mean()
    return (weight / scale).round().clamp(-1, 1) * scale


def rounded(x):
    """The rounding of an input, with a code more for negative numbers than the paper has: float64."""
    x = x.detach().double()
    scale = torch.maximum(-x / 128, x / 127).amax(-1, keepdim=True)
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def reference(layer, x, upstream):
    w, x, g = ternary(layer.weight), rounded(x), upstream.double()
    bias = None if layer.bias is None else layer.bias.double()
    flat = g.flatten(0, -2)
    found = {
        "output": F.linear(x, w, bias).detach(),
        "input": g @ w,
        "weight": flat.t() @ x.flatten(0, -2),
    }
    return found if bias is None else {**found, "bias": flat.sum(0)}


@every_scheme
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "n", "k"),
    [((5,), 24, 96), ((2, 3, 7), 13, 101), ((1,), 1, 33), ((3, 1), 1, 1)],
    ids=str,
)
def test_outputs_and_gradients_against_float64(scheme, bias, shape, n, k):
    layer, x = linear(n, k, bias), values(*shape, k, seed=4)
    upstream = values(*shape, n, seed=3)
    found = outcome(prepared(layer, scheme), x, upstream)
    expected = reference(layer, x, upstream)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rounds = scheme == SCHEMES["int8"] and name in ("input", "weight")
        assert found[name].shape == value.shape
        assert relative(found[name], value) < (0.02 if rounds else 1e-6), name


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_low_precision(scheme, dtype):
    layer, x = linear(48, 96, dtype=dtype), values(16, 96, seed=4, dtype=dtype)
    upstream = values(16, 48, seed=3, dtype=dtype)
    found = outcome(prepared(layer, scheme), x, upstream)
    for name, value in reference(layer, x, upstream).items():
        assert found[name].dtype is dtype
        assert relative(found[name], value) < 0.02, name


@given(st.floats(1e-30, 1e30), st.integers(1, 9), st.integers(1, 40))
def test_scales_reach_far(size, n, k):
    weight = values(n, k) * size
    assert relative(BitNetTensor(weight, BitNet()).dequantize(), ternary(weight)) < 1e-6


def test_zeros_nan_and_infinity():
    zero = BitNetTensor(torch.zeros(8, 32), BitNet())
    assert torch.equal(F.linear(values(4, 32), zero), torch.zeros(4, 8))
    x = values(4, 32)
    x[1] = 0
    layer = prepared(linear(8, 32), BitNet())
    y = layer(x)
    assert torch.equal(y[1], layer.bias.detach()) and y.isfinite().all()
    x[2, 5] = math.inf
    y = layer(x)
    assert y[2].isnan().all() and y[:2].isfinite().all()
    with torch.no_grad():
        layer.weight.master()[3].fill_(math.nan)
    assert layer(values(4, 32)).isnan().all(), "the scale is that of all"


def test_no_rows():
    layer = prepared(linear(8, 32), BitNet())
    y = layer(torch.zeros(0, 32))
    y.sum().backward()
    assert y.shape == (0, 8) and not layer.weight.grad.any()


@every_scheme
def test_products_are_counted_and_traced(scheme):
    model, x = prepared(linear(48, 96), scheme), values(16, 96)
    with scaled_products() as calls:
        outcome(model, x)
    backward = 2 if scheme == SCHEMES["int8"] else 0
    assert calls["int8"] == 1 + backward
    found = lowbit.trace(model, x)
    assert low_bit(found) == (["output", "grad_weight"] if backward else ["output"])


@every_scheme
@pytest.mark.parametrize("how", HOW)
def test_compiled_and_checkpointed(scheme, how):
    model, x = prepared(linear(48, 96), scheme), values(2, 16, 96, seed=4)
    assert int8_products(model, x, how) > 0


def test_backward_keeps_a_byte_an_element_of_the_input():
    model, x = prepared(linear(48, 96), BitNet()), values(64, 96)
    kept = []

    def pack(t):
        kept.append(0 if isinstance(t, BitNetTensor) else t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    assert sum(kept) <= 64 * 96 + 64 * 4 + 4


@pytest.mark.parametrize("cls", [torch.optim.AdamW, lowbit.optim.AdamW4bit, lowbit.optim.Lion8bit])
def test_it_learns(cls):
    model = Model()
    train.prepare_(model, BitNet())
    optimizer = cls(model.parameters(), lr=3e-3)
    losses = [train_step(model, optimizer, step % 4) for step in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_gradients_accumulate_and_no_grad_agrees():
    model, x = prepared(linear(24, 96), BitNet()), values(8, 96)
    y = model(x)
    for _ in range(2):
        model(x).sum().backward()
    twice = model.weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(twice, 2 * model.weight.grad)
    with torch.no_grad():
        assert torch.equal(model(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_converted_model_computes_the_same_to_the_bit(dtype, tmp_path):
    model = Model().to(dtype)
    train.prepare_(model, BitNet())
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    expected = model(tokens())
    report = train.convert_(model)
    assert report.converted == ["up.weight", "down.weight"]
    assert torch.equal(model(tokens()), expected)
    weight = model.up.weight
    assert type(weight.detach()) is TernaryTensor and not weight.requires_grad
    assert weight.nbytes_stored() == 96 * 64 // 4 + 4
    lowbit.save(model, tmp_path / "model.safetensors")
    fresh = Model().to(dtype)
    fresh.load_state_dict(lowbit.load(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(fresh(tokens()), expected)
    with pytest.raises(ValueError, match="none to convert"):
        train.convert_(model)


class Turned(nn.Linear):
    """A linear by the transpose of its weight."""

    def forward(self, x):
        return F.linear(x, self.weight.T)


@pytest.mark.parametrize("tokens", [5, 0])
def test_a_turned_weight_converts_to_the_same_rounding_of_tokens(tokens):
    model, x = Turned(48, 64, bias=False), torch.randn(tokens, 64)
    train.prepare_(model, BitNet())
    expected = model(x)
    train.convert_(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_the_ternary_product_is_chosen_and_passes_gradients_to_its_input():
    weight, x = TernaryTensor(values(24, 96)), values(2, 5, 96).requires_grad_()
    with scaled_products() as calls:
        y = F.linear(x, weight)
    assert calls["int8"] == 1
    y.sum().backward()
    assert relative(x.grad, weight.dequantize().double().sum(0).expand(2, 5, -1)) < 1e-6


def test_state_dicts_are_plain_and_resume_bit_for_bit():
    def fresh():
        model = Model()
        train.prepare_(model, BitNet())
        return model, lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)

    model, optimizer = fresh()
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train_step(model, optimizer, step)
    assert all(type(value) is torch.Tensor for value in saved[0].values())
    again, optimizer = fresh()
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in (2, 3):
        train_step(again, optimizer, step)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_experts_have_scales_of_their_own():
    weight = values(3, 16, 100) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    experts = nn.Parameter(BitNetTensor(weight, BitNet()))
    converted = TernaryTensor(weight)
    x = values(5, 100)
    for i in range(3):
        y = F.linear(x, experts[i])
        assert relative(y.detach(), rounded(x) @ ternary(weight[i]).t()) < 1e-6
        assert torch.equal(F.linear(x, converted[i]), y)
    F.linear(x, experts[1]).sum().backward()
    assert experts.grad[1].any() and not experts.grad[[0, 2]].any()


@given(st.integers(0, 5), st.integers(0, 33))
def test_codes_are_packed_and_unpacked(n, k):
    codes = torch.randint(-1, 2, (n, k), dtype=torch.int8)
    packed = pack_ternary(codes)
    assert packed.shape == (n, -(-k // 4)) and torch.equal(unpack_ternary(packed, k), codes)


# ---- refusals ------------------------------------------------------------------------------------------------


def test_embeddings_and_weights_tied_to_them_are_left_alone():
    model = Model()
    report = train.prepare_(model, BitNet(), lambda m, n: isinstance(m, nn.Linear | nn.Embedding))
    assert "multiplies nothing" in report.left["table.weight"]
    tied = nn.ModuleDict({"table": nn.Embedding(50, 64), "head": nn.Linear(64, 50, bias=False)})
    tied["head"].weight = tied["table"].weight
    report = train.prepare_(tied, BitNet())
    assert report.left["head.weight"] == "tied to an embedding, which looks up exact rows"
    tied["head"](tied["table"](tokens())).sum().backward()
    weight = BitNetTensor(values(50, 64), BitNet())
    with pytest.raises(NotImplementedError, match=r"embedding.*tied.*lm_head"):
        F.embedding(tokens(), weight)


def test_a_part_has_no_scale():
    part = BitNetTensor(values(24, 96), BitNet())[:8]
    with pytest.raises(
        NotImplementedError, match=r"part of a weight \(24, 96\).*precompute_bitnet"
    ):
        F.linear(values(5, 96), part)


def test_a_scale_of_old_is_not_known_whoever_wrote():
    """Through an alias, such as `param.data`, as well."""
    layer = prepared(linear(16, 32), BitNet())
    weight = layer.weight
    weight.grad = torch.ones(16, 32)
    state = {name: value + 1 for name, value in layer.state_dict().items()}
    view = weight.detach()
    for write in (
        lambda: weight.mul_(2),
        lambda: weight.data.mul_(2),
        lambda: view.add_(1),
        lambda: weight.view(4, 4, 32).zero_(),
        lambda: weight.master().mul_(2),
        lambda: torch._foreach_mul_([weight], 2),
        lambda: layer.load_state_dict(state),
        lambda: torch.optim.AdamW([weight], lr=0.1).step(),
        lambda: torch.optim.AdamW([weight], lr=0.1, fused=True).step(),
        lambda: lowbit.optim.AdamW8bit([weight], lr=0.1).step(),
    ):
        weight.remember_scale(torch.ones(1, 1))
        weight.abs().sum(), weight.clone(), weight.detach()
        assert weight.known_scale() is not None
        with torch.no_grad():
            write()
        assert weight.known_scale() is None


def test_options_and_dtypes_are_checked():
    with pytest.raises(TypeError, match="grad_input must be True or False, got 1"):
        BitNet(grad_input=1)
    with pytest.raises(ValueError, match=r"float64.*BitNet takes"):
        train.prepare_(nn.Linear(4, 4).double(), BitNet())
    with pytest.raises(ValueError, match="no BitNet weights"):
        train.precompute_bitnet_scale(nn.Linear(4, 4))


def test_int8_sums_longer_than_int32_holds():
    """128 · 1 a term: K may reach 2^24, beyond any layer; the bound of mixed products is 2^17."""
    layer = nn.Linear(2**18, 1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.ones(1, 2**18)
    assert float(prepared(layer, BitNet())(x)) == 2**18


@pytest.mark.parametrize("tokens", [140_000, 2**17 + 5])
def test_gradients_of_more_tokens_than_int32_holds(tokens):
    layer = prepared(nn.Linear(16, 8, bias=False), BitNet(grad_weight=True))
    layer(torch.ones(tokens, 16)).sum().backward()
    assert torch.allclose(layer.weight.grad, torch.full((8, 16), float(tokens)), rtol=1e-6)


@pytest.mark.parametrize("m", [1, 16, 48])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (48, 1), (1, 1)])
def test_sizes_of_one(m, n, k):
    found, expected = (
        outcome(prepared(linear(n, k), scheme), values(m, k))
        for scheme in (BitNet(True, True), BitNet())
    )
    for name, value in expected.items():
        assert relative(found[name], value) < 0.1, name
