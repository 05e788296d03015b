"""A training step that a CUDA graph replays, and what a user can do where torch fails to compile or capture one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recipes.command_line import UserError


class GraphedStep:
    """A step on a GPU, from the third call on as the replay of a CUDA graph. `step`: the loss of inputs and targets.

    The first two calls make states and compile kernels. All run on one stream, since autograd computes gradients on the
    stream of the first forward pass, and the default one can't be captured.
    """

    EAGER = 2

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.step = step
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: tuple[Tensor, Tensor] | None = None
        self.loss = torch.empty(())
        self.calls = 0

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.batch is None:
                self.batch = torch.empty_like(inputs), torch.empty_like(targets)
            for held, new in zip(self.batch, (inputs, targets), strict=True):
                held.copy_(new)
            self._run(*self.batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.calls += 1
        return self.loss

    def _run(self, inputs: Tensor, targets: Tensor) -> None:
        if self.calls < self.EAGER:
            self.loss = self.step(inputs, targets)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.loss = self.step(inputs, targets)
        self.graph.replay()


def way_out(error: BaseException) -> UserError | None:
    """For a step that torch can't compile or CUDA can't capture: an error that names the setting that does without.
    None for any other error."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    # A capture that another error has ended fails too, so the first error counts.
    first = f"{type(chain[-1]).__name__}: {chain[-1]}".splitlines()[0]
    if any(isinstance(one, torch._dynamo.exc.TorchDynamoException) for one in chain):
        return UserError(
            f"torch.compile can't compile the step ({first}); --set compiled=False runs it without"
        )
    if "captur" in str(chain[-1]):
        return UserError(
            f"the step can't be captured in a CUDA graph ({first}); --set graph=False runs it without"
        )
    return None
