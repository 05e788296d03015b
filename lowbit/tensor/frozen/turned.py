"""Experts that a model stores as [experts, inputs, outputs], in the order of linears: [experts, outputs, inputs].

In the order of the model, groups of g inputs are `PerBlock(g, 1)`; in that of linears they are `PerGroup(g)`, which
kernels take. Codes and scales are the same numbers, in another order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowbit.numerics.granularity import PerBlock, PerGroup, PerRow
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.spec import Spec
from lowbit.tensor.frozen.affine_tensor import AffineTensor

_TURNS = {"codes", "scale", "zero_point", "global_scale"}


def spec_of_linears(spec: Spec, inputs: int) -> Spec:
    """The spec in the order of linears of one whose blocks are columns in the order of the model; any other as it is.
    `inputs`: of an expert."""
    gran = spec.granularity
    if not isinstance(gran, PerBlock) or len(gran.shape) != 2 or gran.shape[1] != 1:
        return spec
    group = gran.shape[0]
    return replace(spec, granularity=PerRow() if group >= inputs else PerGroup(group))


def in_order_of_linears(weight: Any) -> Any:
    """A frozen weight [E, K, N] as one that is stored as [E, N, K], transposed; itself where it cannot be."""
    if not isinstance(weight, AffineTensor) or weight.ndim != 3 or weight.transposed:
        return weight
    parts, (experts, inputs, outputs) = weight.inner_tensors(), weight.shape
    spec = spec_of_linears(weight.spec, inputs)
    if spec == weight.spec or not parts.keys() <= _TURNS:
        return weight
    bits = weight._stored_bits(weight.spec)
    codes = parts.pop("codes")
    codes = codes if bits == 8 else unpack(codes, bits, outputs)
    turned = {name: t if name == "global_scale" else t.mT.contiguous() for name, t in parts.items()}
    codes = codes.mT.contiguous()
    turned["codes"] = codes if bits == 8 else pack(codes, bits)
    made = weight._with(turned, (experts, outputs, inputs), spec=spec)
    return made._transposed()
