"""QAT of the stock experts of transformers (grouped, batched, one by one) and of torchtitan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowbit as lb
from lowbit import qat
from lowbit.layers.frozen import shown_class
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from tests.integrations.models import TOKENS, gpt_oss, logits, mixtral, qwen3_moe, train
from tests.train.problems import relative, values

SCHEMES = {
    "int4": lb.Int4WeightOnly(16),
    "int3-asymmetric": Scheme(Spec(Int(3), PerGroup(16), "asymmetric")),
    "int2": lb.Int2WeightOnly(16),
    "int8-int4": lb.Int8DynamicActivationInt4Weight(16),
    "float8-float8": lb.Float8DynamicActivationFloat8Weight(),
}
both_scales = pytest.mark.parametrize("scales", ["present", "learned"])


def is_experts(module: nn.Module, name: str) -> bool:
    return name.endswith("experts")


def stock(make: Any, implementation: str) -> Any:
    pytest.importorskip("transformers")
    model = make()
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.cover("pairs")
@both_scales
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("make", [mixtral, qwen3_moe], ids=["mixtral", "qwen3-moe"])
def test_converted_to_what_was_trained(make, implementation, name, scales) -> None:
    model = stock(make, implementation)
    kinds = [type(m) for m in model.modules()]
    before = logits(model)
    report = qat.prepare_(model, SCHEMES[name], is_experts, scales=scales)
    assert len(report.converted) == 2
    assert ("scale" in str([*model.state_dict()])) == (scales == "learned")
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), steps=3)
    assert losses[-1] < losses[0]
    y = logits(model)
    products = [p for p in lb.trace(model, input_ids=TOKENS).products if ".experts." in p.layer]
    assert {p.layer.rpartition(".")[2] for p in products} == {"gate_up_proj", "down_proj"}
    assert all(p.calls and "rounded values" in p.why for p in products)
    qat.convert_(model)
    assert [shown_class(m) for m in model.modules()] == kinds
    # without gradients a CPU's kernel adds float32 up in another order
    torch.testing.assert_close(logits(model), y, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(y, before, rtol=1e-3)


@both_scales
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_gradients_are_those_of_the_rounded_weights(implementation, scales) -> None:
    """All paths sum the same gradients; with checkpointing they are the same to the bit."""
    found = []
    for path in ("grouped_mm", implementation, implementation):
        model = stock(mixtral, path).train()
        qat.prepare_(model, SCHEMES["int3-asymmetric"], is_experts, scales=scales)
        if len(found) == 2:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    reference, own, again = found
    for name, grad in own.items():
        assert relative(grad, reference[name]) < 1e-4, name
        assert torch.equal(again[name], grad), name


@pytest.mark.cover("values")
@both_scales
@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compiled_where_transformers_takes_its_own_op(make, dtype, scales) -> None:
    """Outputs and gradients in graphs, before and after `convert_`: those of weights that are not bfloat16."""
    model = stock(make, "grouped_mm").to(dtype).train()
    qat.prepare_(model, lb.Int4WeightOnly(16), is_experts, scales=scales)
    block = model.model.layers[0].mlp
    torch._dynamo.reset()
    run = torch.compile(block, backend="aot_eager")
    for converts in (True, False):
        x = values(1, 12, 64, dtype=dtype).requires_grad_()
        wanted = [x, *(p for p in block.parameters() if p.requires_grad)]
        found, expected = (first(f(x)) for f in (run, block))
        assert relative(found.detach(), expected.detach()) < 2e-3
        ours, theirs = (
            torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True)
            for y in (found, expected)
        )
        assert [g is None for g in ours] == [g is None for g in theirs]
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b is not None and b.any()]
        assert pairs and all(relative(a, b) < 1e-2 for a, b in pairs)
        if converts:
            qat.convert_(model)


@pytest.mark.parametrize("name", ["int4", "int8-int4"])
def test_frozen_experts_stay_packed_for_backward(name) -> None:
    """transformers' op of frozen experts, in eager code and in a graph: inputs are rounded, and no values kept."""
    moe = pytest.importorskip("transformers.integrations.moe")
    pytest.importorskip("lowbit.hf")
    op = torch.ops.transformers.grouped_mm_fallback
    module = nn.Module()
    module.up = nn.Parameter(lb.AffineTensor.from_float(values(4, 32, 64), SCHEMES[name]), False)
    weight, ends = module.up.transpose(-2, -1), torch.tensor([3, 3, 8, 12], dtype=torch.int32)
    rows = values(12, 64).requires_grad_()
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op(rows, weight, offs=ends)
    assert not [t for t in kept if type(t) is torch.Tensor and t.numel() >= weight.numel()]
    expected = moe._grouped_mm(rows, weight, ends)
    torch.testing.assert_close(y, expected)
    grad = values(12, 32)
    (found,) = torch.autograd.grad(y, rows, grad)
    wanted = torch.autograd.grad(expected, rows, grad)[0]
    torch.testing.assert_close(found, wanted)
    torch._dynamo.reset()
    run = torch.compile(
        lambda r: op(r, module.up.mT, offs=ends), backend="aot_eager", fullgraph=True
    )
    in_graph = run(rows)
    torch.testing.assert_close(in_graph, expected)
    torch.testing.assert_close(torch.autograd.grad(in_graph, rows, grad)[0], wanted)


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "scheme", [lb.Int8MixedPrecision(always=True), lb.Int8Weight(), lb.Int4Weight()], ids=str
)
def test_experts_that_train_in_low_bits_refuse_float32_graphs(scheme) -> None:
    """Before the first product, with the ways out."""
    model = stock(qwen3_moe, "grouped_mm").train()
    lb.train.prepare_(model, scheme, is_experts)
    block = torch.compile(model.model.layers[0].mlp, backend="aot_eager")
    with pytest.raises(
        Exception, match=r"in torch\.float32 .*in graphs.*model\.to\(torch\.bfloat16\)"
    ):
        block(values(1, 12, 64))


@pytest.mark.cover("values")
@both_scales
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["int4", "int8-int4"])
def test_compiled(name, implementation, scales) -> None:
    """One graph for every number of tokens, and no break in it."""
    model = stock(qwen3_moe, implementation).bfloat16().train()
    qat.prepare_(model, SCHEMES[name], is_experts, scales=scales)
    block = model.model.layers[0].mlp
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    run = torch.compile(block, fullgraph=True, backend=counted)
    for tokens in (12, 20, 31):
        x = values(1, tokens, 64, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 1)
        y, expected = run(x), block(x)
        assert relative(y.detach(), expected) < 2e-2
        y.float().square().sum().backward()
    assert counted.frame_count == 1
    assert all(p.grad is not None for n, p in block.named_parameters() if n.startswith("experts"))


def test_a_plan_for_experts() -> None:
    model = stock(mixtral, "grouped_mm")
    plan = {"*.gate_up_proj": SCHEMES["int2"], "*.down_proj": lb.Int8WeightOnly(), "lm_head": None}
    plan |= {"*": lb.Int4WeightOnly(16)}

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) or is_experts(module, name)

    qat.prepare_(model, plan, chosen, scales="learned")
    state = copy.deepcopy(model.state_dict())
    other = stock(mixtral, "grouped_mm")
    qat.prepare_(other, plan, chosen, scales="learned")
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(model))


@both_scales
@pytest.mark.parametrize("use_grouped_mm", [False, True], ids=["loop", "grouped"])
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_of_torchtitan(name, use_grouped_mm, scales, monkeypatch) -> None:
    moe = pytest.importorskip("torchtitan.models.moe.moe")
    # it pads the rows of each expert by a kernel of a GPU
    monkeypatch.setattr(moe, "indices_padding_wrapper", lambda run: run)
    experts = moe.GroupedExperts(64, 48, 4, use_grouped_mm)
    torch.manual_seed(0)
    with torch.no_grad():
        experts.init_weights(0.02)
    model = nn.ModuleDict({"experts": experts})
    report = qat.prepare_(model, SCHEMES[name], is_experts, scales=scales)
    assert report.converted == ["experts.w1", "experts.w2", "experts.w3"]
    counts = torch.tensor([5, 0, 20, 7])
    x = values(32, 64)
    y = experts(x, counts)
    y.sum().backward()
    assert all(p.grad is not None for p in experts.parameters())
    with torch.no_grad():
        y = experts(x, counts)
    qat.convert_(model)
    assert shown_class(experts) is moe.GroupedExperts
    assert torch.equal(experts(x, counts), y)


def first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
