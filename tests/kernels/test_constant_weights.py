"""Graphs whose launches write no weight: the decode kernel then copies a part of it before its wait."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.weight_only import constant_weights, weight_mm_decode_sm90
from tests.kernels.test_weight_mm_decode_sm90_gpu import WRITER, exact, operands, operands_of, run

SHAPE = 1, 6144, 4096  # whose first part is copied early


def late_write(to: Tensor, source: Tensor) -> None:
    """A launch that lets the next one start long before it writes."""
    writer = nvrtc.Module(nvrtc.compiled(WRITER, "sm_90a")).kernel("write_late", 3)
    stream = torch.cuda.current_stream().cuda_stream
    writer(stream, 64, 256, to.data_ptr(), source.data_ptr(), source.nbytes // 16)


def promised(make: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any, list[int]]:
    """`captured`, and the `constant` of each launch of the decode kernel."""
    graph, found = constant_weights.captured(make)
    from cuda.bindings import driver

    words = []
    for _, launch in constant_weights._launches(driver.CUgraph(graph.raw_cuda_graph())):
        if int(launch.func) in weight_mm_decode_sm90.EARLY:
            array = ctypes.c_void_p * weight_mm_decode_sm90.ARGUMENTS
            pointers: Any = array.from_address(int(launch.kernelParams))
            words.append(ctypes.c_int.from_address(pointers[-1]).value)
    return graph, found, words


def warmed() -> dict:
    case = operands(*SHAPE)
    product = weight_mm_decode_sm90.product(operands_of(case))
    assert product is not None and product.plan.early
    run(case)
    return case


def close(out: Tensor, case: dict) -> bool:
    expected = exact(**case)
    return bool((out.double() - expected).norm() <= 2e-3 * expected.norm())


class Graph:
    """A graph that holds no launch."""

    def __init__(self, keep_graph: bool) -> None:
        self.is_instantiated = False

    def instantiate(self) -> None:
        self.is_instantiated = True


@pytest.mark.parametrize(("early", "backend"), [(set(), "native"), ({1}, "cudaMallocAsync")])
def test_launches_wait_where_no_kernel_copies_early_or_memory_is_unknown(
    early: set[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No snapshot is taken: cudaMallocAsync has none."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(weight_mm_decode_sm90, "EARLY", early)
    graph: Any
    graph, found = constant_weights.captured(lambda: 5)
    assert graph.is_instantiated and found == 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["codes", "scale"])
def test_weights_may_be_written_between_replays(name: str) -> None:
    """Also by a launch that lets the next one start before it writes: a graph begins when all before it is done."""
    case = warmed()
    kept = case[name].clone()
    other = kept.flip(0).contiguous()
    x = case["x"].clone()
    graph, out, words = promised(lambda: (case["x"].copy_(x), run(case))[1])
    assert words == [1]
    for i in range(6):
        right = other if i % 2 == 0 else kept
        late_write(case[name], right)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(case[name], right) and close(out, case)


@pytest.mark.gpu
def test_x_of_the_launch_before_is_complete() -> None:
    """Constant weights are read early, x is not."""
    case = warmed()
    right = case["x"].clone()

    def make() -> Tensor:
        case["x"].zero_()
        late_write(case["x"], right)
        return run(case)

    graph, out, words = promised(make)
    assert words == [1]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, {**case, "x": right})


@pytest.mark.gpu
def test_a_weight_that_the_graph_makes_is_waited_for() -> None:
    case = warmed()

    def make() -> Tensor:
        codes = torch.zeros_like(case["codes"])
        late_write(codes, case["codes"])
        return run({**case, "codes": codes})

    graph, out, words = promised(make)
    assert words == [0]
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, case)


@pytest.mark.gpu
def test_a_plain_graph_promises_nothing() -> None:
    """A launch may write a weight that the next one reads."""
    case = warmed()
    right = case["codes"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case["codes"].zero_()
        late_write(case["codes"], right)
        out = run(case)
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert close(out, case)
