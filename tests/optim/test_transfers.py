"""The calls to CUDA of the copies of offloaded parameters, without a GPU."""

from __future__ import annotations

import contextlib

import torch

from lowbit.optim.offload import transfers


def test_the_order_that_cuda_streams_are_given(monkeypatch):
    """Which stream waits for which. tests/optim/test_offload_cuda.py tests the copies themselves."""
    log, current = [], []

    class Stream:
        def __init__(self, device=None, name=None):
            self.name = name or ["down", "up"][len(current) - 1]
            current.append(self)

        def wait_stream(self, other):
            log.append(f"{self.name} after {other.name}")

        def record_event(self):
            log.append(f"event on {self.name}")
            return self.name

    class Recorder(torch.Tensor):
        def copy_(self, source, non_blocking=False):
            log.append(f"copy on {running[-1]}, {'not ' * non_blocking}blocking")

        def record_stream(self, stream):
            log.append(f"kept for {stream.name}")

    @contextlib.contextmanager
    def on(stream):
        running.append(stream.name)
        yield
        running.pop()

    compute, running = Stream(name="compute"), []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    cuda = transfers.CudaTransfers(torch.device("cuda", 0))
    a, b = torch.ones(1).as_subclass(Recorder), torch.ones(1).as_subclass(Recorder)
    assert cuda.download(a, b) == "down" and cuda.upload(b, a) == "up"
    cuda.join()
    assert log == [
        *("down after compute", "copy on down, not blocking", "kept for down", "event on down"),
        *("up after compute", "copy on up, not blocking", "event on up"),
        "compute after up",
    ]
