"""Weights of siblings in memory side by side: the model computes, saves and loads as before."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit.convert import side_by_side
from lowbit.convert.side_by_side import joint_of, joint_weight
from lowbit.linear.frozen.in_graph import MOST_ALIKE
from lowbit_kernels.runtime import launches
from tests.garbage import only_new
from tests.schemes import relative_error


class Attention(nn.Module):
    def __init__(self, bias: bool = False, k: int = 64) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(k, 64, bias=bias), nn.Linear(k, 32, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(k, 32, bias=bias), nn.Linear(64, k, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q * torch.cat([k, v], -1))


def are_joined(tensors: list[torch.Tensor]) -> bool:
    return joint_of(tensors) is not None


def parts(model: nn.Module, name: str) -> list[torch.Tensor]:
    weights = [getattr(model, p).weight for p in ("q_proj", "k_proj", "v_proj")]
    return [getattr(w, name) for w in weights]


def pair(
    monkeypatch: pytest.MonkeyPatch, scheme: lb.Scheme, **options: bool
) -> tuple[nn.Module, nn.Module]:
    """A converted model, and one whose siblings lie side by side."""
    torch.manual_seed(0)
    apart = Attention(**options).requires_grad_(False)
    joined = copy.deepcopy(apart)
    lb.quantize_(apart, scheme)
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    lb.quantize_(joined, scheme)
    return apart, joined


@pytest.mark.parametrize(
    "scheme",
    [
        lb.Int4WeightOnly(32),
        lb.Int8WeightOnly(),
        lb.Float8WeightOnly(),
        lb.NF4WeightOnly(32),
        lb.Int8DynamicActivationInt8Weight(),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_nothing_else_changes(
    scheme: lb.Scheme, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, joined = pair(monkeypatch, scheme, bias=bias)
    x = torch.randn(3, 64)
    assert are_joined(parts(joined, "codes")) and not are_joined(parts(apart, "codes"))
    if bias:
        assert are_joined([joined.q_proj.bias, joined.k_proj.bias, joined.v_proj.bias])
    assert torch.equal(joined(x), apart(x))
    own, expected = joined.state_dict(), apart.state_dict()
    assert list(own) == list(expected)
    assert all(torch.equal(own[k], expected[k]) for k in own)
    storages = {t.untyped_storage().data_ptr() for t in own.values()}
    assert len(storages) == len(own), "no two are one for tools that save models"
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in own.values())
    file = io.BytesIO()
    torch.save(own, file)
    file.seek(0)
    other = Attention(bias=bias).requires_grad_(False)
    lb.quantize_(other, scheme)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), apart(x))
    assert torch.equal(copy.deepcopy(joined)(x), apart(x))
    joined.load_state_dict(Attention(bias=bias).state_dict(), strict=False)
    joined.load_state_dict(expected)
    assert torch.equal(joined(x), apart(x))


def test_graphs_and_moved_models_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    apart, joined = pair(monkeypatch, lb.Int4WeightOnly(32))
    assert joined.q_proj._lowbit_parts_weight[0] is joined.q_proj.weight.codes
    moved = joined.to(torch.float64).to(torch.float32)
    lb.inference.freeze_(moved)
    assert are_joined(parts(moved, "codes")) and are_joined(parts(moved, "scale"))
    x = torch.randn(2, 64)
    assert torch.equal(moved(x), apart(x))


@only_new()
def test_memory_lives_as_long_as_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = pair(monkeypatch, lb.Int4WeightOnly(32))
    codes, joint = joined.v_proj.weight.codes, weakref.ref(joined.q_proj.weight.joint)
    expected = codes.clone()
    del joined
    gc.collect(0)
    assert joint() is None and torch.equal(codes, expected)


def test_weights_that_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    tied, mixed, narrow = Attention(), Attention(), Attention(k=40)
    tied.k_proj.weight = tied.v_proj.weight
    for model in (tied, mixed, narrow):
        model.requires_grad_(False)
    lb.quantize_(tied, lb.Int4WeightOnly(32))
    lb.quantize_(mixed, {"q_proj": lb.Int8WeightOnly(), "*": lb.Int4WeightOnly(32)})
    lb.quantize_(narrow, lb.Int4WeightOnly(8))
    assert not are_joined(parts(tied, "codes")) and not are_joined(parts(mixed, "codes"))
    assert narrow.q_proj.weight.codes.data_ptr() % 16 == 0


@pytest.mark.parametrize("bias", [False, True])
def test_the_joint_weight_of_linears(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = pair(monkeypatch, lb.Int4WeightOnly(32), bias=bias)
    linears = [joined.q_proj, joined.k_proj, joined.v_proj]
    found = joint_weight(linears)
    assert (found is None) is bias and joint_weight(linears[::-1]) is None
    if found is not None:
        rows = torch.cat([linear.weight.dequantize() for linear in linears])
        assert torch.equal(found.dequantize(), rows)


def test_siblings_that_are_stored_in_different_ways_have_no_joint_rows() -> None:
    layers = []
    for scheme in (
        lb.NF4WeightOnly(double_quantization=True),
        lb.NF4WeightOnly(),
        lb.Int4WeightOnly(),
        lb.Float8WeightOnly(),
    ):
        layer = nn.Sequential(nn.Linear(64, 32, bias=False).requires_grad_(False))
        lb.quantize_(layer, scheme)
        layers.append(layer[0])
    for order in (layers, layers[::-1]):
        assert side_by_side._joint_rows(order) is None


# ---- graphs of torch.compile ----------------------------------------------------------------------------------------


class Products:
    """A backend of torch.compile that counts the products in each graph without gradients."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: Any, examples: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def count(traced: Any, _: Any) -> Any:
            names = [str(n.target) for n in traced.graph.nodes]
            self.counts.append(sum("linear" in n or "mm" in n for n in names))
            return traced.forward

        return aot_autograd(fw_compiler=count)(graph, examples)


def compiled(model: Callable[..., Any]) -> tuple[Callable[..., Any], Products]:
    torch._dynamo.reset()
    products = Products()
    return torch.compile(model, backend=products, fullgraph=True), products


def place_of(layer: Any) -> str:
    """The place among its siblings that graphs of a linear read."""
    return str(layer._lowbit_about_weight.split("\n")[2])


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "scheme",
    [lb.Int4WeightOnly(32), lb.NF4WeightOnly(32), lb.Int8DynamicActivationInt8Weight()],
    ids=str,
)
@pytest.mark.parametrize(("bias", "mode"), [(False, False), (True, False), (True, True)])
@torch.no_grad()
def test_graphs_have_one_product(
    scheme: lb.Scheme, bias: bool, mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart, joined = pair(monkeypatch, scheme, bias=bias)
    x = torch.randn(3, 64)
    other = 2 * x
    plain, of_plain = compiled(apart)
    assert is_close(plain(x), apart(x))
    run, products = compiled(joined)
    with torch.inference_mode() if mode else torch.no_grad():
        assert all(is_close(run(each), apart(each)) for each in (x, other))
    assert 2 * products.counts[0] == of_plain.counts[0] and len(products.counts) == 1


@torch.no_grad()
def test_graphs_follow_what_becomes_of_a_sibling(monkeypatch: pytest.MonkeyPatch) -> None:
    apart, joined = pair(monkeypatch, lb.Int4WeightOnly(32), bias=True)
    x = torch.randn(3, 64)
    run, products = compiled(joined)
    assert is_close(run(x), apart(x))
    both = (joined, apart)
    other = {k: v + 1 if k.endswith("bias") else v for k, v in apart.state_dict().items()}
    for model in both:
        model.load_state_dict(other)
    assert is_close(run(x), apart(x)) and products.counts == [2], "in place"
    bias = nn.Parameter(torch.randn(32), requires_grad=False)
    for model in both:
        model.k_proj.bias = bias
    assert is_close(run(x), apart(x)) and products.counts == [2, 4]
    lb.inference.freeze_(joined)
    assert is_close(run(x), apart(x)) and products.counts == [2, 4]
    linear = nn.Linear(64, 32).requires_grad_(False)
    lb.quantize_(linear, lb.Int4WeightOnly(32))
    for model in both:
        model.v_proj.weight = linear.weight
    assert is_close(run(x), apart(x)) and not place_of(joined.q_proj)
    lb.inference.freeze_(joined)
    assert place_of(joined.q_proj).startswith("0 64,32,32 ")
    assert is_close(run(x), apart(x))
    moved = joined.to(torch.float64)
    assert not place_of(moved.q_proj)
    assert is_close(run(x.double()), apart.to(torch.float64)(x.double()))


class Crossed(Attention):
    """Attention to other tokens."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.q_proj(x), self.k_proj(other), self.v_proj(other)
        return self.o_proj(q * torch.cat([k, v], -1))


class Written(Attention):
    """Attention that writes to what it has read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        q, k = self.q_proj(x), self.k_proj(x)
        x.mul_(2)
        return self.o_proj(q * torch.cat([k, self.v_proj(x)], -1))


@pytest.mark.parametrize("kind", [Crossed, Written])
@torch.no_grad()
def test_siblings_of_several_inputs_stay_apart(
    kind: type[Attention], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    model = kind().requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    run, products = compiled(model)
    inputs = [torch.randn(3, 64) for _ in range(1 + (kind is Crossed))]
    assert is_close(run(*inputs), model(*inputs)) and products.counts == [4]


class Backwards(Attention):
    """Attention that begins with v."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, q, k = self.v_proj(x), self.q_proj(x), self.k_proj(x)
        return self.o_proj(q * torch.cat([k, v], -1))


class Twice(Attention):
    """Attention to two inputs, by one q and two k and v."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, other = self.q_proj(x), self.k_proj(x), self.k_proj(2 * x)
        return self.o_proj(q * torch.cat([k + other, self.v_proj(x)], -1))


class Interleaved(nn.Module):
    """Two attentions whose linears take turns with one input."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            [getattr(head, name)(x) for head in self.heads]
            for name in ("q_proj", "k_proj", "v_proj")
        )
        outputs = [q[i] * torch.cat([k[i], v[i]], -1) for i in range(2)]
        return self.heads[0].o_proj(outputs[0]) - self.heads[1].o_proj(outputs[1])


@pytest.mark.parametrize("kind", [Backwards, Twice, Interleaved])
@torch.no_grad()
def test_siblings_in_another_order(
    kind: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    model = kind().requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    run, _ = compiled(model)
    x = torch.randn(3, 64)
    assert is_close(run(x), model(x))


@torch.no_grad()
def test_a_sibling_whose_first_is_in_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = pair(monkeypatch, lb.Int4WeightOnly(32), bias=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        q = joined.q_proj(x)
        torch._dynamo.graph_break()
        return q * torch.cat([joined.k_proj(x), joined.v_proj(x)], -1)

    torch._dynamo.reset()
    products = Products()
    x = torch.randn(3, 64)
    assert is_close(torch.compile(forward, backend=products)(x), forward(x))
    assert products.counts == [1, 2]


@torch.no_grad()
def test_a_sibling_that_is_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    model = nn.ModuleList(Attention() for _ in range(3)).requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    x = torch.randn(3, 64)
    torch._dynamo.reset()
    run = torch.compile(lambda block, x: block(x), backend=Products(), fullgraph=True)
    assert is_close(run(model[0], x), model[0](x))
    model[1].v_proj = model[0].v_proj
    assert is_close(run(model[1], x), model[1](x)), "another block, in the graph of the first one"
    model[0].k_proj = model[2].k_proj
    assert is_close(run(model[0], x), model[0](x)), "the same block"


@torch.no_grad()
def test_guards_of_many_layers_know_siblings_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare objects takes torch 2.11 longer at each call than all other guards of a model."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    torch.manual_seed(0)
    model = nn.ModuleList(Attention() for _ in range(MOST_ALIKE + 3)).requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))

    def forward(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = x + block(x)
        return x

    def is_right() -> bool:
        return relative_error(run(model, x), forward(model, x)) < 1e-5

    x = torch.randn(3, 64)
    run, products = compiled(forward)
    assert is_right()
    (entry,) = _debug_get_cache_entry_list(forward.__code__)
    guards = str(entry.guard_manager).splitlines()
    at = {i for i in range(len(model)) for g in guards if f"['{i}']" in g and "_lowbit_shared" in g}
    assert at == set(range(MOST_ALIKE))
    lb.inference.freeze_(model)
    assert is_right() and len(products.counts) == 1, "the same siblings"
    model[-1].v_proj = model[-2].v_proj
    assert is_right(), "a sibling of another layer"
    model[0].k_proj = model[-1].k_proj
    assert is_right(), "a sibling of a layer with a name"
    assert len(products.counts) == 3


@pytest.mark.parametrize("whole", [True, False])
@torch.no_grad()
def test_siblings_around_a_checkpoint(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    outer, inner = model = nn.ModuleList(Attention() for _ in range(2)).requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))

    def forward(x: torch.Tensor) -> torch.Tensor:
        q = outer.q_proj(x)
        other = checkpoint(inner if whole else inner.q_proj, x, use_reentrant=False)
        return q * torch.cat([outer.k_proj(x), outer.v_proj(x)], -1) + other

    run, _ = compiled(forward)
    x = torch.randn(3, 64)
    assert is_close(run(x), forward(x))


@torch.no_grad()
def test_siblings_with_and_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = pair(monkeypatch, lb.Int4WeightOnly(32))

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        q = joined.q_proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            return [q, joined.k_proj(x), joined.v_proj(x)]

    run, _ = compiled(forward)
    x = torch.randn(3, 64)
    pairs = list(zip(run(x), forward(x), strict=True))
    assert all(a.dtype == b.dtype and relative_error(a, b) < 1e-2 for a, b in pairs)


@torch.no_grad()
def test_the_first_sibling_alone_multiplies_its_own_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    _, joined = pair(monkeypatch, lb.Int4WeightOnly(32))
    x, shapes = torch.randn(3, 64), []

    def backend(graph: Any, examples: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        def shown(traced: Any, _: Any) -> Any:
            names = ("linear", "mm")
            nodes = [n for n in traced.graph.nodes if any(k in str(n.target) for k in names)]
            shapes.append([tuple(n.meta["val"].shape) for n in nodes])
            return traced.forward

        return aot_autograd(fw_compiler=shown)(graph, examples)

    for run in (joined, lambda x: joined.q_proj(x)):
        torch._dynamo.reset()
        torch.compile(run, backend=backend, fullgraph=True)(x)
    assert shapes == [[(3, 128), (3, 64)], [(3, 64)]], "also after a graph of all siblings"


class Inputs:
    """A backend of torch.compile that counts the inputs of each graph."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: Any, examples: list[Any]) -> Callable[..., Any]:
        self.counts.append(len(examples))
        return graph.forward  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_siblings_are_inputs_of_a_graph_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    apart, joined = pair(monkeypatch, lb.Int4WeightOnly(32), bias=bias)
    x, counts = torch.randn(3, 64), []
    for model in (apart, joined):
        torch._dynamo.reset()
        inputs = Inputs()
        assert is_close(torch.compile(model, backend=inputs, fullgraph=True)(x), model(x))
        counts += inputs.counts
    assert counts == [1 + 4 * (2 + bias), 1 + 2 * (2 + bias)], "x, and codes, scales and biases"


def test_one_graph_serves_blocks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "DEVICES", ("cpu",))
    model = nn.ModuleList(Attention() for _ in range(3)).requires_grad_(False)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    x = torch.randn(3, 64)
    torch._dynamo.reset()
    products = Products()
    run = torch.compile(lambda block, x: block(x), backend=products, fullgraph=True)
    with torch.no_grad():
        for block in model:
            assert is_close(run(block, x), block(x))
    assert products.counts == [2]
    y = run(model[0], x.requires_grad_())
    y.sum().backward()
    assert products.counts[1] == 4, "with gradients each has its own"


@pytest.mark.gpu
@torch.no_grad()
def test_graphs_on_a_gpu_launch_one_product() -> None:
    model = Attention(bias=True, k=256).to("cuda", torch.bfloat16).requires_grad_(False)
    plain = copy.deepcopy(model)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    lb.quantize_(plain, lb.Int4WeightOnly(32))
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    expected = plain(x)
    for _ in range(4):
        with launches.counted() as calls:
            found = run(x).clone()
        assert relative_error(found, expected) < 1e-2
    with launches.counted() as calls:
        torch.compile(model, fullgraph=True)(x)
    assert sum(n for (op, _), n in calls.items() if op == "weight_linear") == 2
