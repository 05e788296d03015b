"""Frozen layers: a compiled graph gets the inner tensors of their weights, and everything else stays as it is."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.layers.exchange import Held, exchanged
from lowbit.layers.frozen import Frozen, hide_frozen, show_frozen, shown_class
from lowbit.layers.learned_experts import Scaled
from lowbit.tensor import LowbitTensor
from tests.schemes import SCHEMES, axes_of, over

INT4, INT8 = lb.Int4WeightOnly(16), lb.Int8WeightOnly()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 24, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x, w) for w in self.up]).sum(0)


class Model(nn.Module):
    """Every kind of layer that holds a frozen weight: two linears, an embedding, a convolution, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.second(F.relu(self.first(x)))
        x = self.conv(x.mT).mT
        return self.experts(x)


TOKENS = torch.arange(14).view(2, 7)


def model(scheme: lb.Scheme = INT8, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    made = Model().requires_grad_(False)
    lb.quantize_(made, scheme, lambda module, name: True)
    return made


def shown(layer: nn.Module) -> Tensor | None:
    """The codes that graphs of a linear read."""
    parts = layer.__dict__.get("_lowbit_parts_weight")
    return None if parts is None else parts[0]


class Graphs:
    """A backend of torch.compile that keeps the types of the inputs of each graph, and the number of those whose
    addresses are not static: CUDA graphs copy them."""

    def __init__(self) -> None:
        self.inputs: list[set[type]] = []
        self.copied: list[int] = []

    def __call__(self, graph: Any, examples: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.inputs.append({type(t) for t in examples})
        known = [n.meta.get("tensor_dict", {}) for n in graph.graph.nodes if n.op == "placeholder"]
        self.copied.append(sum("_dynamo_static_input_type" not in one for one in known))
        return aot_eager(graph, examples)


def compiled(module: nn.Module) -> tuple[Callable[..., Tensor], Graphs]:
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(module, backend=graphs, fullgraph=True), graphs


def is_close(found: Tensor, expected: Tensor) -> bool:
    """True for float32 sums in another order, as those of eager code on a CPU without gradients."""
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def check(module: nn.Module, *args: Tensor) -> None:
    """A graph with the outputs of eager code whose inputs are `args` and plain tensors at static addresses."""
    run, graphs = compiled(module)
    with torch.no_grad():
        assert is_close(run(*args), module(*args))
    (kinds,) = graphs.inputs
    assert kinds <= {Tensor, nn.Parameter}
    assert graphs.copied == [len(args)], "CUDA graphs copy nothing else"


@pytest.mark.cover("values", scheme=axes_of)
@over(SCHEMES)
def test_the_inputs_of_a_graph_are_plain(scheme: lb.Scheme) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 24))
    lb.quantize_(layer.requires_grad_(False), scheme)
    check(layer, torch.randn(5, 32))


def test_every_kind_of_layer() -> None:
    check(model(), TOKENS)


def test_a_graph_of_one_layer_serves_all_layers_alike() -> None:
    layers = [nn.Linear(32, 32, bias=False).requires_grad_(False) for _ in range(3)]
    graphs = Graphs()
    torch._dynamo.reset()
    run = torch.compile(lambda layer, x: layer(x), backend=graphs, fullgraph=True)
    x = torch.randn(4, 32)
    for layer in layers:
        lb.quantize_(layer, INT4)
        assert is_close(run(layer, x), layer(x))
    assert len(graphs.inputs) == 1


def test_modules_stay_what_they_were() -> None:
    plain, found = Model(), model()
    assert repr(found) == repr(plain)
    for (name, module), other in zip(found.named_modules(), plain.modules(), strict=True):
        assert isinstance(module, type(other)) and shown_class(module) is type(other), name
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert not list(found.buffers())
    assert isinstance(found.first.weight, LowbitTensor) and hasattr(found.first, "weight")
    again = Model()
    lb.quantize_(again, INT8, lambda module, name: True)
    again.load_state_dict(found.state_dict())
    assert torch.equal(again(TOKENS), found(TOKENS))


def copied(found: Model) -> Model:
    return copy.deepcopy(found)


def pickled(found: Model) -> Model:
    made: Model = pickle.loads(pickle.dumps(found))
    return made


def saved(found: Model) -> Model:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    made: Model = torch.load(file, weights_only=False)
    return made


@pytest.mark.parametrize("how", [copied, pickled, saved])
def test_copies_show_their_own_weights(how: Callable[[Model], Model]) -> None:
    found = model()
    before = found(TOKENS)
    other = how(found)
    assert type(other.first) is type(found.first)
    assert shown(other.first) is other.first.weight.codes
    assert shown(other.first) is not shown(found.first)
    with torch.no_grad():
        other.first.weight.copy_(torch.randn(32, 32))
    check(other, TOKENS)
    assert not torch.equal(other(TOKENS), before) and torch.equal(found(TOKENS), before)
    check(found, TOKENS)


def assigned(found: Model, other: Model) -> None:
    found.first.weight = other.first.weight


def registered(found: Model, other: Model) -> None:
    found.first.register_parameter("weight", other.first.weight)


def taken_over(found: Model, other: Model) -> None:
    found.first.weight.data = other.first.weight.data


def written(found: Model, other: Model) -> None:
    with torch.no_grad():
        found.first.weight.copy_(other.first.weight)


def loaded(found: Model, other: Model) -> None:
    found.load_state_dict(other.state_dict())


def loaded_by_assignment(found: Model, other: Model) -> None:
    found.load_state_dict(other.state_dict(), assign=True)


def moved(found: Model, other: Model) -> None:
    found.to(torch.float64)


def removed_and_set(found: Model, other: Model) -> None:
    weight = found.first.weight
    del found.first.weight
    assert not hasattr(found.first, "weight") and shown(found.first) is None
    found.first.weight = nn.Parameter(other.first.weight.detach(), requires_grad=False)
    assert found.first.weight is not weight


def plain_again(found: Model, other: Model) -> None:
    found.first.weight = nn.Parameter(torch.randn(32, 32))


CHANGES = [
    *(assigned, registered, taken_over, written, loaded, loaded_by_assignment, moved),
    *(removed_and_set, plain_again),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_compiled_model_follows_its_weights(change: Callable[[Model, Model], None]) -> None:
    found = model()
    run, graphs = compiled(found.first)
    x = torch.randn(5, 32)
    with torch.no_grad():
        before = run(x)
        change(found, model(seed=1))
        after = run(x.to(found.first.bias.dtype))
        assert not torch.equal(after, before)
        assert is_close(after, found.first(x.to(after.dtype)))
    assert graphs.inputs[-1] <= {Tensor, nn.Parameter}


def test_tied_weights_are_shown_in_both_layers() -> None:
    pair = nn.ModuleList([nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)])
    pair[1].weight = pair[0].weight
    lb.quantize_(pair.requires_grad_(False), INT4)
    other = lb.quantize_  # the same scheme for the weight that comes next
    fresh = nn.Linear(32, 32, bias=False).requires_grad_(False)
    other(fresh, INT4)
    pair[0].weight.data = fresh.weight.data
    for layer in pair:
        assert shown(layer) is fresh.weight.codes
        check(layer, torch.randn(2, 32))


def test_conversions_back_give_the_plain_class() -> None:
    found = model()
    lb.dequantize_(found)
    assert [type(m) for m in found.modules()] == [type(m) for m in Model().modules()]
    assert not any(name.startswith("_lowbit_") for name in found.first.__dict__)
    found = model()
    lb.dequantize_(found, lambda module, name: name == "first")
    assert type(found.first) is nn.Linear and isinstance(found.second, Frozen)
    check(found, TOKENS)
    hide_frozen(found.modules())
    assert not any(isinstance(m, Frozen) for m in found.modules())
    run, graphs = compiled(found)
    assert is_close(run(TOKENS), found(TOKENS)) and len(graphs.inputs[0]) > 2
    show_frozen(found.modules())
    check(found, TOKENS)


def test_gradients_reach_inputs_and_adapters() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 24).requires_grad_(False)
    lb.quantize_(layer, lb.NF4WeightOnly(16))
    run, graphs = compiled(layer)
    x, y = (torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    x.requires_grad_()
    y.requires_grad_()
    run(x).sin().sum().backward()
    layer(y).sin().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.grad) and x.grad.norm() > 0
    assert graphs.inputs[0] <= {Tensor, nn.Parameter}


def test_weights_of_qat_are_shown_once_they_are_converted() -> None:
    found = nn.Sequential(nn.Linear(32, 32))
    lb.qat.prepare_(found, INT4)
    assert not isinstance(found[0], Frozen)
    lb.qat.convert_(found)
    check(found, torch.randn(2, 32))


def test_a_loaded_folder(tmp_path: Path) -> None:
    found = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False)
    lb.quantize_(found, INT4)
    lb.export(found, tmp_path / "folder", format="lowbit")
    again = nn.Sequential(nn.Linear(32, 32))
    check(lb.load_pretrained(tmp_path / "folder", again), torch.randn(2, 32))


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_sees_the_parameters(strict: bool) -> None:
    found = nn.Sequential(nn.Linear(32, 16)).requires_grad_(False)
    lb.quantize_(found, INT8)
    x = torch.randn(2, 32)
    with torch.no_grad():
        exported = torch.export.export(found, (x,), strict=strict)
        assert is_close(exported.module()(x), found(x))
    assert not any("made" in str(node.target) for node in exported.graph.nodes)


def test_hooks_of_accelerate_leave_the_parameters_alone() -> None:
    pytest.importorskip("accelerate")
    from lowbit import accelerate

    found = model()
    expected = found(TOKENS)
    accelerate.cpu_offload(found, "cpu")
    for module in (found.first, found.second, found.conv, found.experts):
        assert not any(name.startswith("_lowbit_") for name in module.__dict__)
    assert torch.equal(found(TOKENS), expected)


def test_torchs_caches_find_a_graph_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer = nn.Linear(32, 16).requires_grad_(False)
    lb.quantize_(layer, INT4)
    x = torch.randn(2, 32)
    for found in ("autograd_cache_miss", "autograd_cache_hit"):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            assert torch.allclose(torch.compile(layer)(x), layer(x))
        assert counters["aot_autograd"][found] == 1
    lb.quantize_(other := nn.Linear(32, 16).requires_grad_(False), lb.Int4WeightOnly(8))
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(other)(x)
    assert counters["aot_autograd"]["autograd_cache_miss"] == 1, "another form"


def guards_of(net: nn.Module) -> list[str]:
    """The tree of guards of a compiled call of `net`, a line a node."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    def call(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(call, backend="eager", fullgraph=True)(net, torch.randn(2, 32))
    (entry,) = _debug_get_cache_entry_list(call.__code__)
    return str(entry.guard_manager).splitlines()


def skipped_layers(net: nn.Module) -> list[bool]:
    """For each linear of `net`, True if torch skips its guards while the layer is unchanged."""
    lines = [line for line in guards_of(net) if "linear.Linear'>, tag_safe" in line]
    assert len(lines) == 2
    return ["tag_safe=(True" in line for line in lines]


def test_guards_are_skipped_as_those_of_plain_layers() -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).requires_grad_(False)
    expected = skipped_layers(net)
    lb.quantize_(net, INT4)
    assert skipped_layers(net) == expected


@pytest.mark.parametrize("bias", [False, True])
def test_a_frozen_layer_has_one_tensor_and_few_guards_more_than_a_plain_one(bias: bool) -> None:
    net = nn.Sequential(nn.Linear(32, 32, bias)).requires_grad_(False)
    plain = [line for line in guards_of(net) if "_modules['0']" in line]
    lb.quantize_(net, INT4)
    frozen = [line for line in guards_of(net) if "_modules['0']" in line]
    tensor = sum("_parameters['weight']" in line for line in plain)
    assert tensor >= 2 and sum("TENSOR_MATCH" in line for line in frozen) == 2 + bias
    # A tuple and a string, of 3 nodes each, take the place of the weight among the parameters, and the tuple holds the
    # bias. Without one, 4 nodes that find None are gone. torch 2.11 may count a method of the tuple too.
    assert len(frozen) - len(plain) <= tensor + 2 + 2 * bias + 1
    assert not any("_parameters" in line for line in frozen)


def without_bias(layer: nn.Linear) -> None:
    layer.bias = None


def with_another_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.randn(32), requires_grad=False)


def with_a_plain_tensor(layer: nn.Linear) -> None:
    del layer.bias
    layer.bias = torch.randn(32)  # type: ignore[assignment]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("change", [without_bias, with_another_bias, with_a_plain_tensor])
def test_graphs_follow_the_bias(change: Callable[[nn.Linear], None], bias: bool) -> None:
    layer = nn.Linear(32, 32, bias).requires_grad_(False)
    lb.quantize_(layer, INT8)
    run, _ = compiled(layer)
    x = torch.randn(3, 32)
    assert is_close(run(x), layer(x))
    change(layer)
    assert is_close(run(x), layer(x))


class Residual(nn.Module):
    """A layer whose product ends in a residual, as in the decode recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return lb.inference.linear(F.relu(x), self.out.weight, self.out.bias, x)


@pytest.mark.parametrize("scheme", [INT4, lb.Int8DynamicActivationInt8Weight()])
def test_a_residual_within_the_product(scheme: lb.Scheme) -> None:
    torch.manual_seed(0)
    layer = Residual().requires_grad_(False)
    lb.quantize_(layer, scheme)
    check(layer, torch.randn(4, 32))


def functionally(found: Model, other: Model) -> None:
    for name, weight in other.named_parameters():
        layer, _, attribute = name.rpartition(".")
        found.get_submodule(layer)._parameters[attribute] = weight


def swapped(found: Model, other: Model) -> None:
    torch.utils.swap_tensors(found.first.weight, other.first.weight)


def another_scale(found: Model, other: Model) -> None:
    found.first.weight.scale = found.first.weight.scale * 2


@pytest.mark.parametrize("change", [functionally, swapped, another_scale])
def test_freeze_follows_a_change_that_went_past_the_layers(
    change: Callable[[Model, Model], None],
) -> None:
    found = model()
    run, _ = compiled(found)
    with torch.no_grad():
        before = run(TOKENS)
        change(found, model(seed=1))
        lb.inference.freeze_(found)
        assert is_close(run(TOKENS), found(TOKENS)) and not torch.equal(run(TOKENS), before)


def test_graphs_follow_weights_that_are_exchanged_for_a_while() -> None:
    layer, other = (nn.Linear(32, 16).requires_grad_(False) for _ in range(2))
    for one in (layer, other):
        lb.quantize_(one, INT8)
    run, x = torch.compile(layer, backend="aot_eager", dynamic=False), torch.randn(3, 32)
    before, changed = run(x), Held(layer, type(layer), {"weight": other.weight})
    with exchanged([changed]):
        assert is_close(run(x), layer(x)) and not torch.equal(run(x), before)
    assert torch.equal(run(x), before) and isinstance(layer, Frozen)


def test_freeze_takes_a_model_that_was_loaded_by_assignment(tmp_path: Path) -> None:
    found = model()
    plain = Model().requires_grad_(False)
    lb.save(found, tmp_path / "model.safetensors")
    plain.load_state_dict(lb.load(tmp_path / "model.safetensors"), assign=True)
    assert not isinstance(plain.first, Frozen)
    lb.inference.freeze_(plain)
    check(plain, TOKENS)
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        lb.inference.freeze_(found.first.weight)  # type: ignore[arg-type]


class Named(nn.Linear):
    """A layer with attributes of the names that lowbit might have taken."""

    frozen = False

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.plain, self._weight_scale, self._weight_gain = "mine", 0.5, 2.0

    def show_parts(self) -> str:
        return "mine"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self._weight_scale * self._weight_gain
        return y * 0 if self.frozen else y


def test_attributes_of_a_layer_stay_its_own() -> None:
    layer = Named().requires_grad_(False)
    x = torch.randn(3, 32)
    expected = layer(x)
    lb.quantize_(layer, INT8)
    layer.frozen = False
    for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert one.plain == one.show_parts() == "mine"
        assert torch.allclose(one(x), expected, atol=0.1)
        check(one, x)
    lb.dequantize_(layer)
    assert type(layer) is Named and layer._weight_scale == 0.5


class Meta(type):
    pass


class OfMeta(nn.Linear, metaclass=Meta):
    pass


class Keyed(nn.Linear):
    def __init_subclass__(cls, *, key: str) -> None: ...


@pytest.mark.parametrize("kind", [OfMeta, Keyed])
def test_classes_of_which_python_makes_a_subclass_or_none(kind: type[nn.Linear]) -> None:
    layer = kind(32, 16).requires_grad_(False)
    lb.quantize_(layer, INT8)
    assert isinstance(layer, Frozen) == (kind is OfMeta)
    x = torch.randn(3, 32)
    run, _ = compiled(layer)
    assert is_close(run(x), layer(x))


def test_a_class_on_top_stays() -> None:
    layer = nn.Linear(32, 16).requires_grad_(False)
    lb.quantize_(layer, INT8)
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    x = torch.randn(3, 32)
    expected = layer(x)
    check(layer, x)
    lb.dequantize_(layer)
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_quantized_experts_beside_learned_scales() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 24, 32) / 6)
            self.down = nn.Parameter(torch.randn(2, 32, 24) / 6)

        def forward(self, x: Tensor) -> Tensor:
            return sum(F.linear(F.linear(x, u), d) for u, d in zip(self.up, self.down, strict=True))

    model, x = nn.ModuleDict({"experts": Pair()}), torch.randn(3, 32)
    lb.quantize_(model, {"*.up": INT8}, lambda module, name: name.endswith("up"))
    lb.qat.prepare_(
        model, {"*.down": INT8}, lambda m, name: name.endswith("down"), scales="learned"
    )
    again = copy.deepcopy(model)
    for each in (model, again):
        assert isinstance(each.experts, Frozen) and isinstance(each.experts, Scaled)
        assert torch.equal(each.experts(x), model.experts(x))
    lb.qat.convert_(model)
    assert [name for name, _ in model.named_parameters()] == ["experts.up", "experts.down"]
    assert shown_class(model.experts) is Pair and isinstance(model.experts, Frozen)
    check(model.experts, x)
