"""Search: scales and zero points with the least error of the layer's output, if its inputs are uncorrelated.

The search is that of `lowbit.quantize_(…, scales="searched")`, where each input channel counts by its mean square, the
diagonal of the Hessian. Weights are rounded to nearest, and then scales grow until outputs are as large as before
(`lowbit.numerics.gain`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowbit.inference.calibration.step import Layer, QParams, Step
from lowbit.numerics.gain import can_grow, of_full_gain
from lowbit.numerics.unseen_inputs import search_qparams


@dataclass(frozen=True)
class Search(Step):
    """Scales and zero points that a search over the weights finds, weighted by the inputs."""

    def apply(self, layer: Layer) -> None:
        layer.qparams = searched(layer)
        if layer.mask is None and can_grow(layer.spec, layer.joint):
            found = of_full_gain(
                *(layer.spec, layer.weight, layer.qparams, layer.importance(), layer.joint)
            )
            layer.values, layer.qparams, layer.joint = found


def searched(layer: Layer, importance: Tensor | None = None) -> QParams:
    """The scales with the least Σ h (w − ŵ)². Scales that siblings share stay as they are.

    `importance`: h, broadcastable to the weight; None: the diagonal of the Hessian. Where no input reached the layer,
    the scales are those of `AffineTensor.searched`.
    """
    if layer.joint is not None and layer.spec.scales is None:
        return layer.joint, None
    h = layer.importance() if importance is None else importance
    if h is None:
        return search_qparams(layer.spec, layer.weight, layer.scale_dtype, layer.joint)
    return layer.spec.search_qparams(layer.weight, layer.scale_dtype, h, layer.joint)
