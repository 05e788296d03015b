"""The loop of `GPTQ` over the columns of a weight: the factor that it reads, the values that scales allow, pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.inference.calibration.inputs import product
from lowbit.numerics.lookup_table import LookupTable
from lowbit.numerics.number_format import Int, NumberFormat
from lowbit.numerics.spec import Spec

OF_FOUR = 4
"""Neighbouring columns of which pruning keeps two."""
COLUMNS = 128
"""Columns that one call of the kernel rounds. Their errors reach the rest of the weight by one product."""
MOST_DAMPING = 1.0
"""Damping grows tenfold, up to this, until the Hessian can be factored."""


class Factor:
    """U of a Hessian [K, K], in the order in which columns are rounded.

    Beside H it takes three matrices of its size in float64 while it is made.

    Attributes:
        order: int64 [K], the columns in this order.
        upper: float32 [K, K], U in this order.
        damping: the share of the mean that was added to the diagonal.

    `together`: how many neighbouring columns stay together. The order is then that of the sums of their H_jj.
    """

    def __init__(self, hessian: Tensor, damping: float, act_order: bool, together: int = 1) -> None:
        diagonal = hessian.diagonal().double()
        live = diagonal > 0
        mean = float(diagonal[live].mean()) if bool(live.any()) else 1.0
        self.order = torch.arange(len(diagonal), device=hessian.device)
        if act_order:
            sums = diagonal.view(-1, together).sum(1)
            first = sums.argsort(descending=True, stable=True) * together
            self.order = (first[:, None] + self.order[:together]).flatten()
        last = self.order.flip(0)
        diagonal = torch.where(live, diagonal, mean)[last]
        h = hessian[last][:, last].double()
        while True:
            h.diagonal().copy_(diagonal + damping * mean)
            lower, info = torch.linalg.cholesky_ex(h)
            if not int(info) or damping >= MOST_DAMPING:
                break
            damping = max(damping * 10, 1e-6)
        # H, last column first, is L Lᵀ. In the order of columns L is R, upper triangular, and U is its inverse.
        eye = h.zero_().fill_diagonal_(1.0)
        inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
        del lower, eye, h
        self.upper = inverse.float().flip(0, 1)
        self.damping = damping

    @property
    def cost(self) -> Tensor:
        """float32 [K], what a squared error of each column costs: 1 / U_jj²."""
        found = torch.empty_like(self.upper[0])
        found[self.order] = self.upper.diagonal().square().reciprocal()
        return found

    def damped(self, hessian: Tensor) -> Tensor:
        """The Hessian with what was added to its diagonal, float32 [K, K]."""
        diagonal = hessian.diagonal()
        live = diagonal > 0
        mean = diagonal[live].mean() if bool(live.any()) else diagonal.new_ones(())
        return hessian + torch.diag(self.damping * mean + mean * ~live)

    def solved(self, b: Tensor) -> Tensor:
        """b H⁻¹ of b [N, K]."""
        found = torch.empty_like(b)
        halfway = product(b[:, self.order], self.upper.T)
        found[:, self.order] = product(halfway, self.upper)
        return found


class ColumnGrid:
    """The values that the scales of a matrix allow, as `round_columns` takes them.

    Args:
        spec: how the weight is quantized.
        scale, zero: [N, blocks along K].
    """

    def __init__(self, spec: Spec, scale: Tensor, zero: Tensor | None) -> None:
        self.scale = scale.float().T.contiguous()
        low, high = spec.format.quant_min, spec.format.quant_max
        self.offset: Tensor | None = None
        codes = torch.zeros_like(self.scale)
        if zero is not None and spec.zero_point_is_value:
            self.offset = zero.float().T.contiguous()
            codes += (low + high + 1) // 2
        elif zero is not None:
            codes = zero.float().T.contiguous()
        self.least, self.most = low - codes, high - codes
        self.levels = torch.tensor(levels_of(spec.format), dtype=torch.float32, device=scale.device)


def levels_of(fmt: NumberFormat) -> list[float]:
    """The values of a format that is not an integer, ascending; [] for integers."""
    if isinstance(fmt, Int):
        return []
    if isinstance(fmt, LookupTable):
        return sorted({value + 0.0 for value in fmt.values})
    values = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    return sorted({value + 0.0 for value in values[values.isfinite()].tolist()})


def by_columns(
    w: Tensor, factor: Factor, grid: ColumnGrid, group: int, mask: Tensor | None = None
) -> Tensor:
    """The rounded weight [N, K], as the module describes it.

    Args:
        w: float32 [N, K].
        factor: of the Hessian, and the order of the columns.
        grid: the scales of each group, and their codes.
        group: columns that share a scale.
        mask: bool [N, K], False where the result is 0; None: nowhere.
    """
    order, upper = factor.order, factor.upper
    left = w.T[order].contiguous()  # [K, N], so that a column is contiguous
    found, groups = torch.empty_like(left), order // group
    kept = None if mask is None else mask.T[order].contiguous()
    for start in range(0, len(left), COLUMNS):
        own = slice(start, start + COLUMNS)
        found[own], errors = torch.ops.lowbit.round_columns(
            *(left[own], upper[own, own].contiguous(), groups[own], grid.scale),
            *(grid.least, grid.most, grid.offset, grid.levels),
            None if kept is None else kept[own],
        )
        left[own.stop :].addmm_(upper[own, own.stop :].T, errors, alpha=-1)
    result = torch.empty_like(w)
    result.T[order] = found
    return result


def pruned_by_columns(
    w: Tensor, factor: Factor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The weight [N, K] with 0 where the mask is False, after later columns made up for it, and the mask [N, K].

    None chooses the mask, as SparseGPT does: when the loop comes to four neighbours, it keeps the two of them with the
    largest w_j² / U_jj² as they are by then. The order of `factor` then has the four together.
    """
    order, upper, diagonal = factor.order, factor.upper, factor.upper.diagonal()
    left = w.T[order].contiguous()
    kept = torch.empty_like(left, dtype=torch.bool) if mask is None else mask.T[order].contiguous()
    for start in range(0, len(left), COLUMNS):
        stop = min(start + COLUMNS, len(left))
        errors = torch.empty_like(left[start:stop])
        for first in range(start, stop, OF_FOUR):
            end = first + OF_FOUR
            if mask is None:
                kept[first:end] = two_of_four(
                    (left[first:end] / diagonal[first:end, None]).square()
                )
            for j in range(first, end):
                e = torch.div(left[j].masked_fill(kept[j], 0), diagonal[j], out=errors[j - start])
                left[j].masked_fill_(~kept[j], 0)
                left[j + 1 : end].addr_(upper[j, j + 1 : end], e, alpha=-1)
            own = errors[first - start : end - start]
            left[end:stop].addmm_(upper[first:end, end:stop].T, own, alpha=-1)
        left[stop:].addmm_(upper[start:stop, stop:].T, errors, alpha=-1)
    values, found = torch.empty_like(w), torch.empty_like(w, dtype=torch.bool)
    values.T[order], found.T[order] = left, kept
    return values, found


def two_of_four(scores: Tensor) -> Tensor:
    """bool [4 G, N]: True for the two largest of each four rows; of equal ones the first."""
    fours = scores.unflatten(0, (-1, OF_FOUR))
    best = fours.argsort(dim=1, descending=True, stable=True)[:, :2]
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, best, True).flatten(0, 1)
