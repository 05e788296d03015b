"""The benchmarks of low-bit training on a CPU: every candidate runs, and is checked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import (
    cpu_linear,
    eager_linear,
    saved_activations,
    train_linear,
    train_llama,
    train_peers,
    train_qat,
)
from benchmarks.registry import Candidate, Problem, Result, Row
from benchmarks.timing import Timing
from benchmarks.train_llama import measure_training, training_step
from lowbit.train import Int8Weight
from recipes.llama import LlamaConfig
from tests.scaled_products import scaled_products

SHAPE = (48, 40, 64)


@pytest.mark.parametrize("name", [*train_llama.SCHEMES, None])
def test_a_linear_forward_and_backward(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = name and replace(train_llama.SCHEMES[name], always=True)
    on_cpu = partial(train_linear.arguments, device="cpu")
    monkeypatch.setattr(train_linear, "arguments", on_cpu)
    run = partial(train_linear.forward_and_backward, F.linear)
    with scaled_products() as calls:
        train_linear.check(str(name), run, SHAPE, scheme)
    assert sum(calls.values()) == (3 if name else 0)
    for y in run(*on_cpu(SHAPE, scheme)):
        assert y.dtype is torch.bfloat16


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_linear, "arguments", partial(train_linear.arguments, device="cpu"))
    run = partial(train_linear.forward_and_backward, lambda x, w: F.linear(x, w) * 1.2)
    with pytest.raises(RuntimeError, match=r"int8: y of \(48, 40, 64\) is off by 0\.2"):
        train_linear.check("int8", run, SHAPE, None)


def test_the_cells_are_speeds() -> None:
    make = partial(train_linear.arguments, (1000, 1000, 1000), None)
    candidates = [Candidate(name, lambda: None, make, 1) for name in ("lowbit int8", "bf16")]
    rows = [Row(c, Timing(t, t, t)) for c, t in zip(candidates, (1e-5, 2e-5), strict=True)]
    result = Result(Problem("p", candidates, "bf16"), rows)
    assert train_linear.cells(rows[0], result, 1.0) == ["10.0 µs", "600", "2.00"]


def test_eager_layers_run_in_low_bits_beside_bf16() -> None:
    problems = list(eager_linear.eager_linear())
    for problem in problems:
        assert problem.candidates[-1].name == problem.reference == "bf16"
        for candidate in problem.candidates:
            small = replace(candidate, device="cpu", size=128)
            with scaled_products() as calls:
                times = eager_linear.measure(small, 1)
            forwards, both = 2 * 2, 10 + 2 * 2
            low = (candidate.scheme is not None) * candidate.layers
            assert sum(calls.values()) == low * (forwards + 3 * both)
            assert min(*times.own, *times.reference) > 0
    assert [p.candidates[0].layers for p in problems] == [1, 3]
    times = eager_linear.HostTimes((3e-5, 2e-4), (2e-5, 1e-4))
    result = Result(problems[0], [])
    found = eager_linear.cells(Row(problems[0].candidates[0], times), result, 1.0)
    assert found == ["30", "200", "20, 100", "1.50", "2.00"]


def test_linears_on_a_cpu_take_turns_with_a_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "SECONDS", 0.0)
    problems = list(cpu_linear.cpu_linear())
    assert {c.size for p in problems for c in p.candidates} >= {2880, 2912, 4096}
    for candidate in problems[4].candidates[::8]:  # a compiler takes a second for each
        times = cpu_linear.measure(replace(candidate, size=64), 1)
        assert min(times.own, times.plain) > 0 and times.faults >= 0
    row = Row(problems[0].candidates[0], cpu_linear.Times(3e-3, 2e-3, 7))
    assert cpu_linear.cells(row, Result(problems[0], []), 1.0) == ["3.000", "2.000", "1.50", "7"]


def test_the_steps_of_a_whole_model() -> None:
    config = LlamaConfig(300, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
    found = list(train_llama.saving_candidates((2, 16)))
    (problem,) = train_llama.train_saved()
    assert problem.reference in {c.name for c in found}
    found = [c for c in found if c.saved_in_int8]
    found += train_llama.low_bit_candidates((2, 16))
    assert found[-1].name == "torch AdamW fused"
    assert len({c.name for c in found}) == len(found)
    for candidate in found:
        scheme = candidate.scheme
        if callable(scheme):  # a peer's
            continue
        has_products = scheme not in (None, {"head": None, "*": Int8Weight()})
        if isinstance(scheme, dict) and has_products:
            scheme = {key: value and replace(value, always=True) for key, value in scheme.items()}
        elif has_products:
            scheme = replace(scheme, always=True)
        own = replace(config, recompute=candidate.config.recompute)
        small = replace(candidate, config=own, device="cpu", compile=False, scheme=scheme)
        with scaled_products() as calls:
            assert measure_training(small, 2).seconds > 0
        layers = has_products * (7 if isinstance(scheme, dict) else 8)
        assert sum(calls.values()) == 4 * 3 * layers, candidate.name


def test_what_is_saved_of_a_block_and_of_attention() -> None:
    """Codes take about half; queries and keys that stay exact keep sharp attention's gradients."""
    config = LlamaConfig(61, dim=128, layers=1, heads=4, kv_heads=2, hidden=256, context=64)
    problems = list(saved_activations.saved_activations())
    assert [len(p.candidates) for p in problems] == [4, 4]
    rounded, plain = (
        saved_activations.saved_bytes(replace(c, config=config)) for c in problems[0].candidates[:2]
    )
    assert 0.4 * plain < rounded < 0.7 * plain
    sharp = list(saved_activations.saved_attention())[3]
    exact, all_rounded = map(saved_activations.attention_errors, sharp.candidates)
    assert max(exact) < 0.04 < 0.06 < min(all_rounded) and exact[2] == 0


def test_a_peer_converts_the_model_and_a_linear() -> None:
    def convert(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, y: 2 * y)

    config = LlamaConfig(300, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
    plain = next(c for c in train_llama.low_bit_candidates((2, 16)) if c.scheme is None)
    small = replace(plain, config=config, device="cpu", compile=False)
    losses = [training_step(replace(small, scheme=scheme))() for scheme in (None, convert)]
    assert losses[0] != losses[1]

    x, weight = torch.randn(5, 64), torch.randn(40, 64, requires_grad=True)
    y = train_peers.as_function(convert, 40, 64)(x, weight)
    assert torch.allclose(y, 2 * x @ weight.T)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert torch.allclose(grad, 2 * x.sum(0).expand(40, 64))


@pytest.mark.parametrize("index", range(len(train_qat.SCHEMES) + 1))
def test_a_step_of_qat(index: int) -> None:
    """Where the benchmark asks for gradients in low bits, each layer has two such products, in each of four steps."""
    config = LlamaConfig(300, dim=64, layers=1, heads=2, kv_heads=1, hidden=64, context=16)
    candidate = list(train_qat.candidates((2, 16), compile=False))[index]
    scheme, layers = candidate.scheme, 0
    if scheme is not None and scheme.gradients is not None and scheme.scheme == train_qat.INT8:
        scheme = replace(scheme, gradients=replace(scheme.gradients, always=True))
        layers = 7
    small = replace(candidate, config=config, device="cpu", scheme=scheme)
    with scaled_products() as calls:
        row = Row(small, measure_training(small, 2))
    assert sum(calls.values()) == 4 * 2 * layers, candidate.name
    result = Result(Problem("p", [small], small.name), [row])
    assert len(train_qat.cells(row, result, 1.0)) == len(train_qat.TABLE.columns)


def test_rows_of_qat_have_names_of_their_own() -> None:
    for compile in (True, False):
        names = [c.name for c in train_qat.candidates((2, 16), compile)]
        assert len(set(names)) == len(names)
