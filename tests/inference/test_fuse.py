"""fuse_linears_: one product for a group, the same outputs, and state dicts that pass in both directions."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.inference import fuse_linears_, unfuse_linears_
from recipes.llama import Llama, LlamaConfig
from tests.inference.weight_ops import counted
from tests.schemes import over
from tests.tensor.cases import same_bits

SCHEMES = {
    "int4": lb.Int4WeightOnly(32),
    "int4-asymmetric": lb.Int4WeightOnly(32, "asymmetric"),
    "int8": lb.Int8WeightOnly(),
    "int8xint8": lb.Int8DynamicActivationInt8Weight(),
    "float8": lb.Float8WeightOnly(),
    "int3": lb.IntxWeightOnly(3, 24),
}


class Layer(nn.Module):
    """The names of Hugging Face's Llama."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=bias)
        self.k_proj = nn.Linear(64, 8, bias=bias)
        self.v_proj = nn.Linear(64, 8, bias=bias)
        self.gate_proj = nn.Linear(48, 96, bias=False)
        self.up_proj = nn.Linear(48, 96, bias=False)
        self.down_proj = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


def make(scheme: lb.Scheme | None, bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(Layer(bias), Layer(bias)).eval()
    if scheme is not None:
        lb.quantize_(model, scheme)
    return model


class LatentAttention(nn.Module):
    """DeepSeek's names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(64, 32, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(64, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_a_proj(x), self.kv_a_proj_with_mqa(x)], -1)


def test_the_groups_are_those_of_the_table() -> None:
    model, x = LatentAttention(), torch.randn(3, 64)
    lb.quantize_(model, SCHEMES["int8"])
    expected = model(x)
    assert fuse_linears_(model) == [("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(model(x), expected)


def same_state(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(same_bits(first[k], second[k]) for k in first)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("scheme", [None, *SCHEMES.values()], ids=["plain", *SCHEMES])
def test_the_same_outputs_from_fewer_products(scheme: lb.Scheme | None, bias: bool) -> None:
    model, x = make(scheme, bias), torch.randn(3, 5, 64)
    fused = copy.deepcopy(model)
    groups = fuse_linears_(fused)
    assert groups[:2] == [
        ("0.q_proj", "0.k_proj", "0.v_proj"),
        ("0.gate_proj", "0.up_proj"),
    ]
    with torch.no_grad():
        assert torch.allclose(fused(x), model(x), rtol=1e-5, atol=1e-5)
    assert [(p.layer, p.n) for p in lb.trace(fused, x, backward=False).products[:3]] == [
        ("0.q_proj", 48),
        ("0.gate_proj", 192),
        ("0.down_proj", 64),
    ]
    assert fused[0].q_proj._held is None and fused[0].gate_proj._held is None
    assert same_state(fused, model)
    kept = fused.state_dict(keep_vars=True)
    assert set(kept) == set(model.state_dict(keep_vars=True)), "whole, as parameters are"
    unfuse_linears_(fused)
    assert torch.equal(fused(x), model(x)) and same_state(fused, model)
    assert all(isinstance(m, (nn.Linear, Layer, nn.Sequential)) for m in fused.modules())


def test_the_kernel_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = counted(monkeypatch)
    model, x = make(SCHEMES["int4"]).bfloat16(), torch.randn(3, 64).bfloat16()
    fuse_linears_(model)
    model(x)
    assert [call[2] for call in ops.calls] == [48, 192, 64] * 2


@over(SCHEMES)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_state_dicts_pass_in_both_directions(scheme, assign: bool, tmp_path: Path) -> None:
    model, x = make(scheme), torch.randn(3, 64)
    fused, other, plain = make(scheme), copy.deepcopy(model), make(scheme)
    fuse_linears_(fused)
    fuse_linears_(other)
    lb.save(other, tmp_path / "fused.safetensors")
    plain.load_state_dict(lb.load(tmp_path / "fused.safetensors"), assign=assign)
    assert torch.equal(plain(x), model(x))
    fused.load_state_dict(model.state_dict(), assign=assign)
    assert torch.equal(fused(x), other(x)) and same_state(fused, model)
    fused = fused.bfloat16()
    assert fused[0].k_proj.weight.dtype is torch.bfloat16


def test_a_state_dict_that_lacks_a_part() -> None:
    model = make(SCHEMES["int4"])
    state = model.state_dict()
    fuse_linears_(model)
    for part in ("codes", "scale"):
        del state[f"0.k_proj.weight.{part}"]
    with pytest.raises(RuntimeError, match=r"0.q_proj is fused: it loads all of .*0.k_proj.weight"):
        model.load_state_dict(state)


def test_a_part_that_is_called_with_another_input() -> None:
    model = make(SCHEMES["int4"])[0]
    x, other = torch.randn(3, 64), torch.randn(3, 64)
    expected = [model.k_proj(x), model.k_proj(other), model.v_proj(x)]
    fuse_linears_(model)
    model.q_proj(x)
    found = [model.k_proj(x), model.k_proj(other), model.v_proj(x)]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert torch.allclose(model.k_proj(x), expected[0], atol=1e-6), "and when called again"


class InOrder(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        for name in "qkv":
            setattr(self, f"{name}_proj", nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found = {name: getattr(self, f"{name}_proj")(x) for name in self.order}
        return torch.cat([found[name] for name in sorted(found)], dim=-1)


@over({"plain": None, "int4": SCHEMES["int4"]})
@pytest.mark.parametrize("order", ["kqv", "vkq", "qk"])
def test_outputs_of_another_state_are_not_taken(scheme, order: str) -> None:
    plain, x = InOrder(order), torch.randn(3, 64)
    if scheme is not None:
        lb.quantize_(plain, scheme)
    model = copy.deepcopy(plain)
    fuse_linears_(model)
    seen = plain.q_proj.weight.dequantize() if scheme else plain.q_proj.weight.detach().clone()

    def check() -> None:
        assert torch.allclose(model(x), plain(x), atol=1e-5)

    with torch.no_grad():
        check()
        x.normal_()  # a static input
        check()
        for part in (plain.q_proj, plain.k_proj, plain.v_proj):
            part.weight.copy_(seen.flip(0))
        model.load_state_dict(plain.state_dict())
        check()
        model.order = plain.order = order[::-1]
        model.q_proj.weight.copy_(torch.cat([seen.flip(0)] * 3))
        check()
    model.order = plain.order = order
    leaves = [x, x.clone().requires_grad_()]
    x.requires_grad_()
    for leaf, linears in zip(leaves, (model, plain), strict=True):
        checkpoint(linears, leaf, use_reentrant=False).square().sum().backward()
    assert torch.allclose(leaves[0].grad, leaves[1].grad, atol=1e-4)
    torch._dynamo.reset()
    compiled, x = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(3, 64)
    if len(order) == 3:
        with torch.no_grad():
            compiled(x)
            assert torch.allclose(compiled(x.normal_()), plain(x), atol=1e-5)


def test_gradients_reach_the_input() -> None:
    model, x = make(SCHEMES["int4"]), torch.randn(3, 64)
    grads = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        grads.append(leaf.grad)
        if len(grads) == 1:
            fuse_linears_(model)
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-4)


def test_compiled_once_for_all_layers() -> None:
    torch._dynamo.reset()
    model, x = make(SCHEMES["int4"]), torch.randn(3, 64)
    fuse_linears_(model)
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        y = model(x)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        model[0]._compiled_call_impl = model[1]._compiled_call_impl = None
        assert torch.allclose(y, model(x), atol=1e-5)
    torch._dynamo.reset()


def test_names_of_the_recipes_and_custom_names() -> None:
    config = LlamaConfig(
        vocab_size=31, dim=24, layers=2, heads=6, kv_heads=2, hidden=40, context=32
    )
    model, tokens = Llama(config).eval(), torch.randint(31, (2, 9))
    y = model(tokens)
    assert len(fuse_linears_(model)) == 4
    assert torch.allclose(model(tokens), y, atol=1e-5)
    own = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
    assert fuse_linears_(own, [("a", "b")]) == [("a", "b")]
    assert "a=4, b=4" in repr(own) and "b of a" in repr(own)


def spoiled(change) -> nn.Module:
    model = make(None)
    change(model[1])
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: setattr(m, "k_proj", nn.Linear(32, 8)), r"1.k_proj has K 32, 1.q_proj has 64"),
        (lambda m: m.k_proj.bfloat16(), r"1.k_proj has dtype torch.bfloat16"),
        (lambda m: setattr(m, "v_proj", nn.Linear(64, 8, False)), r"1.v_proj has bias False"),
        (lambda m: lb.quantize_(m.k_proj, SCHEMES["int4"]), r"1.k_proj has requires_grad False"),
        (lambda m: setattr(m.v_proj, "weight", m.k_proj.weight), r"1.k_proj is tied to another"),
        (lambda m: m.k_proj.register_forward_hook(print), r"1.k_proj has hooks"),
        (lambda m: m.k_proj.register_full_backward_pre_hook(print), r"1.k_proj has hooks"),
        (lambda m: m.k_proj.register_state_dict_post_hook(lambda *_: None), r"1.k_proj has hooks"),
        (lambda m: setattr(m, "k_proj", nn.Identity()), r"1.k_proj is a Identity, not an nn.L"),
        (lambda m: m.k_proj.train(), r"1.k_proj has mode \(train or eval\) True"),
    ],
    ids=[
        "K",
        "dtype",
        "bias",
        "trainable",
        "tied",
        "hooks",
        "grad hooks",
        "save hooks",
        "class",
        "mode",
    ],
)
def test_the_obstacle_to_fusing_is_named(change, match: str) -> None:
    model = spoiled(lambda m: (m.eval(), change(m)))
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=match):
        fuse_linears_(model)
    assert dict(model.named_modules()) == before


def test_schemes_that_differ_are_named() -> None:
    model = make(None)
    lb.quantize_(model, {"0.k_proj": SCHEMES["int8"], "*": SCHEMES["int4"]})
    with pytest.raises(ValueError, match=r"0.k_proj is stored as .*bits=8.*0.q_proj as .*bits=4"):
        fuse_linears_(model)
    model = make(lb.Scheme(lb.Spec(lb.Int(4), lb.PerTensor())))
    with pytest.raises(ValueError, match=r"cannot fuse.* rows of 0.q_proj share a scale"):
        fuse_linears_(model)
    model = make(lb.Scheme(lb.Spec(lb.Int(4), lb.PerBlock(8, 8))))
    with pytest.raises(ValueError, match=r"cannot fuse.* rows of 0.q_proj share a scale"):
        fuse_linears_(model)


def test_conversions_say_that_fused_linears_are_left_alone() -> None:
    model = make(None)
    fuse_linears_(model)
    before = model[0].q_proj.weight
    for choice in (None, lambda module, name: True):
        report = lb.quantize_(copy.deepcopy(model), SCHEMES["int8"], choice)
        assert "unfuse_linears_" in report.left["0.q_proj.weight"]
        assert any(entry.fqn == "0.down_proj.weight" for entry in report.entries if entry.converted)
    with pytest.raises(ValueError, match=r"0.q_proj.weight: fused with its neighbours"):
        lb.quantize_(model, SCHEMES["int8"], lambda module, name: name == "0.q_proj")
    assert model[0].q_proj.weight is before


def test_nothing_to_fuse() -> None:
    with pytest.raises(ValueError, match=r"no module has .*q_proj"):
        fuse_linears_(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(TypeError, match=r"groups must be tuples of names.*got 'q_proj'"):
        fuse_linears_(make(None), groups="q_proj")
    model = make(None)
    fuse_linears_(model)
    with pytest.raises(ValueError, match="all are fused already"):
        fuse_linears_(model)
    with pytest.raises(ValueError, match="nothing is fused in Sequential"):
        unfuse_linears_(make(None))
