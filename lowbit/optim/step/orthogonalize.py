"""Newton-Schulz orthogonalization of batches of matrices: singular values move near 1, singular vectors stay.

    X = X / max(norm(X), eps), then `steps` times
    X = P X,  P = a I + b A + c A A,  A = X X^T                    (X^T X on the other side if X is tall)

**Batches.** On a GPU with Triton all matrices of a batch are multiplied together (`lowbit_kernels.matmul.batched_mm`),
and of the symmetric products only one half is computed. A result does not depend on the other matrices of its batch.

**Gram form.** All matrices of the iteration are polynomials of the first A, so they commute, and the iteration can run
on m x m matrices, m being the shorter side ("Gram Newton-Schulz", Zhang, Amsel, Chen and Dao, 2026)::

    R = X X^T, Q = I, then `steps` times      P = a I + b R + c R R
                                              Q = P Q
                                              R = P R P
    and at the end                            X = Q X

In exact numbers this is the ordinary form. In rounded numbers R drifts away from (Q X)(Q X)^T, and the smallest
eigenvalues of R become negative. So the iteration restarts after two steps, and then after every third: X = Q X,
R = X X^T, Q = I. Five steps take 2 Gram products and 2 products by X instead of 5 and 5, and 14 products of m x m
instead of 5. This form is taken where the longer side is at least 1.5 times the shorter one.

P is rounded, so P and R do not commute exactly, nor do P and Q. R P and P Q are therefore computed in full, and only
the results that are symmetric for every P (X X^T, P and P R P) by half. If R P and P Q were computed by half as well,
or were read transposed, the error for singular values from 1 to 1e-5 would be 0.03 to 0.11.

**Scaling** (Turbo-Muon, arXiv 2512.04632). `scaling="gram"` divides the rows (columns if X is tall) after the first
Gram matrix, and that matrix with them::

    s_i = (sum_j |A_ij|)^-1/2,  X = diag(s) X,  A = diag(s) A diag(s)

No singular value is above 1 then, and most are far larger than after division by the norm: 4 iterations come as near as
5. The polar factor is that of diag(s) X, which differs from X's where rows are not orthogonal. Sums below 1e-6 count as
1e-6: float16 loses the squares of such rows.

**Formats.** The batched iteration stores matrices in float16 and sums in float32. X has the norm 1, so no value leaves
the range of float16, which has three bits more than bfloat16. Relative errors against float64, for matrices of
512 x 2048 with Gaussian elements and with singular values from 1 to 1e-5: 0.002 and 0.017; those of the ordinary form
in bfloat16: 0.012 and 0.068.
`stays_in_range` checks the coefficients. Where they let values grow, the ordinary form runs in the dtype of the input.
So it does without Triton and on the CPU, for one matrix after another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.numerics.long_norm import long_norm
from lowbit_kernels.elementwise.normalize_matrices import normalize_matrices
from lowbit_kernels.matmul.batched_mm import batched_mm
from lowbit_kernels.runtime.triton_runtime import runs_on

FIRST_RESTART, RESTART = 2, 3
"""Steps of the Gram form before the first restart, and between restarts."""


def orthogonalize(
    matrices: Tensor,
    coefficients: tuple[float, float, float],
    *,
    steps: int,
    eps: float,
    scaling: str = "norm",
) -> Tensor:
    """`matrices` [count, rows, cols] with their singular values near 1, in their dtype; see the module.

    Bits of a result do not depend on the other matrices.
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
    # In float32 a CPU's sum of 2**24 squares is off by a thousandth, and so is X.
    is_here = x.device.type == "cpu"
    norm = long_norm(x).to(x.dtype) if is_here else torch.linalg.vector_norm(x)
    x = x / norm.clamp_min(eps)
    for step in range(steps):
        gram = x @ x.mT
        if step == 0 and scaling == "gram":
            x, gram = _scaled(x, gram)
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
    """`orthogonalize` by `batched_mm`, in float16; the result has the dtype of `matrices`, float16 or bfloat16."""
    x = normalize_matrices(matrices, eps, torch.float16)
    shorter, longer = sorted(matrices.shape[1:])
    form = _gram_form if 2 * longer >= 3 * shorter and steps > 1 else _ordinary_form
    gram = _gram(x)
    if scaling == "gram":
        x, gram = _scaled(x, gram)
    return form(x, gram, coefficients, steps, matrices.dtype)


def _scaled(x: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """X and its Gram matrix, scaled in place along the shorter side of X, by the formula of the module."""
    factors = norms_of_rows(gram, 1).clamp_min_(1e-6).rsqrt_()
    rows, columns = factors.unsqueeze(-1), factors.unsqueeze(-2)
    is_tall = x.shape[-2] > x.shape[-1]
    return x.mul_(columns if is_tall else rows), gram.mul_(rows).mul_(columns)


def norms_of_rows(matrices: Tensor, order: int) -> Tensor:
    """The norms of the rows of matrices [count, rows, cols] or [rows, cols], float32 [count, rows] or [rows].

    A reduction takes one matrix, because the bits of PyTorch's sums depend on the number of sums."""
    if matrices.ndim == 2:
        return torch.linalg.vector_norm(matrices, order, -1, dtype=torch.float32)
    if not len(matrices):
        return matrices.new_empty(matrices.shape[:2], dtype=torch.float32)
    return torch.stack([norms_of_rows(matrix, order) for matrix in matrices])


def _ordinary_form(
    x: Tensor,
    gram: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    dtype: torch.dtype,
) -> Tensor:
    for step in range(steps):
        p = _polynomial(_gram(x) if step else gram, coefficients)
        x = _applied(p, x, dtype if step == steps - 1 else x.dtype)
    return x


def _gram_form(
    x: Tensor,
    gram: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    dtype: torch.dtype,
) -> Tensor:
    for i, (length, is_last) in enumerate(_segments(steps)):
        r, q = _gram(x) if i else gram, None
        for step in range(length):
            p = _polynomial(r, coefficients)
            q = p if q is None else batched_mm(p, q)
            if step < length - 1:
                r = batched_mm(p, batched_mm(r, p.mT), symmetric=True)
        assert q is not None
        x = _applied(q, x, dtype if is_last else x.dtype)
    return x


def _segments(steps: int) -> Iterator[tuple[int, bool]]:
    """Numbers of steps between restarts, each with whether it is the last one."""
    length = FIRST_RESTART
    while steps > 0:
        yield min(length, steps), steps <= length
        steps, length = steps - length, RESTART


def _polynomial(gram: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    """a I + b A + c A A of symmetric matrices A. As A A^T the product is symmetric to the last bit."""
    a, b, c = coefficients
    return batched_mm(gram, gram.mT, symmetric=True, addend=gram, alpha=c, beta=b, gamma=a)


def _gram(x: Tensor) -> Tensor:
    """X X^T, or X^T X if X is tall: the smaller one."""
    is_tall = x.shape[1] > x.shape[2]
    return batched_mm(x.mT, x, symmetric=True) if is_tall else batched_mm(x, x.mT, symmetric=True)


def _applied(p: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """P X, or X P^T if X is tall."""
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
