"""`torch.compile(fullgraph=True)`: no graph break, the same values and gradients, no graph for each batch size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowbit.testing.comparison import relative_error, same, same_bits, values
from lowbit.testing.subject import Subject


def compiled(fn: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    """`fn` compiled as one graph, and the counter of its graphs (`frame_count`)."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter), counter


def outcome(fn: Any, linear: nn.Linear, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients of `fn`, which calls `linear`, by name."""
    linear.zero_grad()
    x.grad = None
    y = fn(x)
    y.square().sum().backward()
    found = {"y": y.detach(), "input": x.grad, "bias": linear.bias.grad}
    if linear.weight.requires_grad:
        assert type(linear.weight.grad) is Tensor
        found["weight"] = linear.weight.grad
    return {name: t for name, t in found.items() if t is not None}


class CompileContract(Subject):
    """The tensor passes through AOTAutograd, which flattens it, as an argument, a parameter and a result."""

    compile_backend: str = "aot_eager"
    """"inductor" also compiles the graph's kernels, which takes seconds and a C++ compiler."""
    compiled_tolerance: float = 1e-5
    """Largest relative error against eager PyTorch."""

    def test_dequantize_in_a_graph(self) -> None:
        torch._dynamo.reset()
        fn, counter = compiled(lambda t: t.dequantize() * 2, self.compile_backend)
        for seed in range(2):
            t = self.make((24, 100), seed)
            assert same_bits(fn(t), t.dequantize() * 2)
        assert counter.frame_count == 1, "other values must not compile again"

    def test_a_linear_with_a_batch_of_any_size(self) -> None:
        torch._dynamo.reset()
        linear = nn.Linear(100, 24)
        linear.weight = nn.Parameter(self.make((24, 100)), requires_grad=self.trainable)
        fn, counter = compiled(linear, self.compile_backend)
        for batch in (5, 7, 33):
            x = values((batch, 100), 1).requires_grad_()
            found, expected = outcome(fn, linear, x), outcome(linear, linear, x)
            assert found.keys() == expected.keys()
            for name, t in expected.items():
                error = relative_error(found[name], t)
                assert error < self.compiled_tolerance, f"{name}, batch of {batch}: {error}"
        assert counter.frame_count <= 2, "once for the first size, once for all others"

    def test_tensors_come_out_of_a_graph(self) -> None:
        torch._dynamo.reset()
        fn, _ = compiled(lambda t: (t.detach(), t[8:16], t.clone()), self.compile_backend)
        t = self.make((24, 100))
        alias, rows, clone = fn(t)
        assert same(alias, t) and same(rows, t[8:16]) and same(clone, t)
