"""lowbit.trace: the report on each product of each layer, as a table and as JSON; the model stays unchanged."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit as lb
from lowbit import (
    MixedPrecisionTensor,
    TracedProduct,
    trace,
)
from lowbit.inference import linear as linear_with_residual
from lowbit.tracing import tracer
from lowbit.tracing.report import weight_format
from lowbit.tracing.trace import NOT_REACHED
from lowbit_kernels.runtime import host_compiler, launches
from tests.inference.weight_ops import counted
from tests.schemes import SCHEMES as INFERENCE_SCHEMES
from tests.traced import low_bit, ran_in, reasons
from tests.train.problems import SCHEMES, linear, outcome, prepared, snr, values
from tests.train.test_training import Block

INT8 = SCHEMES["int8"]
ALL = ("output", "grad_input", "grad_weight")
PLAIN = {name: {"float32": 1} for name in ALL}


# ---- every kind of weight -----------------------------------------------------------------------------------------


def formats(output: str, grad_input: str, grad_weight: str = "") -> dict[str, dict[str, int]]:
    found = zip(ALL, (output, grad_input, grad_weight), strict=True)
    return {name: {what: 1} for name, what in found if what}


TRAINED: dict[str, tuple[Any, str, dict[str, dict[str, int]], set[str]]] = {
    "int8": (INT8, "float32", formats("int8", "int8", "int8"), set()),
    "float8": (SCHEMES["float8"], "float32", formats("e4m3", "e4m3", "e4m3"), set()),
    "float8-e5m2": (SCHEMES["float8-e5m2"], "float32", formats("e4m3", "e5m2", "e5m2"), set()),
    "int8-switched": (
        replace(INT8, output=False, grad_weight=False),
        "float32",
        formats("float32", "int8", "float32"),
        {"its scheme keeps this product in high precision"},
    ),
    "int8-on-cpu": (
        lb.Int8MixedPrecision(),
        "float32",
        PLAIN,
        {"on cpu low-bit products are not faster"},
    ),
    "weight": (
        lb.Int8Weight(),
        "int8 weight",
        PLAIN,
        {"int8 weight, dequantized: none was asked for"},
    ),
    "weight-products": (
        lb.Int8Weight(True, True, True, always=True),
        "int8 weight",
        formats("int8", "int8", "int8"),
        set(),
    ),
    "int4-weight-products": (
        lb.Int4Weight(output=True, grad_input=True, grad_weight=True, always=True),
        "int4 weight",
        formats("int8", "int8", "int8"),
        set(),
    ),
    "bitnet": (
        lb.BitNet(),
        "BitNet",
        formats("int8", "float32", "int8"),
        {"its scheme keeps this product in high precision"},
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_products_of_weights_in_training(name: str) -> None:
    scheme, weight, expected, why = TRAINED[name]
    if isinstance(scheme, lb.BitNet):
        scheme = replace(scheme, grad_input=False, grad_weight=True)
    model = nn.Sequential(linear(48, 96))
    # prepare_ leaves layers alone that gain nothing on a CPU, so this one is made by hand
    if name == "int8-on-cpu":
        model[0].weight = nn.Parameter(MixedPrecisionTensor(model[0].weight, scheme))
    else:
        lb.train.prepare_(model, scheme)
    found = trace(model, values(16, 96).requires_grad_())
    assert ran_in(found, "0") == expected and reasons(found, "0") == why
    assert {(p.layer, p.m, p.n, p.k, p.weight) for p in found.products} == {
        ("0", 16, 48, 96, weight)
    }
    for p in found.products:
        assert p.in_low_bits == (p.why == "") and (p.implementation == "torch") != p.in_low_bits


@pytest.mark.parametrize("name", INFERENCE_SCHEMES)
def test_products_of_quantized_weights_and_of_qat(name: str) -> None:
    scheme = INFERENCE_SCHEMES[name]
    x = values(5, 64).requires_grad_()
    model = nn.Sequential(nn.Linear(64, 96))
    lb.qat.prepare_(model, scheme)
    qat = trace(model, x)
    dynamic = name == "int8xint8"
    assert ran_in(qat, "0") == (formats("int8", "float32", "float32") if dynamic else PLAIN)
    assert reasons(qat) == set() and reasons(qat, "0") == {tracer.ROUNDED}
    lb.qat.convert_(model)
    found = trace(model, x)
    assert ran_in(found, "0") == formats("int8" if dynamic else "float32", "float32")
    output, grad_input = found.products
    why = tracer.WEIGHT_ONLY if scheme.activation is None else tracer.ROUNDED
    assert output.implementation.startswith("int8_dynamic_linear" if dynamic else "cpu_linear")
    assert output.why == ("" if dynamic else why)
    assert (grad_input.implementation, grad_input.why) == ("torch", tracer.DEQUANTIZED)
    assert {f"QAT {output.weight}"} == {p.weight for p in qat.products}
    forward = trace(model.eval(), x)
    assert [p.product for p in forward.products] == ["output"]


def test_ternary_weights() -> None:
    model = prepared(nn.Sequential(linear(48, 96)), lb.BitNet())
    lb.train.convert_(model)
    (output,) = trace(model, values(4, 96), backward=False).products
    assert output.in_low_bits and output.weight == "int2-tensor"
    assert output.implementation.startswith("ternary_linear")


def test_names_of_weight_formats() -> None:
    names = {
        key: weight_format(lb.AffineTensor.from_float(torch.randn(8, 32), s))
        for key, s in INFERENCE_SCHEMES.items()
    }
    assert names["int4-g32-asymmetric"] == "int4-g32-asymmetric"
    assert names["int8"] == "int8-row" and names["float8"] == "float8_e4m3fn-row"
    assert names["int5-blocks"] == "uint5-block4x8"
    assert names["int8xint4"] == "int4-g16-int8-token"
    for name in ("mxfp4", "mxfp8"):
        assert names.pop(f"{name}-ocp") == names[name], "two rules for scales that are stored alike"
    assert len(set(names.values())) == len(names)


def test_an_implementation_that_a_user_registers() -> None:
    model = nn.Sequential(nn.Linear(64, 96))
    lb.quantize_(model, lb.Int8WeightOnly())

    def mine(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        tracer.multiplies_in("int8")
        launches.ran("mine", "fast")
        return x.new_zeros((*x.shape[:-1], weight.shape[0]))

    lb.register_linear(lambda x, w, b: True, mine)
    try:
        found = trace(model, values(4, 64), backward=False)
    finally:
        lb.unregister_linear(mine)
    (output,) = found.products
    assert (output.ran_in, output.implementation, output.why) == ("int8", "mine fast", "")
    assert found.launches == {("mine", "fast"): 1}


class Calls(nn.Module):
    """Runs a function of the input and a quantized weight."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(64, 64, bias=False), call
        lb.quantize_(self, lb.Int4WeightOnly(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.layer.weight)


CALLS: dict[str, Any] = {
    "linear": F.linear,
    "matmul": lambda x, w: x @ w.t(),
    "inference.linear": linear_with_residual,
    "inference.linear-residual": lambda x, w: linear_with_residual(x, w, residual=x),
    "inference.linear-checkpoint": lambda x, w: checkpoint(
        linear_with_residual, x, w, use_reentrant=False
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_gradient_of_the_input_of_a_quantized_weight(name: str) -> None:
    found = trace(Calls(CALLS[name]), values(3, 64).requires_grad_())
    output, grad_input = found.products
    assert ran_in(found, "layer") == formats("float32", "float32")
    assert (grad_input.implementation, grad_input.why) == ("torch", tracer.DEQUANTIZED)
    assert (output.m, output.n, output.k) == (grad_input.m, grad_input.n, grad_input.k)
    frozen = trace(Calls(CALLS[name]), values(3, 64), backward=False)
    assert ran_in(frozen, "layer") == formats("float32", "")


def test_a_registered_implementation_that_runs_another_product() -> None:
    """What it launches and multiplies afterwards belongs to the outer product."""
    inner = nn.Linear(64, 96)
    lb.quantize_(inner, lb.Int8DynamicActivationInt8Weight())
    model = nn.Sequential(nn.Linear(64, 96))
    lb.quantize_(model, lb.Int8WeightOnly())
    weight = model[0].weight

    def nested(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
        y = F.linear(x, inner.weight)
        launches.ran("nested", "fast")
        return y + F.linear(x, torch.zeros(96, 64))

    lb.register_linear(lambda x, w, b: w is weight, nested)
    try:
        outer, within = trace(model, values(4, 64), backward=False).products
    finally:
        lb.unregister_linear(nested)
    assert (outer.weight, outer.implementation) == ("int8-row", "nested fast")
    assert within.weight == "int8-row-int8-token"
    assert within.implementation.startswith("int8_dynamic_linear")


# ---- layers -------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head, self.unused = Block(), linear(10, 64), linear(10, 64)
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.norm(self.dropout(self.block(x))))}


@pytest.mark.parametrize("compiled", ["", "in place", "wrapped"])
def test_tracing_a_training_step_leaves_everything_as_it_was(compiled: str) -> None:
    torch._dynamo.reset()
    model = Mixed()
    float8 = lb.Float8MixedPrecision(always=True, backward="e5m2", grad_weight=False)
    lb.train.prepare_(model, {"*.gate": None, "*.down": float8, "head": None, "*": INT8})
    plain = MixedPrecisionTensor(model.block.gate.weight, lb.Int8MixedPrecision())
    model.block.gate.weight = nn.Parameter(plain)
    if compiled == "in place":
        model.compile(backend="aot_eager")
    run = torch.compile(model, backend="aot_eager") if compiled == "wrapped" else model
    model.head.weight.grad = torch.ones_like(model.head.weight)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    found = trace(run, values(16, 64))
    layers = ["block.gate", "block.up", "block.down", "head", "unused"]
    assert list(dict.fromkeys(p.layer for p in found.products)) == layers
    assert low_bit(found, "block.up") == list(ALL)
    assert {(p.m, p.n, p.k) for p in found.products if p.layer == "block.up"} == {(16, 128, 64)}
    assert ran_in(found, "block.down") == formats("e4m3", "e5m2", "float32")
    assert not low_bit(found, "block.gate") and "on cpu" in reasons(found, "block.gate").pop()
    assert reasons(found, "head") == {"left alone: no scheme for this name"}
    assert ran_in(found, "head") == PLAIN
    assert reasons(found, "unused") == {NOT_REACHED} and not ran_in(found, "unused")
    assert str(found).startswith("2 of 5 layers ran products in low bits\nlayer")
    # nothing is left behind
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.block.up.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    for name, b in model.named_buffers():
        assert torch.equal(b, buffers[name]), name
    assert not model.block.up._forward_hooks and not model.block.up._forward_pre_hooks
    assert tracer.active is None
    torch._dynamo.reset()


def test_calls_are_counted() -> None:
    """Two micro-batches of one size and a third of another, accumulated in one backward pass."""

    class Accumulates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = linear(128, 64)

        def forward(self, *batches: Tensor) -> Tensor:
            return sum(self.up(x).square().mean() for x in batches)

    model = prepared(Accumulates(), INT8)
    found = trace(model, *(values(m, 64).requires_grad_() for m in (16, 16, 8)))
    calls = {(p.product, p.m): p.calls for p in found.products}
    assert calls == {(name, m): n for name in ALL for m, n in ((16, 2), (8, 1))}


def test_checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.block, self.head = prepared(Block(), INT8), linear(10, 64)
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))

    for reentrant in (False, True):
        found = trace(Checkpointed(reentrant), values(16, 64).requires_grad_())
        twice = {"output": {"int8": 2}, "grad_input": {"int8": 1}, "grad_weight": {"int8": 1}}
        assert ran_in(found, "block.up") == twice and ran_in(found, "head") == PLAIN
    model = nn.Sequential(Block())
    run = lambda x: checkpoint(model[0], x, use_reentrant=False)  # noqa: E731
    model.forward = run  # type: ignore[method-assign]
    plain = trace(model, values(16, 64).requires_grad_())
    assert ran_in(plain, "0.up") == {**PLAIN, "output": {"float32": 2}}


def test_backward_runs_in_training_mode_where_something_learns() -> None:
    model, x = prepared(Block(), INT8), values(16, 64)
    seen = []
    model.up.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    assert "grad_weight" in ran_in(trace(model, x), "up")
    assert set(ran_in(trace(model, x, backward=False), "up")) == {"output"}
    assert set(ran_in(trace(model.eval(), x), "up")) == {"output"}
    assert "grad_weight" in ran_in(trace(model, x, backward=True), "up")
    model.train().requires_grad_(False)
    assert set(ran_in(trace(model, x), "up")) == {"output"}
    assert set(ran_in(trace(model, x.requires_grad_()), "up")) == {"output", "grad_input"}
    with torch.no_grad():
        assert "grad_input" in ran_in(trace(model, x), "up")
    assert seen == [True, False, False, True, False, True, True]
    with pytest.raises(ValueError, match="no output of the model requires a gradient"):
        trace(model, values(16, 64), backward=True)


def test_a_forward_without_gradients_has_no_backward() -> None:
    class Generates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = linear(8, 64)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x)

    assert set(ran_in(trace(Generates(), values(4, 64)), "up")) == {"output"}
    with torch.inference_mode():
        assert set(ran_in(trace(nn.Sequential(linear(8, 64)), values(4, 64)), "0")) == {"output"}


def test_weights_of_other_libraries_have_the_name_of_the_module() -> None:
    class Foreign(Tensor):
        """A tensor without memory."""

        @staticmethod
        def __new__(cls, values: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, values.shape)

        def __init__(self, values: Tensor) -> None:
            self.values = values

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is F.linear:
                return F.linear(args[0], args[1].values)
            return super().__torch_function__(func, types, args, kwargs or {})

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return cls(args[0].values)  # detach

    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    model[0].weight = nn.Parameter(Foreign(values(8, 64)))
    assert set(ran_in(trace(model, values(4, 64), backward=False), "0")) == {"output"}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head, self.w = nn.Linear(64, 10), nn.Parameter(torch.randn(7, 10))

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        for _ in range(1 + twice):
            x = linear_with_residual(F.relu(self.up(x)), self.down.weight, residual=x)
        return F.linear(self.head(x[0]), self.w) @ torch.eye(7)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_inference_step(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    counted(monkeypatch)
    torch._dynamo.reset()
    model = Residual()
    schemes = {"up": lb.Int4WeightOnly(32), "down": lb.Int8DynamicActivationInt8Weight()}
    lb.quantize_(model.bfloat16(), {**schemes, "head": None})
    if compiled:
        model.compile(backend="aot_eager")
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch, "eye", lambda n: torch.ones(n, n, dtype=torch.bfloat16))
    up, down, *plain = trace(model, x, twice=True, backward=False).products
    ran = "weight_linear cpu" if host_compiler.compiler() else "weight_linear"
    how = ("int4-g32", "bfloat16", ran, 2, tracer.WEIGHT_ONLY)
    assert up == TracedProduct("up", "output", 6, 96, 64, *how)
    how = ("bfloat16", "bfloat16", "torch", 1, tracer.PLAIN_WEIGHT)
    assert plain == [
        TracedProduct("head", "output", 3, 10, 64, *how),
        TracedProduct("w", "output", 3, 7, 10, *how),
    ]
    assert (down.layer, down.m, down.n, down.k, down.calls) == ("down", 6, 64, 96, 2)
    assert (down.weight, down.ran_in, down.why) == ("int8-row-int8-token", "int8", "")
    torch._dynamo.reset()


def test_products_run_in_the_autocast_dtype() -> None:
    model, x = nn.Sequential(linear(48, 96), linear(8, 48)), values(16, 96)
    lb.quantize_(model[0], lb.Int8WeightOnly())
    with torch.autocast("cpu", torch.bfloat16):
        found = trace(model, x, backward=False)
    assert [p.ran_in for p in found.products] == ["bfloat16", "bfloat16"]
    assert [p.weight for p in found.products] == ["int8-row", "float32"]


def test_tied_weights_and_lookups() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 32), nn.Linear(32, 20, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    tokens = torch.tensor([[3, 1, 4]])
    assert [p.layer for p in trace(Tied(), tokens, backward=False).products] == ["head"]
    for convert in (lb.quantize_, lb.qat.prepare_):
        model = Tied()
        convert(model, lb.Int8WeightOnly())
        lookup, output = trace(model, tokens, backward=False).products
        assert (lookup.layer, lookup.product, lookup.m, lookup.n) == (
            "embedding",
            "embedding",
            3,
            20,
        )
        assert "multiplies nothing" in lookup.why
        assert (output.layer, output.product, output.n) == ("head", "output", 20)
    unused = nn.ModuleDict({"table": nn.Embedding(20, 32)})
    unused.forward = lambda: None  # type: ignore[method-assign]
    lb.quantize_(unused, lb.Int8WeightOnly(), lambda m, name: name == "table")
    (lookup,) = trace(unused).products
    assert (lookup.product, lookup.calls, lookup.why) == ("embedding", 0, NOT_REACHED)


class Experts(nn.Module):
    """3-D weights: by index, batched, and a Conv1D's transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 24, 32))
        self.down = nn.Parameter(torch.randn(3, 24, 32))
        self.turned = nn.Parameter(torch.randn(32, 24))

    def forward(self, x: Tensor) -> Tensor:
        """[3, M, 32]."""
        h = torch.stack([F.linear(x[e], self.up[e]) for e in range(3)])
        y = torch.bmm(h, self.down)
        return torch.addmm(x.new_zeros(24), y[0], self.turned) @ torch.ones(24, 2)


def test_experts() -> None:
    x = values(3, 5, 32).requires_grad_()
    sizes = {"up": (24, 32), "down": (32, 24), "turned": (24, 32)}
    plain = trace(Experts(), x)
    assert {p.layer: (p.n, p.k) for p in plain.products} == sizes
    assert all(reasons(plain, name) == {tracer.PLAIN_WEIGHT} for name in sizes)
    assert ran_in(plain, "up") == {name: {"float32": 3} for name in ALL}
    low = Experts()
    lb.train.prepare_(low, INT8, lambda module, name: isinstance(module, Experts))
    found = trace(low, x)
    assert {p.layer: (p.n, p.k) for p in found.products} == sizes
    assert ran_in(found, "up") == ran_in(found, "down") == {name: {"int8": 3} for name in ALL}
    lb.quantize_(quantized := Experts(), lb.Int8WeightOnly(), lambda m, name: True)
    found = trace(quantized, x)
    assert {p.layer: (p.n, p.k) for p in found.products} == sizes
    assert ran_in(found, "up") == {"output": {"float32": 3}, "grad_input": {"float32": 3}}
    assert reasons(found, "down") == {tracer.DEQUANTIZED}, "a product of all experts at once"
    grouped = nn.ModuleDict({"experts": Experts()})
    offsets = torch.tensor([2, 4, 5], dtype=torch.int32)
    grouped.forward = lambda x: lb.inference.grouped_linear(x, grouped["experts"].up, offsets)
    lb.quantize_(grouped, lb.Int8WeightOnly(), lambda m, name: name == "experts")
    assert ran_in(trace(grouped, values(5, 32)), "experts.up") == {"output": {"float32": 3}}


def test_attention_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    low, x = prepared(layer, INT8), values(2, 16, 64)
    found, expected = outcome(low, x), outcome(layer, x)
    for name, value in expected.items():
        # the gradient of the keys' bias is zero, up to rounding errors
        assert name == "self_attn.in_proj_bias" or snr(found[name], value) > 20, name
    traced = trace(low, x.requires_grad_())
    assert low_bit(traced, "linear1") == low_bit(traced, "linear2") == list(ALL)
    for name, n in (("self_attn.in_proj_weight", 192), ("self_attn.out_proj", 64)):
        assert ran_in(traced, name) == PLAIN and "own product" in reasons(traced, name).pop()
        assert {(p.m, p.n, p.k) for p in traced.products if p.layer == name} == {(32, n, 64)}
    lb.qat.prepare_(layer, lb.Int4WeightOnly(32))
    traced = trace(layer, x)
    assert ran_in(traced, "self_attn.out_proj") == PLAIN
    assert {p.weight for p in traced.products if p.layer == "self_attn.out_proj"} == {
        "QAT int4-g32"
    }


def test_attention_of_one_sequence_to_another() -> None:
    layer = nn.MultiheadAttention(64, 4, batch_first=True)
    x, y = values(2, 16, 64), values(2, 5, 64)
    name = "in_proj_weight"
    sizes = {
        (p.m, p.n, p.k): p.calls
        for p in trace(layer, x, y, y, backward=False).products
        if p.layer == name
    }
    assert sizes == {(32, 64, 64): 1, (10, 128, 64): 1}
    found = trace(layer, x, y, y.clone(), backward=False)
    assert {(p.m, p.n): p.calls for p in found.products if p.layer == name} == {
        (32, 64): 1,
        (10, 64): 2,
    }
    other = nn.MultiheadAttention(64, 4, kdim=32, vdim=16, batch_first=True)
    found = trace(other, x, values(2, 5, 32), values(2, 5, 16), backward=False)
    assert {p.layer: p.k for p in found.products} == {
        **{"q_proj_weight": 64, "k_proj_weight": 32, "v_proj_weight": 16, "out_proj": 64}
    }


def test_a_weight_of_attention_that_was_made_by_hand() -> None:
    layer, x = nn.MultiheadAttention(64, 4, batch_first=True), values(2, 16, 64)
    layer.out_proj.weight = nn.Parameter(MixedPrecisionTensor(layer.out_proj.weight, INT8))
    found = trace(layer, x, x, x)
    assert "own product" in reasons(found, "out_proj").pop() and ran_in(found, "out_proj") == PLAIN


def test_a_computed_weight_belongs_to_the_module_that_runs() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(linear(8, 32)))
    assert ran_in(trace(model, values(4, 32).requires_grad_()), "0") == PLAIN


def test_several_models_share_nothing() -> None:
    model = prepared(Block(), INT8)
    other = copy.deepcopy(model)
    model.forward = lambda x: other(x)  # type: ignore[method-assign]
    found = trace(model, values(16, 64), backward=False)
    assert {p.layer for p in found.products if p.calls} == {""}, (
        "products of a module outside of the model belong to the module that calls it"
    )
    assert {p.layer for p in found.products if not p.calls} == {"gate", "up", "down"}
