"""A trace beside compiled models: equal launches, a table and a file, and a model that stays as it was."""

from __future__ import annotations

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import (
    LowbitTensor,
    TracedProduct,
    trace,
)
from lowbit.tracing import tracer
from lowbit_kernels.runtime import launches
from tests.test_trace import INT8, Mixed
from tests.traced import ran_in
from tests.train.problems import linear, prepared, values
from tests.train.test_training import Block


def compiled_launches(
    model: nn.Module, *args: Tensor, backward: bool
) -> dict[tuple[str, str], int]:
    """The launches of a compiled model that runs as usual."""
    torch._dynamo.reset()
    compiled = copy.deepcopy(model)
    compiled.compile(fullgraph=True, backend="aot_eager")
    with launches.counted() as calls, torch.set_grad_enabled(backward):
        y = compiled(*args)
        if backward:
            y.float().sum().backward()
    torch._dynamo.reset()
    return {key: count for key, count in calls.items() if key[0] not in tracer.OPERAND_OPS}


def test_a_compiled_model_in_training_has_the_launches_of_its_trace() -> None:
    model, x = prepared(Block(), INT8), values(16, 64).requires_grad_()
    found = trace(model, x)
    assert sum(found.launches.values()) == 9 and found.launches == compiled_launches(
        model, x, backward=True
    )
    assert {p.implementation.split()[0] for p in found.products} == {"scaled_mm"}
    assert sum(p.calls for p in found.products) == 9


@pytest.mark.parametrize("m", [1, 40])
def test_a_compiled_model_in_inference_has_the_launches_of_its_trace(m: int) -> None:
    model, x = Block().bfloat16(), values(m, 64, dtype=torch.bfloat16)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    found = trace(model, x, backward=False)
    assert sum(found.launches.values()) == 3 and found.launches == compiled_launches(
        model, x, backward=False
    )
    for p in found.products:
        assert any(" ".join(launch) in p.implementation for launch in found.launches)


def test_a_compiled_model_differs_from_its_trace_after_a_registration() -> None:
    """As the docstring of `trace` says: the graph keeps its implementation until torch._dynamo.reset()."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(64, 96)), values(4, 64)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    (cpu,) = trace(compiled, x, backward=False).products
    assert cpu.implementation.startswith("cpu_linear")

    def zeros(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return x.new_zeros(4, 96)

    with torch.no_grad():
        y = compiled(x)
        lb.register_linear(lambda x, w, b: True, zeros)
        try:
            (named,) = trace(compiled, x, backward=False).products
            assert named.implementation == "zeros" and torch.equal(compiled(x), y)
            torch._dynamo.reset()
            assert torch.equal(compiled(x), torch.zeros(4, 96))
        finally:
            lb.unregister_linear(zeros)
            torch._dynamo.reset()


# ---- the table and the file ---------------------------------------------------------------------------------------


def test_the_table() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 8))
    lb.quantize_(model[:4], lb.Int4WeightOnly(32))
    lb.dequantize_(model[2])
    assert str(trace(model, torch.randn(5, 64), backward=False)).splitlines() == [
        "0 of 5 layers ran products in low bits",
        "layer  product  M   N   K  weight    ran in   implementation  calls  why",
        "0-1,3  output   5  64  64  int4-g32  float32  cpu_linear          1  its scheme quantizes the weight only",
        "2      output   5  64  64  float32   float32  torch               1  a plain weight",
        "4      output   5   8  64  float32   float32  torch               1  a plain weight",
    ]
    alone = str(trace(model[0], torch.randn(5, 64), backward=False)).splitlines()
    assert alone[2].startswith("(model)  output ")


def test_the_table_names_every_layer_of_nested_lists() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
    model.forward = lambda x: [layer(x) for block in model.blocks for layer in block]
    lines = str(trace(model, torch.randn(2, 8), backward=False)).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["blocks.0-2.0", "blocks.0-2.1"]


def test_the_file_holds_every_product(tmp_path: Path) -> None:
    model = prepared(Mixed(), {"*.up": INT8, "*": None})
    found = trace(model, values(16, 64))
    found.write(tmp_path / "shapes.json")
    read = json.loads((tmp_path / "shapes.json").read_text(encoding="utf-8"))
    assert tuple(TracedProduct(**product) for product in read["products"]) == found.products
    assert list(read["products"][0]) == [
        *("layer", "product", "m", "n", "k", "weight", "ran_in", "implementation", "calls", "why")
    ]


# ---- nothing is changed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [None, INT8, lb.Int8Weight()], ids=["plain", "int8", "weight"])
def test_an_optimizer_step_in_a_gradient_hook_does_not_run(scheme: Any) -> None:
    model, x = Block(), values(16, 64)
    if scheme is not None:
        lb.train.prepare_(model, scheme)
    before = [p.detach().clone() for p in model.parameters()]
    ran: list[Any] = []

    def step(p: Tensor) -> None:
        torch.optim.SGD([p], lr=0.1).step()
        p.grad = None
        ran.append(p)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    handle = model.up.weight.register_hook(lambda grad: ran.append(grad))
    trace(model, x)
    assert not ran
    for p, own in zip(model.parameters(), before, strict=True):
        value = (p.dequantize(), own.dequantize()) if isinstance(p, LowbitTensor) else (p, own)
        assert torch.equal(*value)
    with pytest.raises((ValueError, RuntimeError)):
        trace(model, values(16, 65))
    model(x).sum().backward()
    count = len(before)
    assert len(ran) == count + 1, "the hooks run afterwards"
    handle.remove()
    model(x).sum().backward()
    assert len(ran) == 2 * count + 1


def test_a_failure_leaves_nothing_behind() -> None:
    low = prepared(Block(), INT8)
    low.up.weight.grad = torch.ones(128, 64)
    with pytest.raises(ValueError, match="K differs"):
        trace(low.up, values(16, 65))
    assert low.up.weight.grad is not None and not low.up._forward_hooks
    assert tracer.active is None and not launches._listeners


class Counting(nn.Module):
    """Replaces its buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(32, 64)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count, self.last = self.count + 1, x.detach()
        return self.layer(x)


@pytest.mark.parametrize("backward", [False, True])
def test_inputs_and_replaced_buffers_stay_as_they_were(backward: bool) -> None:
    model, x = prepared(Counting(), INT8), values(16, 64).requires_grad_()
    buffer, before = model.count, values(16, 64)
    x.grad = before.clone()
    found = trace(model, x=x, backward=backward)
    assert ("grad_input" in ran_in(found, "layer")) == backward and torch.equal(x.grad, before)
    assert model.count is buffer and not buffer.any() and model.last is None
    computed = (x * 2).requires_grad_()
    trace(model, computed, backward=backward)
    computed.sum().backward()
    assert torch.equal(x.grad, before + 2), (
        "the graph behind the argument still exists and has not run"
    )


def test_a_compiled_model_works_afterwards_without_compiling_again() -> None:
    torch._dynamo.reset()
    model, x = nn.Linear(64, 96), torch.randn(5, 64)
    lb.quantize_(model, lb.Int4WeightOnly(32))
    model.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        y = model(x)
    (output,) = trace(model, x, backward=False).products
    assert output.implementation.startswith("cpu_linear")
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(model(x), y)
    torch._dynamo.reset()


def test_without_a_tracer_products_note_nothing() -> None:
    """A product then costs one test of `tracer.active`."""
    assert tracer.active is None and tracer.note(1, 1, 1, None) is None
    x, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    assert tracer.running(x, weight, "a") is tracer.running(x, weight, "b")
    tracer.record(None, "output", "int8")
    tracer.multiplies_in("int8")
    assert not launches._listeners


def test_traces_do_not_overlap() -> None:
    """Products are noted for the whole process: a second trace, in another thread or inside of one, is refused."""
    model = nn.Sequential(linear(8, 64))
    runs, ends = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        runs.set()
        ends.wait(60)

    handle = model.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(trace, model, values(4, 64))
        assert runs.wait(60)
        handle.remove()
        try:
            with pytest.raises(RuntimeError, match=r"another lowbit\.trace runs"):
                trace(linear(8, 64), values(4, 64))
        finally:
            ends.set()
        assert ran_in(first.result(60), "0")["output"] == {"float32": 1}
    assert tracer.active is None and not launches._listeners
    model.register_forward_pre_hook(lambda *_: trace(linear(8, 64), values(4, 64)))
    with pytest.raises(RuntimeError, match="one model at a time"):
        trace(model, values(4, 64))
    assert tracer.active is None and trace(linear(8, 64), values(4, 64)).products


def test_only_modules_are_traced() -> None:
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got Tensor"):
        trace(torch.zeros(1))  # type: ignore[arg-type]
