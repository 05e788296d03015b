"""A function captured in a CUDA graph by hand.

torch.compile's own CUDA graphs (mode="reduce-overhead") leave out what writes to a cache in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP = 3


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """`run`, after some calls of it, as a graph's replay; elsewhere than on a GPU `run` itself, called as often."""
    if device.type != "cuda":
        for _ in range(WARM_UP):
            run()
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
