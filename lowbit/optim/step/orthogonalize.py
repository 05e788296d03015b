"""Newton-Schulz orthogonalization of batches of matrices: singular values move near 1, singular vectors stay.

    X = X / max(norm(X), eps), then `steps` times
    X = P X,  P = a I + b A + c A A,  A = X X^T                    (X^T X on the other side if X is tall)

**Batches.** On a GPU with Triton all matrices of a batch are multiplied together (`lowbit_kernels.matmul.batched_mm`),
and of the symmetric products only one half is computed. A result does not depend on the other matrices of its batch.

**Gram form.** All matrices of the iteration are polynomials of the first A, so they commute, and the iteration can run
on m x m matrices, m being the shorter side ("Gram Newton-Schulz", Zhang, Amsel, Chen and Dao, 2026)::

    R = X X^T, Q = I, then `steps` times      Z = b R + c R R,  so that P = a I + Z
                                              Q = P Q   = a Q + Z Q
                                              W = P R   = a R + Z R
                                              R = P R P = a W + Z W
    and at the end                            X = Q X

In exact numbers this is the ordinary form. In rounded numbers R drifts away from (Q X)(Q X)^T, and the smallest
eigenvalues of R become negative. So the iteration restarts after every third step: X = Q X, R = X X^T, Q = I. Five
steps take 2 Gram products and 2 products by X instead of 5 and 5, and 14 products of m x m instead of 5. This form is
taken where the longer side is at least 1.5 times the shorter one.

Every product but Q X is symmetric, and half of it is computed. Rounded factors do not commute exactly, so the half
that is left out differs from the other one by rounding. That costs nothing as long as a I stays out of the factors: Z
is small where singular values are small, and so is its error. Products of P, whose error is that of a, would raise the
error for singular values from 1 to 1e-5 to 0.03 or 0.11.

**Scaling** (Turbo-Muon, arXiv 2512.04632). `scaling="gram"` divides the rows (columns if X is tall) instead of the
whole matrix::

    X = diag(s) X,  s_i = max(sum_j |A_ij|, eps**2)^-1/2,  A = X X^T

No singular value is above 1 then, and most are far larger than after division by the norm: 4 iterations come as near as
5, except for wide matrices whose rows are alike. The polar factor is that of diag(s) X, which differs from X's where
rows are not orthogonal. Rows whose squares leave float32, from 1e18 on, give zeros or NaN.

**Formats.** The batched iteration stores matrices in float16 and sums in float32. No singular value of X is above 1, so
no value leaves the range of float16, which has three bits more than bfloat16. The A of the scaling is float32. Relative
errors against float64, for matrices of 512 x 2048 with Gaussian elements and with singular values from 1 to 1e-5: 0.002
and 0.006; those of the ordinary form in bfloat16: 0.012 and 0.069.
`stays_in_range` checks the coefficients. Where they let values grow, the ordinary form runs in the dtype of the input.
So it does without Triton and on the CPU, for one matrix after another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowbit.numerics.long_norm import long_norm
from lowbit_kernels.elementwise.scale_matrices import row_norms, scale_matrices
from lowbit_kernels.matmul.batched_mm import batched_mm
from lowbit_kernels.runtime.triton_runtime import runs_on

RESTART = 3
"""Steps of the Gram form between restarts."""


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    *,
    steps: int,
    eps: float,
    scaling: str = "norm",
) -> Tensor:
    """Matrices with singular values near 1, in the dtype of the given ones; see the module. The bits of one do not
    depend on the others.

    Args:
        matrices: [count, rows, cols].
        coefficients: a, b and c of the iteration.
        steps: iterations.
        eps: the least norm that a matrix is divided by.
        scaling: "norm", or "gram" for Turbo-Muon's.
    """
    is_half = matrices.dtype in (torch.float16, torch.bfloat16)
    batched = is_half and matrices.device.type == "cuda" and runs_on(matrices.device)
    if batched and matrices.numel() and stays_in_range(coefficients, steps):
        return by_batch(matrices, coefficients, steps=steps, eps=eps, scaling=scaling)
    results = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    for matrix, result in zip(matrices, results, strict=True):
        result.copy_(_one(matrix, coefficients, steps, eps, scaling))
    return results


def _one(
    x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, scaling: str
) -> Tensor:
    """The ordinary form for one matrix, in its dtype."""
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    if scaling == "gram":
        wide = x.float()
        x = (wide * _row_factors((wide @ wide.mT).unsqueeze(0), eps)[0].unsqueeze(-1)).to(x.dtype)
    else:
        # In float32 a CPU's sum of 2**24 squares is off by a thousandth, and so is X.
        is_here = x.device.type == "cpu"
        norm = long_norm(x).to(x.dtype) if is_here else torch.linalg.vector_norm(x)
        x = x / norm.clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def by_batch(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    *,
    steps: int,
    eps: float,
    scaling: str = "norm",
) -> Tensor:
    """`orthogonalize` by `batched_mm`, in float16; the result has the dtype of `matrices`, float16 or bfloat16.

    Args: those of `orthogonalize`.
    """
    shorter, longer = sorted(matrices.shape[1:])
    form = _gram_form if 2 * longer >= 3 * shorter and steps > 1 else _ordinary_form
    if scaling == "gram":
        gram = _gram(matrices, torch.float32)
        factors = _row_factors(gram, eps)
        gram = scale_matrices(gram, factors, factors, torch.float16)
        is_tall = matrices.shape[1] > shorter
        by_side = {"columns" if is_tall else "rows": factors}
        x = scale_matrices(matrices, **by_side, out_dtype=torch.float16)
    else:
        norms = row_norms(row_norms(matrices, 2).unsqueeze(1), 2)  # of the matrices [count, 1]
        inverse = norms.clamp_min_(eps).reciprocal_().expand(matrices.shape[:2])
        x = scale_matrices(matrices, inverse, out_dtype=torch.float16)
        gram = _gram(x)
    return form(x, gram, coefficients, steps, matrices.dtype)


def _row_factors(gram: Tensor, eps: float) -> Tensor:
    """s of the module for Gram matrices [count, m, m], float32 [count, m]."""
    # A bound that float32 rounds to 0 would make rows of zeros NaN.
    least = max(eps * eps, torch.finfo(torch.float32).tiny)
    return row_norms(gram, 1).clamp_min_(least).rsqrt_()


def _ordinary_form(
    x: Tensor,
    gram: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    dtype: torch.dtype,
) -> Tensor:
    a, b, c = coefficients
    for step in range(steps):
        gram = _gram(x) if step else gram
        p = _symmetric(gram, gram, addend=gram, alpha=c, beta=b, gamma=a)
        del gram  # as large as x
        x = _applied(p, x, dtype if step == steps - 1 else x.dtype)
    return x


def _gram_form(
    x: Tensor,
    gram: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    dtype: torch.dtype,
) -> Tensor:
    a, b, c = coefficients
    for i, (length, is_last) in enumerate(_segments(steps)):
        r, q = _gram(x) if i else gram, None
        for step in range(length):
            z = _symmetric(r, r, addend=r, alpha=c, beta=b)
            if step < length - 1:
                r = _symmetric(z, r, addend=r, beta=a)
                r = _symmetric(z, r, addend=r, beta=a)
            if q is None:
                z.diagonal(dim1=-2, dim2=-1).add_(a)
                q = z
            else:
                q = _symmetric(z, q, addend=q, beta=a)
        assert q is not None
        x = _applied(q, x, dtype if is_last else x.dtype)
    return x


def _segments(steps: int) -> Iterator[tuple[int, bool]]:
    """Numbers of steps between restarts, each with whether it is the last one."""
    for done in range(0, steps, RESTART):
        yield min(RESTART, steps - done), steps - done <= RESTART


def _symmetric(left: Tensor, right: Tensor, **addend: Any) -> Tensor:
    """The product of two symmetric matrices that commute but for rounding. The right one is read transposed, so that
    A A is symmetric to the last bit."""
    return batched_mm(left, right.mT, symmetric=True, **addend)


def _gram(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """X X^T, or X^T X if X is tall: the smaller one."""
    is_tall = x.shape[1] > x.shape[2]
    left, right = (x.mT, x) if is_tall else (x, x.mT)
    return batched_mm(left, right, symmetric=True, out_dtype=dtype)


def _applied(p: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """P X, or X P if X is tall, of a symmetric P."""
    is_tall = x.shape[1] > x.shape[2]
    left, right = (x, p.mT) if is_tall else (p, x)
    return batched_mm(left, right, out_dtype=dtype)


@functools.cache
def stays_in_range(coefficients: tuple[float, float, float], steps: int) -> bool:
    """True if float16 holds all matrices of the iteration. No step may raise a singular value from [0, 1] above 2, or
    an eigenvalue of P above 16. The eigenvalues of a product of `RESTART` matrices P are then at most 4096."""
    a, b, c = coefficients
    values = torch.linspace(0, 1, 1025, dtype=torch.float64, device="cpu")
    for _ in range(steps):
        factors = a + b * values**2 + c * values**4
        values = values * factors
        if not (factors.abs().max() <= 16 and values.abs().max() <= 2):
            return False
    return True
