"""Siblings share a part of their scales: in `quantize_`, in training and after conversion, to the bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import lowbit as lb
from lowbit import qat
from lowbit.convert.siblings import (
    _GROUPS,
    families,
    family_of,
    siblings,
)
from lowbit.layers.frozen import shown_class
from lowbit.layers.prepared import Linear
from lowbit.tensor.trained.joint import is_joint
from tests.qat.lora_layers import LoraLayer
from tests.schemes import SCHEMES, relative_error

SCALED = {
    "nvfp4": (lb.NVFP4WeightOnly(), "global_scale"),
    "float8 tensor": (lb.Float8WeightOnly(lb.PerTensor()), "scale"),
    "float8 tensor x float8": (
        lb.Scheme(lb.Spec(lb.Float8(), lb.PerTensor()), lb.Spec(lb.Float8(), lb.PerToken())),
        "scale",
    ),
}
OVER = pytest.mark.parametrize(("scheme", "part"), SCALED.values(), ids=SCALED)
FACTORS = (4.0, 1.0, 0.25)


class Block(nn.Module):
    """Siblings of the given names, whose weights differ in size, and a layer that is none of them."""

    def __init__(self, names: tuple[str, ...], kind: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.names = names
        for i, name in enumerate(names):
            self.add_module(name, kind(48, 16 * (i + 1), bias=i == 0))
            with torch.no_grad():
                self.get_submodule(name).weight.mul_(FACTORS[i])
        self.last = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(x)
        return torch.cat([self.get_submodule(name)(x) for name in self.names], -1)

    def parts(self, part: str) -> list[Tensor]:
        return [getattr(self.get_submodule(name).weight, part) for name in self.names]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(3, 32, 48))
        self.w3 = nn.Parameter(torch.randn(3, 32, 48) * torch.tensor([0.1, 1.0, 5.0]).view(3, 1, 1))
        self.w2 = nn.Parameter(torch.randn(3, 48, 32))


def model(names: tuple[str, ...] = siblings()[0], **kwargs: Any) -> Block:
    torch.manual_seed(0)
    return Block(names, **kwargs)


@pytest.mark.parametrize("names", siblings(), ids=lambda names: names[0])
@OVER
def test_quantize_shares_what_a_server_merges(scheme, part, names) -> None:
    plain, low = model(names), model(names)
    lb.quantize_(low, scheme)
    first, *others = low.parts(part)
    assert all(torch.equal(first, other) for other in others)
    alone = [lb.AffineTensor.from_float(plain.get_submodule(n).weight, scheme) for n in names]
    of_largest = max if part == "scale" else min
    assert first.item() == of_largest(getattr(w, part).item() for w in alone)
    assert getattr(low.last.weight, part).item() != first.item()
    for name, weight in zip(names, alone, strict=True):
        values = plain.get_submodule(name).weight
        error = (low.get_submodule(name).weight.dequantize() - values).norm()
        assert error < 1.2 * (weight.dequantize() - values).norm()


def test_other_schemes_share_nothing() -> None:
    for name, scheme in SCHEMES.items():
        assert scheme.weight.joins == ("nvfp4" in name), name


def test_experts_share_expert_by_expert() -> None:
    torch.manual_seed(0)
    experts = nn.ModuleDict({"mlp": Experts()})
    lb.quantize_(experts, lb.NVFP4WeightOnly(), lambda m, name: name == "mlp")
    w1, w2, w3 = (getattr(experts["mlp"], name).global_scale for name in ("w1", "w2", "w3"))
    assert torch.equal(w1, w3) and w1.unique().numel() == 3 and not torch.equal(w1, w2)


def test_schemes_that_differ_share_nothing() -> None:
    low = model()
    lb.quantize_(low, {"q_proj": lb.Int8WeightOnly(), "*": lb.NVFP4WeightOnly()})
    k, v = low.k_proj.weight, low.v_proj.weight
    assert torch.equal(k.global_scale, v.global_scale)


def test_zeros_do_not_count() -> None:
    low, plain = model(), model()
    for one in (low, plain):
        nn.init.zeros_(one.k_proj.weight)
    lb.quantize_(low, lb.NVFP4WeightOnly())
    expected = lb.AffineTensor.from_float(plain.q_proj.weight, lb.NVFP4WeightOnly()).global_scale
    assert all(torch.equal(t, expected) for t in low.parts("global_scale"))
    assert not low.k_proj.weight.dequantize().any()


def test_a_weight_that_blocks_share() -> None:
    """Its siblings in both blocks agree with it."""
    low = nn.ModuleList([model(), model()])
    low[1].q_proj.weight = low[0].q_proj.weight
    with torch.no_grad():
        low[1].k_proj.weight.mul_(100)
    lb.quantize_(low, lb.NVFP4WeightOnly())
    parts = [t for block in low for t in block.parts("global_scale")]
    assert all(torch.equal(t, parts[0]) for t in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@OVER
def test_prepared_equals_converted(scheme, part, dtype) -> None:
    """After steps too, in which the largest weight moves from one sibling to another."""
    net = model().to(dtype)
    report = qat.prepare_(net, scheme)
    assert len(report.converted) == 4 and isinstance(net.q_proj, Linear)
    assert is_joint(net.q_proj.weight) and not is_joint(net.last.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(5, 48, dtype=dtype)
    for step in range(3):
        final, fresh = copy.deepcopy(net), copy.deepcopy(net)
        qat.convert_(final)
        if dtype is torch.float32:
            assert torch.equal(net(x), final(x))
        elif scheme.activation is None:  # the kernel of few tokens keeps weights in float32
            plain = copy.deepcopy(final)
            lb.dequantize_(plain)
            assert torch.equal(net(x), plain(x))
            assert relative_error(final(x), net(x)) < 1e-2
        assert len({t.item() for t in final.parts(part)}) == 1
        assert shown_class(final.q_proj) is nn.Linear and not hasattr(final.q_proj, "siblings")
        qat.undo_(fresh)
        lb.quantize_(fresh, scheme)
        for name in (*net.names, "last"):
            own, other = (m.get_submodule(name).weight for m in (final, fresh))
            assert torch.equal(own, other)
        net(x).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with torch.no_grad():
                net.v_proj.weight.mul_(100)


@OVER
def test_gradients_are_those_of_the_rounded_weights(scheme, part) -> None:
    """A deep copy knows its own siblings, and backward rounds again by the same scales."""
    net = model()
    qat.prepare_(net, scheme)
    net = copy.deepcopy(net)
    assert all(s in [*net.modules()] for s in net.q_proj.siblings)
    x = torch.randn(5, 48, requires_grad=True)
    y = net.q_proj(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    qat.convert_(net)
    values = net.q_proj.weight.dequantize()
    assert torch.allclose(grad, values.sum(0).expand(5, -1), atol=1e-5)


def test_second_derivatives() -> None:
    net = model()
    qat.prepare_(net, lb.NVFP4WeightOnly())
    x = torch.randn(5, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(net.q_proj(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert second.abs().max() > 0


def test_switched_off_and_undone() -> None:
    net, plain = model(), model()
    qat.prepare_(net, lb.NVFP4WeightOnly())
    x = torch.randn(5, 48)
    rounded = net(x)
    with qat.high_precision(net):
        assert torch.equal(net(x), plain(x))
    assert torch.equal(net(x), rounded)
    other = copy.deepcopy(net)
    lb.dequantize_(other)
    assert torch.equal(other(x), rounded) and type(other.q_proj) is nn.Linear
    qat.undo_(net)
    assert torch.equal(net(x), plain(x)) and type(net.q_proj) is nn.Linear
    assert net.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("frozen", [["q_proj"], ["q_proj", "k_proj", "v_proj"]], ids=len)
def test_dequantized_where_weights_are_frozen(frozen) -> None:
    net, x = model(), torch.randn(5, 48)
    qat.prepare_(net, lb.NVFP4WeightOnly())
    for name in frozen:
        net.get_submodule(name).requires_grad_(False)
    rounded = net(x)
    lb.dequantize_(net)
    assert torch.equal(net(x), rounded) and type(net.q_proj) is nn.Linear


def test_a_state_dict_of_the_plain_model_loads() -> None:
    net, plain = model(), model()
    qat.prepare_(net, lb.NVFP4WeightOnly())
    with torch.no_grad():
        plain.k_proj.weight.mul_(1000)
    net.load_state_dict(plain.state_dict())
    assert {k: v.shape for k, v in net.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }
    lb.quantize_(plain, lb.NVFP4WeightOnly())
    x = torch.randn(5, 48)
    assert torch.equal(net(x), plain(x))


@OVER
def test_the_weight_by_itself(scheme, part) -> None:
    """The parameter of a module finds its siblings, and a copy says who multiplies."""
    net, x = model(), torch.randn(5, 48)
    qat.prepare_(net, scheme)
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        weight, final = one.q_proj.weight, copy.deepcopy(one)
        qat.convert_(final)
        values = final.q_proj.weight.dequantize()
        assert torch.equal(weight.dequantize(), values)
        assert torch.equal(weight.fake_quantized(), values)
        assert torch.equal(F.linear(x, weight, net.q_proj.bias), net.q_proj(x))
        alone = weight.detach()
        for use in (alone.dequantize, lambda: F.linear(x, alone), alone.fake_quantized):  # noqa: B023
            with pytest.raises(NotImplementedError, match=r"without its siblings.*call the module"):
                use()


@pytest.mark.parametrize("scheme", [lb.NVFP4WeightOnly(), lb.Float8WeightOnly(lb.PerTensor())])
def test_a_pruned_sibling(scheme) -> None:
    """Pruning renames the parameter, which keeps its siblings, and they keep it."""
    net, x = model(), torch.randn(5, 48)
    qat.prepare_(net, scheme)
    expected = net(x)
    prune.l1_unstructured(net.q_proj, "weight", amount=0.0)
    assert torch.equal(net(x), expected)
    prune.l1_unstructured(net.q_proj, "weight", amount=0.5)
    net(x).square().sum().backward()
    grad = net.q_proj.weight_orig.grad
    assert grad is not None and not grad[net.q_proj.weight_mask == 0].any() and grad.any()


def test_a_sibling_whose_weight_is_computed_is_refused() -> None:
    net = model()
    qat.prepare_(net, lb.NVFP4WeightOnly())
    nn.utils.parametrizations.weight_norm(net.k_proj)
    with pytest.raises(NotImplementedError, match=r"no weight of its own.*remove_parametrizations"):
        net.q_proj(torch.randn(5, 48))


class Own(nn.Linear):
    """A subclass may multiply otherwise."""


def test_layers_of_another_class_keep_their_own_scales_and_the_report_says_so() -> None:
    net = model(kind=Own)
    report = qat.prepare_(net, lb.NVFP4WeightOnly())
    assert str(report).count("a scale of its own") == 3
    x = torch.randn(5, 48)
    expected = net(x)
    qat.convert_(net)
    assert torch.equal(net(x), expected)
    assert len({t.item() for t in net.parts("global_scale")}) == 3


@pytest.mark.parametrize("adapters", ["keep", "merge"])
def test_adapters_around_some_of_them(adapters: Any) -> None:
    """Beside adapters the base weights share their scale. A weight that is rounded with its adapters has its own."""
    net, x = model(), torch.randn(5, 48)
    for name in ("q_proj", "k_proj"):
        setattr(net, name, LoraLayer(net.get_submodule(name)))
    report = qat.prepare_(net, lb.NVFP4WeightOnly(), adapters=adapters)
    assert ("a scale of its own" in str(report)) == (adapters == "merge")
    expected = net(x)
    qat.convert_(net)
    assert torch.equal(net(x), expected)
    layers = (getattr(layer, "base_layer", layer) for layer in (net.q_proj, net.k_proj, net.v_proj))
    assert len({layer.weight.global_scale.item() for layer in layers}) == (
        1 if adapters == "keep" else 3
    )


def test_a_group_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.convert.siblings._GROUPS", [*_GROUPS])
    names = ("queries", "keys")
    low = model(names)
    lb.quantize_(low, lb.NVFP4WeightOnly())
    assert len({t.item() for t in low.parts("global_scale")}) == 2
    lb.register_siblings(*names)
    lb.register_siblings(*names)  # the same again
    assert siblings()[-1] == names
    low = model(names)
    lb.quantize_(low, lb.NVFP4WeightOnly())
    assert len({t.item() for t in low.parts("global_scale")}) == 1
    with pytest.raises(ValueError, match=r"share a name with \('q_proj'"):
        lb.register_siblings("q_proj", "s_proj")
    with pytest.raises(ValueError, match="two names or more"):
        lb.register_siblings("a", "a")
    with pytest.raises(ValueError, match="not the last part of a name"):
        lb.register_siblings("a.b", "c")
    with pytest.raises(TypeError, match="names such as 'q_proj'"):
        lb.register_siblings("a", 3)  # type: ignore[arg-type]


def test_families_by_name() -> None:
    names = ["a.0.q_proj.weight", "a.0.k_proj.weight", "a.1.q_proj.weight", "a.0.o_proj.weight"]
    names += ["a.1.k_proj.base_layer.weight", "a.1.v_proj.weight", "e.3.w1.weight", "e.3.w3.weight"]
    names += [
        "e.4.w1.weight",
        "x.w1",
        "x.w3",
        "lm_head.weight",
        "up_proj.weight",
        "gate_proj.weight",
    ]
    found = families({name: ([name], 0) for name in names})
    assert [sorted(family) for family in found] == [
        ["a.0.k_proj.weight", "a.0.q_proj.weight"],
        ["a.1.k_proj.base_layer.weight", "a.1.q_proj.weight", "a.1.v_proj.weight"],
        ["e.3.w1.weight", "e.3.w3.weight"],
        ["x.w1", "x.w3"],
        ["gate_proj.weight", "up_proj.weight"],
    ]
    assert family_of("a.b.weight") is None
    assert families({n: ([n], i) for i, n in enumerate(names)}) == []


@pytest.mark.parametrize("name", ["nvfp4", "float8 tensor x float8"])
def test_compiled(name) -> None:
    scheme, _ = SCALED[name]
    net, x = model(("gate_proj", "up_proj")), torch.randn(5, 48)
    qat.prepare_(net, scheme)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(x), net(x))
        net.zero_grad()
        compiled(x).sum().backward()
        found = net.gate_proj.weight.grad.clone()
        net.zero_grad()
        net(x).sum().backward()
        assert torch.equal(net.gate_proj.weight.grad, found)
        with torch.no_grad():
            net.up_proj.weight.mul_(100)
