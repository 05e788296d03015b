"""input_gradient: every format against the gradient that autograd finds in float64, and in chunks of columns."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.formats import FORMATS
from benchmarks.cases.input_gradient import CASES, Case
from lowbit_kernels.runtime.launches import counted
from lowbit_kernels.weight_only import weight_mm_dequantized
from lowbit_kernels.weight_only.codes_format import dequantized
from lowbit_kernels.weight_only.input_gradient import columns_of_chunk, in_chunks, input_gradient

SMALL = [case for case in CASES if not case.large]
OP = torch.ops.lowbit.input_gradient


def by_autograd(grad, codes, scale, zero_point, group_size, size, *last) -> torch.Tensor:
    """The gradient of x in x · weightᵀ, float64."""
    parts = (codes, scale, zero_point, group_size, size, torch.float64)
    x = grad.new_zeros((*grad.shape[:-1], size), dtype=torch.float64, requires_grad=True)
    y = x @ dequantized(*parts, *last).T
    return torch.autograd.grad(y, x, grad.double())[0]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    assert out.shape == exact.shape and out.is_contiguous()
    return float((out.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def limit(case: Case) -> float:
    """The weight and the result are rounded once each."""
    return {torch.float32: 1e-6, torch.float16: 6e-4}.get(case.dtype, 4e-3)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_the_formula_is_the_gradient(case: Case) -> None:
    arguments = case.arguments()
    assert relative_error(OP(*arguments), by_autograd(*arguments)) <= limit(case)


@pytest.mark.parametrize("most", [1, 2**30], ids=["chunks", "whole"])
@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_chunks_of_columns(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products of GPUs, on the CPU: of few columns each, or of all at once."""
    monkeypatch.setattr(weight_mm_dequantized, "MOST_BYTES", most)
    monkeypatch.setattr("lowbit_kernels.weight_only.input_gradient.COLUMNS_OF_A_TILE", 8)
    arguments = case.arguments()
    assert relative_error(in_chunks(*arguments), by_autograd(*arguments)) <= limit(case)


@pytest.mark.parametrize("step", [8, 64, 200])
@pytest.mark.parametrize("k", [1, 4096, 53_248])
@pytest.mark.parametrize("n", [0, 1, 4096, 14_336, 128_256])
def test_chunks_fit_the_memory(n: int, k: int, step: int) -> None:
    columns = columns_of_chunk(n, k, 2, step)
    most = weight_mm_dequantized.MOST_BYTES
    assert columns == k or (columns % step == 0 and columns % 256 == 0 and columns < k)
    assert n * columns * 2 <= max(most, n * 2 * 256 * 25)


@pytest.mark.parametrize("case", SMALL[::7], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments(), test_utils=("test_faketensor",))


def test_nan_passes() -> None:
    grad, codes, scale, *rest = Case("", FORMATS[3], 2, 8, 64, 32).arguments()
    scale[3, 1] = torch.nan
    out = OP(grad, codes, scale, *rest)
    assert out[:, 32:].isnan().all() and out[:, :32].isfinite().all()


def test_wrong_arguments() -> None:
    codes, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1)
    input_gradient(torch.ones(2, 4), codes, scale, group_size=32, size=32)
    for grad, size, message in ((torch.ones(2, 5), 32, "N"), (torch.ones(2, 4), 33, "got 33")):
        with pytest.raises(ValueError, match=message):
            input_gradient(grad, codes, scale, group_size=32, size=size)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    with counted() as calls:
        out = OP(*arguments)
    assert calls == {("input_gradient", "dequantize"): 1}
    assert relative_error(out, by_autograd(*arguments)) <= limit(case)


@pytest.mark.gpu
def test_cuda_takes_memory_for_one_chunk() -> None:
    grad, *rest = Case("", FORMATS[3], 16, 28_672, 8192, 128).arguments("cuda")
    OP(grad, *rest)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OP(grad, *rest)
    most = weight_mm_dequantized.MOST_BYTES + 2**21
    assert torch.cuda.max_memory_allocated() - before <= most
