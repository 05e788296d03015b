"""Weights of sibling layers, such as q, k and v: what they share of their scales, and how they are quantized together.

Their names are a matter of `lowbit.convert.siblings`; here they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core import check_finite, check_weight
from lowbit.tensor.frozen.affine_tensor import AffineTensor


@torch.no_grad()
def joint_part(spec: Spec, weights: Sequence[Tensor], searched: bool = False) -> Tensor:
    """`Spec.joint_part` of plain weights, with scales of the dtype that these weights get. `searched`: the scales with
    the smallest squared error over all weights, as `Spec.search_qparams` finds them."""
    dtype = spec.scale_dtype_for(weights[0].dtype)
    own = [weight.detach() for weight in weights]
    if searched and spec.scales is None:
        return spec.search_qparams(torch.cat([w.to(own[0].device) for w in own], -2), dtype)[0]
    return spec.joint_part(own, dtype)


def quantized_together(
    weights: Mapping[str, Tensor], schemes: Sequence[Scheme], scales: str | None
) -> dict[str, AffineTensor]:
    """Siblings by their names, quantized by `AffineTensor.quantized`, with the joint part of their scales where the
    spec `joins`. They multiply the same inputs, so a search that suits these takes them from all of the weights.

    Args:
        weights: plain [..., N, K] that differ in N alone, on one device.
        schemes: one a weight, of one `Spec`, without static activations.
        scales: as for `AffineTensor.quantized`.

    Raises ValueError as that does, with the name of a weight that cannot be quantized.
    """
    for name, weight in weights.items():
        check_weight(weight, name)
    spec, values = schemes[0].weight, [*weights.values()]
    searched = scales == "searched"
    joint = joint_part(spec, values, searched) if spec.joins else None
    if not searched or spec.scales is None:
        both = zip(values, schemes, strict=True)
        made = [AffineTensor.quantized(w, scheme, scales, joint=joint) for w, scheme in both]
        return dict(zip(weights, made, strict=True))
    try:
        whole = AffineTensor.searched(
            torch.cat([w.detach() for w in values], -2), spec, joint=joint
        )
    except ValueError as error:
        raise ValueError(f"with the siblings that share its scales: {error}") from error
    parts = whole.split([w.shape[-2] for w in values], -2)
    found = {}
    for part, (name, weight), scheme in zip(parts, weights.items(), schemes, strict=True):
        found[name] = part.clone()._with(dtype=weight.dtype, activation=scheme.activation)
        check_finite(found[name], weight)  # again, since torch.cat may widen
    return found
