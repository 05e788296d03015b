"""Forward and backward of the experts of a mixture: low-bit grouped products, quantization included, beside bf16.

The same for each product alone, with operands that are quantized already, beside torch's own in float8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases.operands import offsets_of
from benchmarks.registry import Problem, Result, Row, Table, benchmark
from benchmarks.report import ratio, readable
from benchmarks.scaled_mm import Product
from benchmarks.timing import measure
from benchmarks.train_linear import LEAST_DECIBELS
from lowbit import train
from lowbit.tensor.trained.master_weight import MasterWeightTensor
from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.matmul.grouped_scaled_mm import grouped_scaled_mm
from lowbit_kernels.quantize.quantize_experts import quantize_experts
from lowbit_kernels.quantize.quantize_grouped import quantize_grouped

REFERENCE = "torch._grouped_mm, bf16"
SHAPES = [  # E, N, K, M
    (128, 1536, 2048, 131072),
    (128, 2048, 768, 131072),
    (8, 14336, 4096, 32768),
    (8, 4096, 14336, 32768),
]
SCHEMES = {
    "lowbit, int8": train.Int8MixedPrecision(always=True),
    "lowbit, float8": train.Float8MixedPrecision(always=True),
    "lowbit, float8 in blocks": train.Float8BlockMixedPrecision(always=True),
    "lowbit, int8, default": train.Int8MixedPrecision(),
}
FORMATS = {"int8": "lowbit, int8", "e4m3": "lowbit, float8"}
PRODUCTS = ("output", "grad_input", "grad_weight")


def _cells(row: Row, result: Result, bandwidth: float) -> list[str]:
    seconds = row.measured.median
    speed = f"{row.candidate.operations / seconds / 1e12:.0f}"
    bf16 = result.reference.measured
    return [readable(seconds), speed, "" if bf16 is None else ratio(bf16.median, seconds)]


TABLE = Table(
    columns=("time", "TFLOP/s or TOPS", "speed / bf16"),
    measure=measure,
    cells=_cells,
    legend="Medians. *speed / bf16*: relative to `torch._grouped_mm` in the same run. The rows of experts are uneven, "
    "in multiples of 16. *forward and backward* includes the quantization of rows, gradients and weights. The products "
    "alone read operands that are quantized already.",
)


def tokens_of(m: int, experts: int) -> list[int]:
    """Rows of each expert: multiples of 16, as torch's float8 product takes them; half to 1.5 of the mean."""
    generator = torch.Generator().manual_seed(0)
    share = torch.rand(experts, generator=generator) + 0.5
    counts = (share / share.sum() * m / 16).long() * 16
    counts[0] += m - counts.sum()
    return counts.tolist()


def arguments(shape: tuple[int, int, int, int], scheme: Any = None) -> tuple:
    """x [M, K], the experts [E, N, K], prepared if there is a scheme, offsets, and the gradient [M, N]; bfloat16."""
    experts, n, k, m = shape
    x, weight, grad = (
        torch.randn(size, dtype=torch.bfloat16, device="cuda")
        for size in ((m, k), (experts, n, k), (m, n))
    )
    if scheme is not None:
        weight = MasterWeightTensor.of(scheme)(weight, scheme)
    offsets = offsets_of(tokens_of(m, experts), "cuda")
    return x.requires_grad_(), nn.Parameter(weight), offsets, grad


def forward_and_backward(x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor) -> tuple:
    """The output and the gradients of both operands."""
    y = torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    return y, *torch.autograd.grad(y, (x, weight), grad)


def check(name: str, shape: tuple[int, int, int, int], scheme: Any) -> None:
    """RuntimeError unless every result is within the noise of quantization."""
    x, weight, offsets, grad = arguments(shape, scheme)
    plain = nn.Parameter(weight.master())
    results = (forward_and_backward(x, w, offsets, grad) for w in (weight, plain))
    for what, found, exact in zip(PRODUCTS, *results, strict=True):
        noise = (found.float() - exact.float()).norm() / exact.float().norm()
        if not -20 * noise.log10().item() > LEAST_DECIBELS:
            raise RuntimeError(f"{what} of {name} at {shape} has {noise:.3g} noise")


def quantized(shape: tuple[int, int, int, int], fmt: str, product: str) -> tuple:
    """The operands of `grouped_scaled_mm` for one product."""
    x, weight, offsets, grad = (t.detach() for t in arguments(shape))
    if product == "output":
        codes, scale = quantize_experts(weight, fmt)
        rows, row_scale, _, _ = quantize_grouped(x, offsets, fmt, columns=False)
        return rows, codes, row_scale, scale, offsets
    if product == "grad_input":
        codes, scale = quantize_experts(weight, fmt, transposed=True)
        rows, row_scale, _, _ = quantize_grouped(
            grad, offsets, fmt, columns=False, row_factor=scale
        )
        return rows, codes, row_scale, row_scale.new_ones(1), offsets
    (a, a_scale), (b, b_scale) = (
        quantize_grouped(t, offsets, fmt, rows=False)[2:] for t in (grad, x)
    )
    return a, b, a_scale, b_scale, offsets


def plain(shape: tuple[int, int, int, int], product: str) -> tuple:
    """The operands of `torch._grouped_mm` for one product."""
    x, weight, offsets, grad = (t.detach() for t in arguments(shape))
    operands = {
        "output": (x, weight.mT),
        "grad_input": (grad, weight),
        "grad_weight": (grad.t(), x),
    }
    return *operands[product], offsets


def for_torch(shape: tuple[int, int, int, int], product: str) -> tuple:
    """The operands of `torch._scaled_grouped_mm`, whose sums over rows begin at the offsets, without zeros between."""
    a, b, a_scale, b_scale, offsets = quantized(shape, "e4m3", product)
    m = shape[3]
    if product == "grad_weight":
        counts = grouped_columns.counts(offsets, m)
        shift = grouped_columns.starts(counts) - counts.cumsum(0) + counts
        columns = torch.arange(m, device="cuda") + shift.repeat_interleave(counts)
        a, b = (t.view(torch.uint8)[:, columns].contiguous().view(t.dtype) for t in (a, b))
        return a, b.t(), a_scale.view(-1), b_scale.view(-1), offsets
    b_scale = b_scale.expand(b.shape[:2]).contiguous()
    return a, b.mT, a_scale, b_scale, offsets


def _problem(shape: tuple[int, int, int, int], name: str) -> Problem:
    experts, n, k, m = shape
    operations = 2 * m * n * k
    make: dict[str, tuple[Callable[..., Any], Callable[[], tuple]]] = {}
    if name == "forward and backward":
        operations *= 3
        for label, scheme in SCHEMES.items():
            check(label, shape, scheme)
            make[label] = (forward_and_backward, partial(arguments, shape, scheme))
        make[REFERENCE] = (forward_and_backward, partial(arguments, shape))
    else:
        for fmt, label in FORMATS.items():
            make[label] = (grouped_scaled_mm, partial(quantized, shape, fmt, name))
        make["torch._scaled_grouped_mm, float8"] = (
            lambda a, b, a_scale, b_scale, offsets: torch._scaled_grouped_mm(
                a, b, a_scale, b_scale, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            partial(for_torch, shape, name),
        )
        make[REFERENCE] = (
            lambda a, b, offsets: torch._grouped_mm(a, b, offs=offsets),
            partial(plain, shape, name),
        )
    moved = 2 * (m * (n + k) + experts * n * k)
    candidates = [
        Product(label, run, operands, moved, graph=False, operations=operations)
        for label, (run, operands) in make.items()
    ]
    return Problem(f"{m} rows, {experts} of {n} x {k}, {name}", candidates, reference=REFERENCE)


@benchmark("grouped_mm", "experts, forward and backward, in int8 and float8, to bf16", table=TABLE)
def grouped_mm() -> Iterator[Problem]:
    for shape in SHAPES:
        for name in ("forward and backward", *PRODUCTS):
            yield _problem(shape, name)
