"""QAT of experts, weights [E, N, K] or [E, K, N] that a module multiplies in ways of its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import qat
from lowbit.layers.frozen import shown_class
from lowbit.numerics.granularity import (
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
)
from lowbit.numerics.learned_scales import learns_zero
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import is_learned
from tests.qat.test_factors import reference_gradients_of_factors
from tests.train.problems import relative, values
from tests.train.test_grouped import TOKENS, offsets_of

E, HIDDEN, INNER, ROWS = 4, 64, 48, 48
Products = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, w, offs=ends)


def experts_of(ends: Tensor) -> Tensor:
    return torch.bucketize(torch.arange(int(ends[-1])), ends.long(), right=True)


def copied(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """A copy of its expert for each token, from the left where the weight is [E, N, K]."""
    index = experts_of(ends)
    if w.is_contiguous():
        return torch.bmm(x.unsqueeze(1), w[index]).squeeze(1)
    return torch.bmm(w.transpose(-2, -1)[index], x.unsqueeze(-1)).squeeze(-1)


def looped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(pairwise(starts))])


def batched(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """As many tokens for each expert."""
    return torch.bmm(x.view(len(w), -1, x.shape[-1]), w).flatten(0, 1)


PATHS: dict[str, Products] = {
    "grouped": grouped,
    "copied": copied,
    "looped": looped,
    "batched": batched,
}


class Experts(nn.Module):
    """Two products of each token with the weights of its expert; `turned`: weights [E, K, N]."""

    def __init__(self, path: Products = grouped, turned: bool = False) -> None:
        super().__init__()
        self.path, self.turned = path, turned
        for name, n, k in (("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            w = values(E, n, k, seed=n) / k**0.5
            setattr(self, name, nn.Parameter(w.mT.contiguous() if turned else w))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        up, down = (w if self.turned else w.transpose(-2, -1) for w in (self.up, self.down))
        return self.path(F.silu(self.path(x, up, ends)), down, ends)


class Model(nn.Module):
    def __init__(self, path: Products = grouped, turned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts(path, turned)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.experts(self.first(x), ends)


def chosen(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear | Experts)


def prepared(model: nn.Module, scheme: Any, scales: Any = "learned") -> nn.Module:
    qat.prepare_(model, scheme, chosen, scales=scales)
    return model


def trained(model: nn.Module, steps: int = 3) -> nn.Module:
    """With scales that moved, some of them negative."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_scale"):
                p.view(-1)[::3] *= -1
    for _ in range(steps):
        model(values(ROWS, HIDDEN, dtype=dtype), EVEN).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


EVEN = offsets_of((12, 12, 12, 12))
SCHEMES = {
    "int4-g16": lb.Int4WeightOnly(16),
    "int8-row": lb.Int8WeightOnly(),
    "int3-asymmetric": Scheme(Spec(Int(3), PerGroup(16), "asymmetric")),
    "int2-float-zero": Scheme(Spec(Int(2), PerGroup(32), "float_zero_point")),
    "int2-half": lb.Int2WeightOnly(16),
    "int1-half": Scheme(Spec(Int(1), PerRow(), "half_integer")),
    "int5-blocks": Scheme(Spec(Int(5), PerBlock(16, 1))),
    "float8": lb.Float8WeightOnly(),
    "int8-int4": lb.Int8DynamicActivationInt4Weight(16),
    "float8-float8": lb.Float8DynamicActivationFloat8Weight(),
    "float8-int4": Scheme(
        Spec(Int(4), PerGroup(16)), lb.Float8DynamicActivationFloat8Weight().activation
    ),
}
WEIGHT, BOTH = SCHEMES["int3-asymmetric"], SCHEMES["int8-int4"]
both_scales = pytest.mark.parametrize("scales", ["present", "learned"])


@pytest.mark.cover("pairs")
@both_scales
@pytest.mark.parametrize("turned", [False, True], ids=["out-in", "in-out"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_converted_model_computes_what_was_trained(name, path, turned, scales) -> None:
    model = trained(prepared(Model(PATHS[path], turned), SCHEMES[name], scales))
    x = values(ROWS, HIDDEN, seed=7)
    y = model(x, EVEN)
    names = {n for n, _ in model.named_parameters()}
    assert ("experts.up_scale" in names) == (scales == "learned")
    zeros = scales == "learned" and learns_zero(SCHEMES[name].weight)
    assert ("experts.down_zero" in names) == zeros
    qat.convert_(model)
    assert shown_class(model.experts) is Experts
    assert not any(n.endswith(("_scale", "_zero")) for n, _ in model.named_parameters())
    found = model(x, EVEN)
    if (
        path == "copied" and scales == "learned"
    ):  # copies with other strides, which torch.bmm sums in another order
        assert relative(found, y) < 1e-6
    else:
        assert torch.equal(found, y)


@both_scales
def test_experts_that_share_one_scale(scales) -> None:
    """The whole of them has it: an expert alone would be rounded by another one."""
    scheme = Scheme(Spec(Int(4), PerTensor()))
    for path in ("grouped", "batched", "looped", "copied"):
        model = prepared(Model(PATHS[path]), scheme, scales)
        apart = path in ("looped", "copied")
        if scales == "present" and apart:
            with pytest.raises(NotImplementedError, match=r"they share scales .*learned"):
                model(values(ROWS, HIDDEN), EVEN)
            continue
        y = trained(model)(values(ROWS, HIDDEN), EVEN)
        qat.convert_(model)
        if not apart:
            assert torch.equal(model(values(ROWS, HIDDEN), EVEN), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4-g16", "int3-asymmetric", "int2-half", "int8-int4"])
def test_weights_in_16_bits_to_the_bit(name, dtype) -> None:
    model = trained(prepared(Model(batched).to(dtype), SCHEMES[name]))
    experts: Any = model.experts
    seen = {
        n: getattr(experts, n).quantized_by(
            experts._parameters[f"{n}_scale"], experts._parameters[f"{n}_zero"]
        )
        for n in ("up", "down")
    }
    qat.convert_(model)
    for n, expected in seen.items():
        assert torch.equal(getattr(experts, n).dequantize(), expected)


def outcome(model: nn.Module, x: Tensor, ends: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x, ends)
    y.backward(grad)
    return {
        "output": y.detach(),
        "input": x.grad,
        **{n: p.grad for n, p in model.named_parameters()},
    }


class One(nn.Module):
    """A single product, whose gradients have a closed form."""

    def __init__(self, path: Products) -> None:
        super().__init__()
        self.path, self.up = path, nn.Parameter(values(E, INNER, HIDDEN, seed=1))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.path(x, self.up.transpose(-2, -1), ends)


@pytest.mark.parametrize("path", ["grouped", "looped", "copied"])
@pytest.mark.parametrize("tokens", ["ragged", "empty-experts", "one-gets-all"])
@pytest.mark.parametrize("name", ["int4-g16", "int3-asymmetric", "int2-float-zero", "int2-half"])
def test_gradients(name, tokens, path) -> None:
    """Of weight, scale, zero point and input, in float64, expert by expert."""
    spec, ends = SCHEMES[name].weight, offsets_of(TOKENS[tokens])
    model = One(PATHS[path])
    qat.prepare_(model, SCHEMES[name], lambda m, n: True, scales="learned")
    own = [model._parameters[n] for n in ("up_scale", "up_zero")]
    with torch.no_grad():
        for p in own:
            if p is not None:
                p *= 0.7  # so that some values clip
    seen: Any = model.up
    rounded = seen.quantized_by(*own).detach().double()
    x, grad = values(ROWS, HIDDEN, seed=2), values(ROWS, INNER, seed=3)
    found = outcome(model, x, ends, grad)
    expected: dict[str, list[Tensor]] = {
        "output": [],
        "input": [],
        "up": [],
        "up_scale": [],
        "up_zero": [],
    }
    start = 0
    for e, end in enumerate(ends.tolist()):
        rows, dy = x[start:end].double(), grad[start:end].double()
        expected["output"].append(rows @ rounded[e].T)
        expected["input"].append(dy @ rounded[e])
        scale, zero = (None if p is None else p.detach()[e] for p in own)
        parts = reference_gradients_of_factors(seen.weight[e], scale, zero, spec, dy.T @ rows)
        for key, part in zip(("up", "up_scale", "up_zero"), parts, strict=True):
            expected[key].append(part)
        start = end
    for key in found:
        exact = (
            torch.cat(expected[key]) if key in ("output", "input") else torch.stack(expected[key])
        )
        assert relative(found[key], exact) < 1e-5, key
    empty = [e for e, count in enumerate(TOKENS[tokens]) if not count]
    assert not any(found[key][empty].any() for key in ("up", "up_scale"))


@pytest.mark.parametrize(
    ("scheme", "scales", "backend"),
    [
        (WEIGHT, "learned", "aot_eager"),  # a zero point that learns
        (BOTH, "present", "aot_eager"),  # inputs that are rounded
        pytest.param(BOTH, "learned", "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param(BOTH, "learned", "inductor", marks=pytest.mark.exhaustive),
        pytest.param(WEIGHT, "present", "aot_eager", marks=pytest.mark.exhaustive),
    ],
    ids=["weight-learned", "both-present", "both-learned", "inductor", "weight-present"],
)
def test_compiled_without_new_graphs_for_other_tokens(scheme, scales, backend) -> None:
    """`aot_eager` makes the graphs that inductor compiles, and runs them without its code."""
    model = prepared(Model().bfloat16(), scheme, scales)
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    run = torch.compile(model, fullgraph=True, backend=counted)
    for counts in ((3, 20, 5, 12), (0, 0, 37, 0), (8, 8, 9, 9), (1, 0, 0, 55)):
        ends, rows = offsets_of(counts), sum(counts)
        x = values(rows, HIDDEN, dtype=torch.bfloat16, seed=rows)
        torch._dynamo.mark_dynamic(x, 0)
        grad = values(rows, HIDDEN, dtype=torch.bfloat16, seed=5)
        expected = outcome(model, x, ends, grad)
        model.zero_grad()
        y = run(x, ends)
        y.backward(grad)
        assert relative(y.detach(), expected["output"]) < 2e-2
        for name, p in model.named_parameters():
            # no code clips, as at the start
            is_zero = not p.grad.any() and not expected[name].any()
            assert is_zero or relative(p.grad, expected[name]) < 4e-2, (counts, name)
    assert counted.frame_count == 1


@both_scales
@pytest.mark.parametrize("scheme", [WEIGHT, BOTH], ids=["weight", "both"])
@pytest.mark.parametrize("path", ["grouped", "looped", "copied"])
def test_checkpointing_computes_the_same(path, scheme, scales) -> None:
    model = prepared(Model(PATHS[path]), scheme, scales)
    x, grad = values(ROWS, HIDDEN), values(ROWS, HIDDEN, seed=5)
    expected = outcome(model, x, EVEN, grad)
    whole = model.forward
    model.forward = lambda x, ends: checkpoint(whole, x, ends, use_reentrant=False)
    found = outcome(model, x, EVEN, grad)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@both_scales
@pytest.mark.parametrize("path", ["looped", "copied"])
def test_autocast(path, scales) -> None:
    """Products in bfloat16 of the values that the converted model has; gradients in float32."""
    model = trained(prepared(Model(PATHS[path]), BOTH, scales))
    x = values(ROWS, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, EVEN)
        y.float().square().mean().backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        qat.convert_(model)
        assert y.dtype is torch.bfloat16 and relative(model(x, EVEN), y) < 2e-2


def test_switched_off_it_is_the_plain_model() -> None:
    plain = Model()
    model = prepared(copy.deepcopy(plain), BOTH)
    x, grad = values(ROWS, HIDDEN), values(ROWS, HIDDEN, seed=5)
    on, expected = outcome(model, x, EVEN, grad), outcome(plain, x, EVEN, grad)
    with qat.high_precision(model):
        off = outcome(model, x, EVEN, grad)
    for name, value in expected.items():
        assert torch.equal(off[name], value), name
    assert off["experts.up_scale"] is None
    assert not torch.equal(on["output"], expected["output"])
    qat.enable_(model, weights=False)
    inputs_rounded = model(x, EVEN)
    qat.enable_(model, activations=False)
    weights_rounded = model(x, EVEN)
    for y in (inputs_rounded, weights_rounded):
        assert not torch.equal(y, on["output"]) and not torch.equal(y, expected["output"])
    qat.enable_(model)
    assert torch.equal(model(x, EVEN), on["output"])


def test_copies_files_and_undo() -> None:
    model = trained(prepared(Model(), WEIGHT))
    x = values(ROWS, HIDDEN)
    y = model(x, EVEN)
    assert torch.equal(copy.deepcopy(model)(x, EVEN), y)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x, EVEN), y)
    with torch.device("meta"):
        empty = Model()
    prepared(empty, WEIGHT)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty.eval()(x, EVEN), y)
    weights = {n: p.weight.clone() for n, p in model.named_parameters() if hasattr(p, "weight")}
    qat.undo_(model)
    assert shown_class(model.experts) is Experts
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in Model().named_parameters()]
    for name, expected in weights.items():
        assert torch.equal(model.get_parameter(name), expected), name


def test_plans_by_pattern() -> None:
    """A scheme for each weight of one module, and scales of one of them learned."""
    model = Model()
    qat.prepare_(model, {"experts.down": BOTH, "first": None, "experts.up": None}, chosen)
    report = qat.prepare_(model, {"experts.up": WEIGHT}, chosen, scales="learned")
    assert report.converted == ["experts.up"]
    experts: Any = model.experts
    assert type(experts.down) is FakeQuantizedTensor and is_learned(experts.up)
    again = qat.prepare_(model, {"first": WEIGHT}, chosen, scales="learned").left
    assert again["experts.up_scale"] == "learned scales or zero points of experts.up"
    y = trained(model)(values(ROWS, HIDDEN), EVEN)
    qat.convert_(model)
    assert torch.equal(model(values(ROWS, HIDDEN), EVEN), y)
    assert shown_class(model.experts) is Experts


def test_trace() -> None:
    model = prepared(Model(), {"first": None, "*": BOTH}).eval()
    x = values(ROWS, HIDDEN)
    for path in PATHS.values():
        model.experts.path = path
        products = {p.layer: p for p in lb.trace(model, x, EVEN).products}
        assert set(products) == {"first", "experts.up", "experts.down"}
        for name in ("experts.up", "experts.down"):
            found = products[name]
            assert found.weight == "QAT int4-g16-int8-token" and "rounded values" in found.why
            assert found.calls and (found.n, found.k) in ((INNER, HIDDEN), (HIDDEN, INNER))


def test_names_of_tied_experts() -> None:
    class Twice(nn.Module):
        def __init__(self, name: str, weight: nn.Parameter) -> None:
            super().__init__()
            self.name = name
            self.register_parameter(name, weight)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return grouped(x, getattr(self, self.name).transpose(-2, -1), ends)

    weight = nn.Parameter(values(E, HIDDEN, HIDDEN) / 8)
    model = nn.ModuleList([Twice("up", weight), Twice("down", weight)])
    qat.prepare_(model, WEIGHT, lambda m, n: True, scales="learned")
    first, second = model
    assert first.up_scale is second.down_scale and first.up_zero is second.down_zero
    x = values(ROWS, HIDDEN)
    y = second(first(x, EVEN), EVEN)
    y.square().mean().backward()
    assert first.up.grad is not None and second.down_scale.grad is not None
    qat.convert_(model)
    assert first.up is second.down and torch.equal(second(first(x, EVEN), EVEN), y)


def test_what_keeps_present_scales() -> None:
    class Taken(One):
        def __init__(self) -> None:
            super().__init__(grouped)
            self.up_scale = nn.Parameter(torch.ones(3))

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(values(E, INNER, HIDDEN))

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(values(E, HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.table)

    reasons = {
        Taken: "Taken has a up_scale of its own",
        Held: "Held has no forward, in which its products would see them",
        Router: "Router multiplies by itself",
    }
    for kind, reason in reasons.items():
        model = kind()
        report = qat.prepare_(model, lb.Int4WeightOnly(16), lambda m, n: True, scales="learned")
        assert f"present scales, as {reason}" in str(report)
        assert type(model) is kind
        qat.convert_(model)
        assert not hasattr(model, "up_scale") or kind is Taken


def test_a_weight_outside_of_the_forward_of_its_module() -> None:
    model, x = prepared(Model(), WEIGHT), values(ROWS, HIDDEN)
    up = model.experts.up
    y = grouped(x, up.transpose(-2, -1), EVEN)
    assert torch.equal(y, grouped(x, up.dequantize().transpose(-2, -1), EVEN))
    y.backward(torch.randn_like(y))
    assert up.grad.norm() > 0 and model.experts.up_scale.grad.norm() > 0


def test_errors() -> None:
    model = prepared(Model(), WEIGHT)
    with pytest.raises(TypeError, match="offs"):  # a failing forward leaves the parameters
        model(values(ROWS, HIDDEN), (1, 2))
    assert is_learned(model.experts._parameters["up"])
    with torch.no_grad():
        model.experts.down_scale[0, 0] = torch.inf
    with pytest.raises(
        ValueError, match=r"experts\.down_scale has 3 NaN or infinite values of 768"
    ):
        qat.convert_(model)


def test_an_input_without_tokens() -> None:
    model = prepared(Model(looped), BOTH)
    x = values(0, HIDDEN).requires_grad_()
    y = model(x, offsets_of((0, 0, 0, 0)))
    assert y.shape == (0, HIDDEN)
    y.sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert not any(g.any() for g in grads.values())


@pytest.mark.gpu
@both_scales
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scheme", [WEIGHT, BOTH], ids=["weight", "both"])
def test_on_a_gpu(scheme, compiled, scales) -> None:
    """Outputs and gradients of the CPU, and the converted weights to the bit."""
    model = prepared(Model().bfloat16(), scheme, scales)
    other = copy.deepcopy(model).cuda()
    x, grad = (values(ROWS, HIDDEN, dtype=torch.bfloat16, seed=s) for s in (0, 5))
    expected = outcome(model, x, EVEN, grad)
    torch._dynamo.reset()
    run = torch.compile(other, fullgraph=True) if compiled else other
    y = run(x.cuda(), EVEN.cuda())
    y.backward(grad.cuda())
    assert relative(y.cpu(), expected["output"]) < 2e-2
    for name, p in other.named_parameters():
        assert relative(p.grad.cpu(), expected[name]) < 4e-2, name
    for found in (model, other):
        qat.convert_(found)
    for name in ("up", "down"):
        pair = [getattr(m.experts, name).dequantize().cpu() for m in (model, other)]
        assert torch.equal(*pair), name
