"""The product of frozen experts and low-rank adapters of theirs, neither of which is added to the other.

    t[m] = x[m] · A[e]            y[m] = x[m] · ŵ[e] + s · t[m] · B[e]            for the rows m of expert e
    gt[m] = s · g[m] · B[e]ᵀ      dx[m] = g[m] · ŵ[e]ᵀ + gt[m] · A[e]ᵀ
    dA[e] = xᵀ · gt               dB[e] = s · tᵀ · g                              sums over the rows of e

    x [M, K], sorted by expert; ŵ [E, K, N]; A [E, K, R]; B [E, R, N]; y [M, N]

The sum ŵ + s · A · B of a stack would be as large as all experts in 16 bits. It is made nowhere, and neither is its
gradient. Adapters take R / N of the product's operations, and a pass over x, y and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.checks import check_first_derivative, in_rows
from lowbit.linear.operands import Kept, RoundedLinear

MULTIPLE = 8
"""torch's grouped products take rows that begin at multiples of it, in 16 bits."""
_Own = torch._C.DisableTorchFunctionSubclass
_dispatch_modes = torch._C._len_torch_dispatch_stack


def adapted_product(
    x: Tensor, weight: Any, a: Tensor, b: Tensor, scale: float, offsets: Tensor
) -> Tensor:
    """[M, N]; the module has the formula. Differentiable in x, a and b.

    Args:
        x: [M, K].
        weight: a frozen stack [E, K, N] in x's dtype, K and N multiples of 8.
        a, b: [E, K, R] and [E, R, N] in x's dtype.
        scale: s.
        offsets: int32 [E], the ends of the experts' rows. Rows after the last are as `torch._grouped_mm` has them.

    The backward pass raises NotImplementedError for second derivatives.
    """
    missing = -a.shape[2] % MULTIPLE
    if missing:
        a, b = F.pad(a, (0, missing)), F.pad(b, (0, 0, 0, missing))
    return RoundedLinear.apply(x, weight, None, AdaptedOperands(scale), offsets, a, b)


class AdaptedOperands(NamedTuple):
    """The operands of `adapted_product`, for `RoundedLinear`."""

    scale: float

    def output(
        self,
        x: Tensor,
        weight: Any,
        bias: None,
        needs: Sequence[bool],
        offsets: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> tuple[Tensor, Kept]:
        t = torch._grouped_mm(x, _readable(a), offs=offsets)
        y = torch._grouped_mm(x, weight, offs=offsets)
        y = _add(y, t, b, self.scale, offsets)
        learns = needs[5] or needs[6]
        return y, (offsets, weight.detach(), a, b, *((x, t) if learns else (None, None)))

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        offsets, weight, a, b, x, t = kept
        check_first_derivative(weight)
        grad = in_rows(grad)
        dx = da = db = None
        if needs[0] or needs[5]:
            of_t = torch._grouped_mm(grad, _readable(b.mT), offs=offsets).mul_(self.scale)
        if needs[0]:
            with _Own():  # faster
                turned = weight._transposed()
            dx = torch._grouped_mm(grad, turned, offs=offsets)
            dx = _add(dx, of_t, a.mT, 1.0, offsets)
        if needs[5]:
            da = torch._grouped_mm(x.t(), of_t, offs=offsets)
        if needs[6]:
            db = torch._grouped_mm(t.t(), grad, offs=offsets).mul_(self.scale)
        return dx, None, None, da, db


def _readable(factor: Tensor) -> Tensor:
    """A factor whose rows or columns lie beside each other and begin at multiples of 16 bytes, as torch's grouped
    products read them. The rank is the last dimension of a copy."""
    strides = factor.stride()
    only_one = 1 in strides[1:] and sum(s % MULTIPLE for s in strides) == 1
    if only_one and factor.storage_offset() % MULTIPLE == 0:
        return factor
    return factor.clone(memory_format=torch.contiguous_format)


def _add(y: Tensor, t: Tensor, b: Tensor, scale: float, offsets: Tensor) -> Tensor:
    """y + scale · t · B, in the memory of y unless a mode may keep y, as selective checkpointing does."""
    if _dispatch_modes():
        return y.add(torch._grouped_mm(t, _readable(b), offs=offsets), alpha=scale)
    from lowbit_kernels.matmul.add_grouped_mm import add_grouped_mm_  # imports Triton

    return add_grouped_mm_(y, t, b, offsets, scale)
