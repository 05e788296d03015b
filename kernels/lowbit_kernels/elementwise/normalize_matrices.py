"""Matrices divided by their Frobenius norms.

    out[i] = x[i] / max(norm(x[i]), eps)

    x      float32, bfloat16 or float16 [count, rows, columns], contiguous
    out    [count, rows, columns] in `out_dtype`, contiguous; NaN everywhere if a matrix holds a NaN

Norms are computed in float32. Each is a sum over pieces of the matrix in a fixed order, so it does not depend on the
other matrices of the batch, as the sums of PyTorch do. Optimizers rely on this, since ranks hold different parts of a
batch.

The Triton kernels read a matrix twice and write it once. Without Triton, and on the CPU, PyTorch takes one matrix after
another; these norms differ in their last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton

PIECE = 8192  # elements
TOGETHER = 1024  # pieces that are summed at once
LARGEST = 2**31 - PIECE  # elements of a matrix that the kernels can count


@op(
    "torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)",
    x="float [count, rows, columns]",
    out_dtype="float",
)
def normalize_matrices(x: Tensor, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """The normalized matrices; the formula is in the module's docstring. `out_dtype`: by default that of `x`.

    Raises TypeError for other dtypes, ValueError for other shapes.
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    for i, matrix in enumerate(x):
        wide = matrix.float()
        out[i] = wide / torch.linalg.vector_norm(wide, dtype=torch.float64).float().clamp_min(eps)
    return out


reference = normalize_matrices.reference


@jit
def _squares(x, sums, numel, pieces, PIECE: tl.constexpr):
    """A program sums the squares of one piece: sums [count, pieces]."""
    program = tl.program_id(0)
    matrix = (program // pieces).to(tl.int64)
    at = program % pieces * PIECE + tl.arange(0, PIECE)
    values = tl.load(x + matrix * numel + at, mask=at < numel, other=0).to(tl.float32)
    tl.store(sums + program, tl.sum(values * values))


@jit
def _norms(sums, norms, pieces, eps, TOGETHER: tl.constexpr):
    """A program adds the sums of one matrix: norms [count], at least eps."""
    matrix = tl.program_id(0).to(tl.int64)
    total = tl.zeros((TOGETHER,), tl.float32)
    for start in tl.range(0, pieces, TOGETHER):
        at = start + tl.arange(0, TOGETHER)
        total += tl.load(sums + matrix * pieces + at, mask=at < pieces, other=0)
    norm = tl.sqrt_rn(tl.sum(total))
    tl.store(norms + matrix, tl.where(norm < eps, eps, norm))  # keeps NaN


@jit
def _divide(x, norms, out, numel, pieces, PIECE: tl.constexpr):
    matrix = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    inside = at < numel
    values = tl.load(x + matrix * numel + at, mask=inside, other=0).to(tl.float32)
    result = tl.div_rn(values, tl.load(norms + matrix))
    tl.store(out + matrix * numel + at, result.to(out.dtype.element_ty), mask=inside)


@normalize_matrices.kernel
def _launch(x: Tensor, eps: float, out_dtype: torch.dtype | None) -> Tensor | None:
    """The Triton kernels where they run, else the reference."""
    if not runs_on(x.device) or x.numel() == 0 or x.shape[1:].numel() >= LARGEST:
        return None
    ran("normalize_matrices", "triton")
    x, out_dtype = x.contiguous(), out_dtype or x.dtype
    count, numel = x.shape[0], x.shape[1] * x.shape[2]
    pieces = triton.cdiv(numel, PIECE)
    out = torch.empty(x.shape, dtype=stored_dtype(out_dtype, x.device), device=x.device)
    scratch = torch.empty(count * (pieces + 1), dtype=torch.float32, device=x.device)
    norms, sums = scratch.split((count, count * pieces))
    with torch.cuda.device_of(x):
        grid = (count * pieces,)
        _squares[grid](x, sums, numel, pieces, PIECE=PIECE, num_warps=8)
        _norms[(count,)](sums, norms, pieces, eps, TOGETHER=TOGETHER, num_warps=4)
        _divide[grid](x, norms, out, numel, pieces, PIECE=PIECE, num_warps=8)
    return out.to(out_dtype)
