"""CUDA graphs whose launches do not write the weights that they multiply by.

A launch of the decode kernel waits for the launches before it, since one of them may have written its weight. In a
graph that writes no weight it need not: weights that were written before a replay, in the order of its stream, are
there when the first launch of the graph begins. So there the kernel copies the first part of a weight while the launch
before it is still running, where that is faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.weight_only import weight_mm_decode_sm90

R = TypeVar("R")
WEIGHT = slice(4, 7)
"""Which of the kernel's arguments are the addresses of codes, scales and zero points."""


def captured(run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """The CUDA graph of a call of `run`, and what the call returned.

    `run` must not write in place a weight of its products that is older than the call. Weights that it makes itself are
    recognised, and waited for. Between replays weights may be written on the stream of the replays, or in its order.
    The graph holds the addresses of all tensors that `run` reads: keep them, and capture again after replacing one.

    Raises RuntimeError for an error of the driver. With another allocator than torch's own, which does not tell what
    the graph has made, all launches wait.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        found = run()
    if weight_mm_decode_sm90.EARLY and torch.cuda.get_allocator_backend() == "native":
        segments = torch.cuda.memory_snapshot(graph.pool(), include_traces=False)
        made = [range(s["address"], s["address"] + s["total_size"]) for s in segments]
        _make_constant(graph.raw_cuda_graph(), made)
    graph.instantiate()
    return graph, found


def _make_constant(graph: int, made: list[range]) -> None:
    """Set the argument `constant` of all launches of the decode kernel that read it, except those whose weight lies in
    memory that the graph has `made`."""
    from cuda.bindings import driver

    constant = ctypes.c_int(1)
    for node, launch in _launches(driver.CUgraph(graph)):
        if int(launch.func) not in weight_mm_decode_sm90.EARLY:
            continue
        array = ctypes.c_void_p * weight_mm_decode_sm90.ARGUMENTS
        *pointers, _ = array.from_address(int(launch.kernelParams))
        weight = [ctypes.c_uint64.from_address(p).value for p in pointers[WEIGHT] if p]
        if any(address in memory for address in weight for memory in made):
            continue
        changed = array(*pointers, ctypes.addressof(constant))
        launch.kernelParams = ctypes.addressof(changed)
        nvrtc.check(driver.cuGraphKernelNodeSetParams(node, launch)[0])


def _launches(graph: Any) -> Iterator[tuple[Any, Any]]:
    """The nodes of a graph that launch kernels, and their parameters."""
    from cuda.bindings import driver

    error, _, count = driver.cuGraphGetNodes(graph)
    nvrtc.check(error)
    error, nodes, _ = driver.cuGraphGetNodes(graph, count)
    nvrtc.check(error)
    for node in nodes:
        error, kind = driver.cuGraphNodeGetType(node)
        nvrtc.check(error)
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            error, launch = driver.cuGraphKernelNodeGetParams(node)
            nvrtc.check(error)
            yield node, launch
