"""A weight plus low-rank products, as LoRA adapters are merged into it, and the gradients of their factors.

    out[n, k] = w[n, k] + sum over i of scales[i] · sum over r of b[i][n, r] · a[i][r, k]
    grad_a    = scale · bᵀ · grad
    grad_b    = scale · grad · aᵀ

    w, grad    float32, bfloat16, float16 or float64 [N, K]
    a[i]       a floating dtype [R, K], each with its own R; grad_a as a
    b[i]       a floating dtype [N, R]; grad_b as b
    out        [N, K] in the dtype of w, contiguous

All is computed in float32, or in float64 where w is float64, and rounded once. Both ops are opaque to a compiler, so
that a compiled graph computes the same bits as eager code: merged weights are rounded to few bits afterwards, where one
bit may decide on which side of a boundary a value falls.

torch's products do the work, a chunk of rows at a time. So the wider copies of a bfloat16 weight take little memory.
Chunks depend on the shape alone. The products of a GPU follow torch's setting of TF32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.library import check_one_device
from lowbit_kernels.runtime.op import op

CHUNK = 2**22  # elements of w that are widened at once
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@op(
    "torch.empty(w.shape, dtype=w.dtype, device=w.device)",
    flops="2 * sum(down.numel() * len(up) for down, up in zip(a, b))",
    rules={"_check(w, a, b, scales)": ""},
)
def add_low_rank(
    w: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float]
) -> Tensor:
    """`w` plus the scaled products of the module's docstring, here computed in float64."""
    total = w.double()
    for down, up, scale in zip(a, b, scales, strict=True):
        total = total + scale * (up.double() @ down.double())
    return total.to(w.dtype)


reference = add_low_rank.reference


def _chunks(w: Tensor) -> Iterator[slice]:
    rows = max(CHUNK // max(w.shape[1], 1), 1)
    return (slice(start, start + rows) for start in range(0, w.shape[0], rows))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@add_low_rank.kernel
def _add(w: Tensor, a: list[Tensor], b: list[Tensor], scales: list[float]) -> Tensor:
    ran("add_low_rank", "torch")
    dtype = _wide(w.dtype)
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    with torch.autocast(w.device.type, enabled=False):
        downs, ups = [t.to(dtype) for t in a], [t.to(dtype) for t in b]
        for rows in _chunks(w):
            total = w[rows].to(dtype, copy=True)
            for down, up, scale in zip(downs, ups, scales, strict=True):
                total.addmm_(up[rows], down, alpha=scale)
            out[rows] = total
    return out


@op(
    "tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (a, b))",
    flops="4 * a.numel() * len(b)",
    rules={"_check(grad, [a], [b], [scale])": ""},
)
def low_rank_gradients(grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(grad_a, grad_b) of one product, in the dtypes of a and b; see the module's docstring."""
    wide = scale * grad.double()
    return (b.double().t() @ wide).to(a.dtype), (wide @ a.double().t()).to(b.dtype)


@low_rank_gradients.kernel
def _gradients(grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    ran("low_rank_gradients", "torch")
    dtype = _wide(grad.dtype)
    with torch.autocast(grad.device.type, enabled=False):
        down, up = a.to(dtype), b.to(dtype)
        grad_a = torch.zeros(a.shape, dtype=dtype, device=a.device)
        grad_b = torch.empty(b.shape, dtype=b.dtype, device=b.device)
        for rows in _chunks(grad):
            part = grad[rows].to(dtype)
            grad_a.addmm_(up[rows].t(), part, alpha=scale)
            grad_b[rows] = (part @ down.t()).mul_(scale)
    return grad_a.to(a.dtype, copy=False), grad_b


def _check(w: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float]) -> None:
    if not len(a) == len(b) == len(scales):
        raise ValueError(
            f"as many a, b and scales are needed, got {len(a)}, {len(b)} and {len(scales)}"
        )
    for name, t in (("w", w), *(("a", t) for t in a), *(("b", t) for t in b)):
        if t.dtype not in DTYPES:
            raise TypeError(
                f"add_low_rank takes {name} in {', '.join(map(str, DTYPES))}, got {t.dtype}"
            )
    for down, up in zip(a, b, strict=True):
        if not w.device == down.device == up.device:
            check_one_device(w=w, a=down, b=up)
        shapes = [tuple(t.shape) for t in (w, down, up)]
        fits = all(len(shape) == 2 for shape in shapes)
        if not fits or shapes != [
            (up.shape[0], down.shape[1]),
            (up.shape[1], w.shape[1]),
            shapes[2],
        ]:
            raise ValueError(
                f"add_low_rank takes w [N, K], a [R, K] and b [N, R], got {', '.join(map(str, shapes))}"
            )
