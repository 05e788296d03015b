"""Fake quantization and its gradients: the kernel, the formula under torch.compile, and lowbit's operations in eager.

The floor of the forward pass: x read once, with a global scale (NVFP4) twice, values written once, and the bits of
`inside` where the spec may clip.
The floor of the gradients of learned scales: the gradient and x read once, the gradient of x written once, and a number
a block for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases.fake_quantize import CASES, Case
from benchmarks.registry import Candidate, Problem, benchmark
from lowbit.numerics.learned_scales import codes_and_residual, gradients, rate_of
from lowbit_kernels.elementwise.fake_quantize import unpack_inside
from lowbit_kernels.elementwise.grid import E4M3, FLOAT


def forward_bytes(case: Case) -> int:
    """The floor of the forward pass, in bytes."""
    elements = case.rows * case.columns
    bits = elements // 8 if case.spec.may_clip(case.scale_dtype) else 0
    passes = 3 if case.grid.scales == E4M3 else 2
    return passes * elements * case.dtype.itemsize + bits


def gradient_bytes(case: Case) -> int:
    """The floor of the gradients, in bytes."""
    elements = case.rows * case.columns
    blocks = elements // case.group_size
    return 3 * elements * case.dtype.itemsize + blocks * (case.scale_dtype.itemsize + 8)


def by_kernel(case: Case, x: Tensor) -> tuple[Tensor, Tensor | None]:
    clips = case.spec.may_clip(case.scale_dtype)
    dtypes = (case.scale_dtype, case.dtype)
    found = torch.ops.lowbit.fake_quantize(
        *(x, None, None, case.group_size, case.grid.name, *dtypes, clips),
        *(None, case.global_scale(x)),
    )
    return found[0], found[1] if clips else None


def by_operations(case: Case, x: Tensor) -> tuple[Tensor, Tensor | None]:
    clips = case.spec.may_clip(case.scale_dtype)
    return case.spec.rounded(x, case.scale_dtype, clips)


def with_parameters(case: Case) -> tuple[Any, ...]:
    x = case.x("cuda")
    scale, zero_point = case.spec.choose_qparams(x, case.scale_dtype)
    return torch.randn_like(x), x, scale, zero_point


def gradients_by_kernel(
    case: Case, grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor]:
    found = torch.ops.lowbit.fake_quantize_gradients(
        grad, x, scale, zero_point, case.group_size, case.grid.name
    )
    return found[0], found[1]


def gradients_by_operations(
    case: Case, grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor]:
    codes, residual = codes_and_residual(x, case.spec, scale, zero_point)
    found = gradients(grad, codes, residual, case.spec, scale.float(), None)
    return found[0], found[1] / rate_of(case.spec)


def check(case: Case, runs: dict[str, Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    """Raise where a result differs from that of the operations."""
    *_, operations = runs.values()
    values, second = operations(*arguments)
    for name, run in runs.items():
        found, other = run(*arguments)
        torch.testing.assert_close(found, values, rtol=0, atol=0, msg=f"{name} is wrong")
        if other is not None and other.dtype is torch.uint8:
            other = unpack_inside(other, case.group_size, case.columns)
        if second is None:
            continue
        scaled = 1e-3 * float(second.float().abs().max())
        torch.testing.assert_close(other, second, rtol=1e-3, atol=scaled, msg=f"{name} is wrong")


@benchmark("fake_quantize", "fake quantization of weights and activations, and its gradients")
def fake_quantize() -> Iterator[Problem]:
    for case in CASES:
        if not case.large:
            continue
        kinds: list[tuple[str, Callable, Callable, Callable, int]] = [
            ("forward", by_kernel, by_operations, lambda c: (c.x("cuda"),), forward_bytes(case)),
        ]
        learns = case.spec.mapping.startswith("symmetric") and case.grid.scales == FLOAT
        if learns and case.columns > case.group_size:
            of_scales = (gradients_by_kernel, gradients_by_operations, with_parameters)
            kinds.append(("gradients", *of_scales, gradient_bytes(case)))
        for direction, kernel, operations, make, moved in kinds:
            torch.compiler.reset()  # one compilation a shape, however many shapes there are
            own = partial(operations, case)
            runs: dict[str, Callable[..., Any]] = {
                "lowbit": partial(kernel, case),
                "torch.compile": torch.compile(own, fullgraph=True, dynamic=False),
                "operations in eager": own,
            }
            check(case, runs, make(case))
            name = f"{case.name} {case.rows} x {case.columns}, {direction}"
            arguments = partial(make, case)
            yield Problem(name, [Candidate(n, r, arguments, moved) for n, r in runs.items()])
