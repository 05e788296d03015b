"""Forward and backward of one linear layer: low-bit products, quantization included, beside bf16 and torchao.

Each is compiled by torch.compile. The small shapes give the costs in `lowbit.schemes.least_sizes.Least`, which decide
which layers stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.registry import Candidate, Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio, readable
from benchmarks.timing import Timing, measure
from benchmarks.train_llama import SCHEMES
from benchmarks.train_peers import PEERS, as_function
from lowbit import MixedPrecisionTensor
from lowbit.tensor.trained.trainable import TrainableTensor

REFERENCE = "bf16"
LLAMA_8B = [(4096, 4096), (14336, 4096), (4096, 14336)]
LLAMA_1B = [(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)]
SHAPES = [  # M, N, K
    (8192, 8192, 8192),
    *((m, n, k) for n, k in LLAMA_8B for m in (8192, 16384)),
    *((16384, n, k) for n, k in LLAMA_1B),
    *((m, size, size) for size in (256, 512, 768, 1024, 2048) for m in (256, 1024, 4096, 16384)),
]
LEAST_DECIBELS = 20.0


def arguments(shape: tuple[int, int, int], scheme: Any, device: str = "cuda") -> tuple:
    """x [M, K], the weight [N, K], prepared if there is a scheme, and the gradient of the output [M, N]; bfloat16."""
    m, n, k = shape
    x, weight, grad = (
        torch.randn(size, dtype=torch.bfloat16, device=device) for size in ((m, k), (n, k), (m, n))
    )
    if scheme is not None:
        weight = TrainableTensor.of(scheme)(weight, scheme)
    return x.requires_grad_(), nn.Parameter(weight), grad


class LazilyCompiled:
    """The linear that `make` makes, at its first call, so that a missing package fails only there. It is then compiled:
    with `whole` as one graph."""

    def __init__(self, make: Callable[[], Callable[..., Tensor]], whole: bool) -> None:
        self.make, self.whole = make, whole
        self.linear: Callable[..., Tensor] | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.linear is None:
            made = self.make()

            def linear(x: Tensor, weight: Tensor) -> Tensor:
                return made(x, weight)

            torch.compiler.reset()  # past its limit of recompilations torch.compile runs uncompiled
            self.linear = torch.compile(linear, fullgraph=self.whole, dynamic=False)
        return self.linear(x, weight)


def forward_and_backward(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, grad: Tensor
) -> tuple:
    """The output and the gradients of both operands."""
    y = linear(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), grad)


def check(name: str, run: Callable[..., tuple], shape: tuple[int, int, int], scheme: Any) -> None:
    """RuntimeError unless every result is within the noise of quantization.

    Args:
        name: name of the candidate, for the message.
        run: maps (x, weight, gradient) to (y, dx, dw).
        shape: (M, N, K).
        scheme: prepares the weight; None leaves it in bfloat16.
    """
    x, weight, grad = arguments(shape, scheme)
    plain = weight.master() if isinstance(weight, MixedPrecisionTensor) else weight.detach()
    expected = (x @ plain.t(), grad @ plain, grad.t() @ x)
    for what, found, exact in zip(("y", "dx", "dw"), run(x, weight, grad), expected, strict=True):
        noise = (found.float() - exact.float()).norm() / exact.float().norm()
        if not noise < 10 ** (-LEAST_DECIBELS / 20):
            raise RuntimeError(f"{name}: {what} of {shape} is off by {noise.item():.3f}")


def measure_checked(candidate: Candidate, repeats: int) -> Timing:
    """Check the results, then time them."""
    check(candidate.name, candidate.run, *candidate.arguments.args)  # type: ignore[attr-defined]
    return measure(candidate, repeats)


def cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    m, n, k = result.problem.candidates[0].arguments.args[0]
    seconds, reference = row.measured.median, result.reference.measured
    return [
        readable(seconds),
        f"{6 * m * n * k / seconds / 1e12:.0f}",
        ratio(reference.median / seconds, 1.0) if reference is not None else "",
    ]


TABLE = Table(
    columns=("forward + backward", "TFLOP/s", "speed / bf16's"),
    measure=measure_checked,
    cells=cells,
    legend="Output, gradient of the input, gradient of the weight, and the quantization of their operands; compiled, "
    "captured in a CUDA graph; medians. *TFLOP/s*: 6 M N K operations in that time.",
)


@benchmark(
    "train_linear", "a linear layer in training, int8, float8 and bf16 products", table=TABLE
)
def train_linear() -> Iterator[Problem]:
    schemes: dict[str, Any] = {
        f"lowbit {name}": replace(scheme, always=True) for name, scheme in SCHEMES.items()
    }
    for shape in SHAPES:
        chosen = []
        m, n, k = shape
        moved = 2 * 2 * (m * k + n * k + m * n)
        for name, scheme in {**schemes, **dict.fromkeys(PEERS), REFERENCE: None}.items():
            make = partial(as_function, PEERS[name], n, k) if name in PEERS else lambda: F.linear
            run = partial(forward_and_backward, LazilyCompiled(make, whole=name not in PEERS))
            chosen.append(Candidate(name, run, partial(arguments, shape, scheme), moved))
        yield Problem("{} x {} x {}".format(*shape), chosen, REFERENCE)
