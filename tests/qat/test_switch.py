"""Fake quantization off: the prepared model computes what the plain one computes, to the bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import lowbit as lb
from lowbit import qat
from tests.train.problems import values
from tests.train.test_experts import PRODUCTS
from tests.train.test_experts import Experts as Matmul
from tests.train.test_grouped import Experts, offsets_of

WEIGHT = lb.Int4WeightOnly(group_size=16)
BOTH = lb.Int8DynamicActivationInt4Weight(group_size=16)
TOKENS = torch.tensor([[1, 2, 3, 3], [4, 5, 19, 0]])


class Tied(nn.Module):
    """An embedding, a bias, dropout, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32, padding_idx=0)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.drop(self.down(F.silu(self.up(x)))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, offsets_of((5, 0, 30, 13)).to(x.device))


def anything(module: nn.Module, name: str) -> bool:
    return not isinstance(module, nn.Dropout)


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied": (Tied, TOKENS),
    "attention": (Attention, values(2, 5, 32)),
    "grouped": (Grouped, values(48, 72)),
    **{
        name: (lambda p=product, s=shape: Matmul(p, s), values(3, 16, 64))
        for name, (product, shape, _) in PRODUCTS.items()
    },
}
every_model = pytest.mark.parametrize("name", MODELS)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def made(
    name: str, scheme: lb.Scheme, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, Tensor]:
    """The plain model, a prepared copy, and an input."""
    torch.manual_seed(0)
    make, x = MODELS[name]
    plain = make().to(dtype)
    prepared = copy.deepcopy(plain)
    assert qat.prepare_(prepared, scheme, anything).converted
    return plain, prepared, x.to(dtype) if x.dtype.is_floating_point else x


def outcome(model: Callable[[Tensor], Tensor], x: Tensor, parameters: Any) -> dict[str, Tensor]:
    for p in parameters.values():
        p.grad = None
    if x.dtype.is_floating_point:
        x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    (y.float() ** 2).sum().backward()
    grads = {name: p.grad for name, p in parameters.items()}
    return {"output": y.detach(), "input": x.grad, **grads}


def found_by(model: nn.Module, x: Tensor, run: Any = None) -> dict[str, Tensor]:
    return outcome(model if run is None else run, x, dict(model.named_parameters()))


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        elif not torch.equal(found[name], value):
            return False
    return True


@every_dtype
@every_model
def test_off_is_the_plain_model(name: str, dtype: torch.dtype) -> None:
    plain, prepared, x = made(name, WEIGHT, dtype)
    expected, on = found_by(plain, x), found_by(prepared, x)
    assert not same(on, expected)
    qat.disable_(prepared)
    assert same(found_by(prepared, x), expected)
    qat.enable_(prepared)
    assert same(found_by(prepared, x), on)


@every_dtype
@pytest.mark.parametrize("name", ["tied", "grouped", "bmm"])
def test_off_with_rounded_inputs(name: str, dtype: torch.dtype) -> None:
    plain, prepared, x = made(name, BOTH, dtype)
    qat.disable_(prepared)
    assert same(found_by(prepared, x), found_by(plain, x))


@pytest.mark.parametrize(
    ("name", "scheme", "dtype", "backend"),
    [
        ("tied", WEIGHT, torch.float32, "aot_eager"),
        pytest.param("tied", BOTH, torch.bfloat16, "aot_eager", marks=pytest.mark.exhaustive),
        ("attention", WEIGHT, torch.float32, "aot_eager"),
        # torch's own product compiles in bfloat16 only
        pytest.param("grouped", WEIGHT, torch.bfloat16, "aot_eager", marks=pytest.mark.exhaustive),
        pytest.param("grouped", WEIGHT, torch.bfloat16, "inductor", marks=pytest.mark.exhaustive),
        ("grouped", BOTH, torch.bfloat16, "aot_eager"),
    ],
    ids=["tied", "tied-inputs", "attention", "grouped", "grouped-inductor", "grouped-inputs"],
)
def test_compiled(name: str, scheme: lb.Scheme, dtype: torch.dtype, backend: str) -> None:
    """One graph for each state, which later calls find again."""
    plain, prepared, x = made(name, scheme, dtype)
    if name == "tied":
        plain.drop.p = prepared.drop.p = 0.0
    torch._dynamo.reset()
    expected = found_by(plain, x, torch.compile(plain, fullgraph=True, backend=backend))
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    run = torch.compile(prepared, fullgraph=True, backend=counted)
    on = found_by(prepared, x, run)
    assert not same(on, expected)
    for _ in range(2):
        with qat.high_precision(prepared):
            off = found_by(prepared, x, run)
        assert same(off, expected)
        assert same(found_by(prepared, x, run), on)
        qat.disable_(prepared)
        assert same(found_by(prepared, x, run), expected)
        qat.enable_(prepared)
    assert counted.frame_count == 2


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["tied", "attention", "grouped"])
def test_off_is_the_plain_model_on_a_gpu(name: str, compiled: bool, dtype: torch.dtype) -> None:
    if (name, compiled, dtype) == ("grouped", True, torch.float32):
        dtype = torch.bfloat16  # torch's own product compiles in bfloat16 only
    plain, prepared, x = made(name, WEIGHT, dtype)
    if name == "tied":
        plain.drop.p = prepared.drop.p = 0.0
        plain.embedding.padding_idx = prepared.embedding.padding_idx = None
    plain, prepared, x = plain.cuda(), prepared.cuda(), x.cuda()
    qat.disable_(prepared)
    found = []
    for model in (plain, prepared):
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True) if compiled else model
        found.append(found_by(model, x, run))
    assert same(found[1], found[0])


def test_weights_and_activations_apart() -> None:
    plain, prepared, x = made("tied", BOTH)
    weight_only = copy.deepcopy(plain)
    qat.prepare_(weight_only, lb.Scheme(BOTH.weight), anything)
    qat.enable_(prepared, activations=False)
    assert same(found_by(prepared, x), found_by(weight_only, x))
    qat.enable_(prepared, weights=False)
    spec, linear, h = BOTH.activation, prepared.up, values(5, 32)
    assert spec is not None
    assert torch.equal(linear(h), F.linear(spec.fake_quantize(h), plain.up.weight, plain.up.bias))
    assert torch.equal(prepared.embedding(x), plain.embedding(x))


def test_attention_with_a_weight_whose_inputs_it_cannot_round() -> None:
    _, prepared, x = made("attention", lb.Int4WeightOnly(16))
    donor = nn.Linear(32, 32)
    qat.prepare_(donor, BOTH, lambda module, name: True)
    prepared.attention.out_proj.weight = donor.weight
    with pytest.raises(NotImplementedError, match="whose inputs it cannot quantize in training"):
        prepared(x)
    qat.enable_(prepared, activations=False)
    assert prepared(x).isfinite().all()


def test_under_autocast() -> None:
    plain, prepared, x = made("tied", BOTH)
    plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    prepared = copy.deepcopy(plain)
    qat.prepare_(prepared, BOTH, anything)
    qat.disable_(prepared)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(found_by(prepared, x), found_by(plain, x))


def test_cast_after_prepare() -> None:
    """The high-precision weight stays float32, and the products are those of the plain model in bfloat16."""
    plain, prepared, x = made("tied", WEIGHT)
    qat.disable_(prepared)
    assert same(found_by(prepared.bfloat16(), x), found_by(plain.bfloat16(), x))


def test_frozen_weights_stay_frozen() -> None:
    plain, prepared, x = made("tied", WEIGHT)
    for model in (plain, prepared):
        model.up.requires_grad_(False)
    qat.disable_(prepared)
    expected = found_by(plain, x)
    assert expected["up.weight"] is None and same(found_by(prepared, x), expected)


def test_copies_have_the_state_and_state_dicts_do_not() -> None:
    plain, prepared, x = made("tied", BOTH)
    qat.enable_(prepared, activations=False)
    expected = found_by(prepared, x)
    buffer = io.BytesIO()
    torch.save(prepared, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(prepared), loaded):
        assert twin.up.weight.off == "activations" and same(found_by(twin, x), expected)
    state = prepared.state_dict()
    fresh = copy.deepcopy(plain)
    qat.prepare_(fresh, BOTH, anything)
    fresh.load_state_dict(state)
    assert fresh.up.weight.off is None, "a state dict does not switch"
    qat.disable_(fresh)
    fresh.load_state_dict(state)
    assert fresh.up.weight.off == "all"
    with torch.no_grad():
        fresh.up.weight.copy_(prepared.up.weight)  # tensors in different states have the same parts
    assert fresh.up.weight.off == "all"


def test_convert_quantizes_whatever_the_state() -> None:
    _, prepared, x = made("tied", WEIGHT)
    prepared.eval()
    expected = prepared(x)
    qat.disable_(prepared)
    qat.convert_(prepared)
    assert torch.equal(prepared(x), expected)


def test_the_context_restores_each_weight_also_after_an_error() -> None:
    _, prepared, _ = made("tied", BOTH)
    prepared.up.weight.switch(True, False)
    prepared.down.weight.switch(False, True)
    with pytest.raises(KeyError), qat.high_precision(prepared):
        assert prepared.up.weight.off == prepared.head.weight.off == "all"
        raise KeyError
    assert (prepared.up.weight.off, prepared.down.weight.off) == ("activations", "weights")
    assert prepared.head.weight.off is None
    with qat.high_precision(prepared), qat.high_precision(prepared):
        pass
    assert prepared.up.weight.off == "activations" and not prepared._forward_hooks


class Checkpointed(Tied):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        block = nn.Sequential(self.up, nn.SiLU(), self.down)
        return self.head(x + checkpoint(block, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing_recomputes_in_the_state_of_forward(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = Checkpointed()
    plain.reentrant = reentrant
    prepared = copy.deepcopy(plain)
    qat.prepare_(prepared, BOTH, anything)
    expected, on = found_by(plain, TOKENS), found_by(prepared, TOKENS)

    def off(x: Tensor) -> Tensor:
        with qat.high_precision(prepared):
            return prepared(x)

    assert same(found_by(prepared, TOKENS, off), expected), "the backward pass is outside"
    assert prepared.up.weight.off is None and same(found_by(prepared, TOKENS), on)
    qat.disable_(prepared)
    assert same(found_by(prepared, TOKENS), expected)


def test_a_switch_between_forward_and_backward_is_no_silent_error() -> None:
    prepared = Checkpointed()
    qat.prepare_(prepared, BOTH, anything)
    qat.disable_(prepared)
    y = prepared(TOKENS)
    qat.enable_(prepared)
    with pytest.raises(CheckpointError):
        y.sum().backward()


def test_a_trace_names_the_state() -> None:
    _, prepared, x = made("tied", WEIGHT)
    assert {p.why for p in lb.trace(prepared, x).products if p.layer == "up"} == {
        "rounded values, multiplied in high precision"
    }
    qat.disable_(prepared)
    assert {p.why for p in lb.trace(prepared, x).products if p.layer == "up"} == {
        "fake quantization is switched off"
    }


def test_refused() -> None:
    for call in (qat.enable_, qat.disable_, lambda m: qat.high_precision(m).__enter__()):
        with pytest.raises(ValueError, match=r"has no prepared weights.*prepare_"):
            call(Tied())
        with pytest.raises(TypeError, match=r"must be an nn\.Module"):
            call(torch.ones(2))


def test_a_state_that_a_damaged_file_names_is_refused() -> None:
    weight = lb.FakeQuantizedTensor(torch.randn(4, 16), WEIGHT)
    weight.off = "bias"  # type: ignore[assignment]
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    with pytest.raises(ValueError, match="off='bias'; accepted"):
        torch.load(buffer)
