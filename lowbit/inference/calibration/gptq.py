"""GPTQ: round one column after another, and let the columns that follow make up for the error.

For a weight W [N, K] and the Hessian H = Σ x xᵀ of its inputs (arXiv 2210.17323, with the factor of the inverse that
llm-compressor and GPTQModel use too):

    H ← H + damping · mean(diag H) · I,      H⁻¹ = Uᵀ U with U upper triangular
    for each column j:   q_j = round(w_j),   e = (w_j − q_j) / U_jj,   w_k ← w_k − e · U_jk for all k > j

- Order: columns by falling H_jj, so that those that matter most are rounded while most others can still make up for
  them. Scales belong to the groups as they are stored ("static groups"), and are those of the original weight. So the
  result is an ordinary quantized weight.
- Scales: those that an earlier step left, else a search in which column j counts by 1 / U_jj², which is what a squared
  error of that column costs once all later columns have made up for it.
- Asymmetric: the inputs x̂ of the rounded model differ from x. Σ ‖Q x̂ − W x‖² has its minimum without rounding at
  W* = W + W C H⁻¹, C = Σ (x − x̂) x̂ᵀ, and W* takes the place of W. This is the objective of GPTAQ (arXiv 2504.02692),
  which corrects column by column; the closed form does it at once.
- Several matrices: the factor of one is in memory at a time. That of each is made twice, as scales may belong to all.
- Pruned weights (`Prune24`): GPTQ starts from the weight before pruning. The columns make up for what is pruned, as in
  SparseGPT (arXiv 2301.00774); scales are chosen for the result, which is then rounded with 0 for what is pruned.
  Both are linear in the errors that are passed on, so this equals pruning and rounding in one loop.
- Sweeps: after the last column each block, all others fixed, takes the scale and the codes with the least error of the
  outputs (`lowbit.inference.calibration.sweeps`). No sweep raises it.
- At the end searched scales grow until the outputs of each row are as large as before, with the codes kept
  (`Layer.grow`).
- A column whose input is always zero is rounded to nearest, and makes up for nothing.
- Without inputs, H = WᵀW / mean(diag WᵀW) + I (`Moments.of_weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lowbit.inference.calibration.columns import (
    OF_FOUR,
    ColumnGrid,
    Factor,
    by_columns,
    pruned_by_columns,
)
from lowbit.inference.calibration.search import Search, searched
from lowbit.inference.calibration.step import Layer, Step, by_rows, check_share, of_parts
from lowbit.inference.calibration.sweeps import Swept, sweep
from lowbit.numerics.settings import check_flag, check_whole


@dataclass(frozen=True)
class GPTQ(Step):
    """Round column by column, with the error passed on to later columns.

    Args:
        damping: what is added to the diagonal of the Hessian, as a share of its mean.
        act_order: round columns by falling H_jj. False: in their order.
        asymmetric: the share, 0 to 1, of the correction towards the outputs of the model in high precision for its own
            inputs. 0 aims at W x̂, and needs no second stream of activations.
        scales: "searched" or "minmax", where no earlier step chose them.
        sweeps: how often the scale and the codes of each block are chosen again. Two take about as long again on a CPU.

    Raises ValueError for other values, and TypeError for an `act_order` that is not a bool.
    """

    damping: float = 0.01
    act_order: bool = True
    asymmetric: float = 1.0
    scales: Literal["searched", "minmax"] = "searched"
    sweeps: int = 0
    needs: ClassVar[Literal["diagonal", "full"]] = "full"

    def __post_init__(self) -> None:
        check_share("damping", self.damping)
        check_share("asymmetric", self.asymmetric, 1.0)
        if self.scales not in ("searched", "minmax"):
            raise ValueError(f"scales must be 'searched' or 'minmax', got {self.scales!r}")
        check_flag("act_order", self.act_order)
        object.__setattr__(self, "sweeps", check_whole("sweeps", self.sweeps, least=0))

    @property
    def pairs(self) -> bool:  # type: ignore[override]
        return self.asymmetric > 0

    def apply(self, layer: Layer) -> None:
        given, original, mask, factor = layer.weight, layer.original, layer.mask, None
        is_searched = layer.qparams is None and self.scales == "searched"
        if is_searched and mask is None and not layer.moments.total:
            Search().apply(layer)  # no product shows inputs
            return
        is_moved = self.asymmetric > 0 or mask is not None
        costs: list[Tensor] = []
        aims = original
        if is_moved:
            layer.weight = original.clone()
        for part in layer.parts() if is_searched or is_moved else ():
            factor = None  # one at a time
            is_corrected = self.asymmetric > 0 and part.cross is not None
            if part.hessian is not None and (is_searched or is_corrected or mask is not None):
                factor = self._factor(layer, part.hessian)
            w = layer.weight[part.at]
            if factor is not None and part.cross is not None and is_corrected:
                w += self.asymmetric * factor.solved(part.cross)
            if mask is not None:
                if self.sweeps:
                    aims = original.clone() if aims is original else aims
                    aims[part.at] = w
                own = mask[part.at]
                w.copy_(
                    w.where(own, 0.0) if factor is None else pruned_by_columns(w, factor, own)[0]
                )
            alike = original.new_ones(original.shape[-1])
            costs.append(alike if factor is None else factor.cost)
        if layer.qparams is None:
            layer.qparams = layer.minmax()
            if is_searched:
                layer.qparams = searched(layer, of_parts(layer, costs))
        if len(costs) > 1:
            factor = None
        layer.values = self._rounded(layer, layer.weight if mask is None else aims, factor)
        layer.weight = given
        if is_searched:
            layer.grow()

    def _factor(self, layer: Layer, hessian: Tensor) -> Factor:
        how = self.damping, self.act_order, 1 if layer.mask is None else OF_FOUR
        made = layer.moments.shared
        if made is None:
            return Factor(hessian, *how)
        if how not in made:
            made[how] = Factor(hessian, *how)
        found: Factor = made[how]
        return found

    def _rounded(self, layer: Layer, aims: Tensor, factor: Factor | None) -> Tensor:
        """`aims`: the weight whose outputs the result is to have; `factor`: of the only matrix, if it was made."""
        assert layer.qparams is not None
        values, shape = layer.rounded(layer.qparams), tuple(layer.weight.shape)
        scale, zero = (None if t is None else by_rows(t, layer.spec, shape) for t in layer.qparams)
        assert scale is not None
        if self.sweeps:
            scale, zero = scale.clone(), None if zero is None else zero.clone()
        group = layer.spec.block_size(shape)[-1]
        for at, hessian, *_ in layer.parts():
            if hessian is None:
                continue
            factor = factor or self._factor(layer, hessian)
            own, own_zero = scale[at], None if zero is None else zero[at]
            mask = None if layer.mask is None else layer.mask[at]
            grid = ColumnGrid(layer.spec, own, own_zero)
            values[at] = by_columns(layer.weight[at], factor, grid, group, mask)
            if self.sweeps:
                joint = (
                    layer.joint if layer.joint is None or layer.joint.ndim < 3 else layer.joint[at]
                )
                found = Swept(values[at], own, own_zero)
                sweep(layer.spec, aims[at], factor.damped(hessian), found, self.sweeps, mask, joint)
            factor = None
        if tuple(scale.shape) == tuple(layer.qparams[0].shape):
            layer.qparams = scale, zero
        return values
