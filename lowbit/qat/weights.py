"""The prepared weight of a target, and the order in which QAT keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lowbit.convert import Owner, Target, is_conv, is_turned, rounding_owners, shape_of_blocks
from lowbit.numerics.granularity import PerBlock, PerTensor
from lowbit.numerics.learned_scales import as_parameters
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.core.base import LowbitTensor
from lowbit.tensor.frozen import turned
from lowbit.tensor.frozen.affine_tensor import AffineTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor, Qparams
from lowbit.tensor.trained.quantizers import Quantizer, Scales


def prepared_weight(
    target: Target, values: Tensor, scheme: Scheme, quantizer: Quantizer
) -> FakeQuantizedTensor:
    """Plain `values`, or those of a quantized weight, in place of the weight of `target`."""
    if isinstance(values, LowbitTensor):
        values = values.dequantize().contiguous()
    return FakeQuantizedTensor(
        values, scheme, "convolution" if is_conv(target) else "matrix", quantizer
    )


def stored_scales(target: Target) -> tuple[Tensor, Tensor | None] | None:
    """What learned scales and zero points start from for a quantized weight: those that it stores, as parameters in the
    order in which QAT keeps the weight. None for a plain weight."""
    weight: Any = target.weight
    if not isinstance(weight, AffineTensor):
        return None
    scale, zero_point = weight.scale.float(), weight.zero_point
    if weight.transposed:
        scale, zero_point = scale.mT, None if zero_point is None else zero_point.mT
    scale, zero = as_parameters(target.scheme.weight, scale.contiguous(), zero_point)
    narrow = replace(target.scheme.weight, scale_dtype=None).scale_dtype_for(weight.dtype)
    exact = all(torch.equal(t.to(narrow).float(), t) for t in (scale, zero) if t is not None)
    dtype = narrow if exact else torch.float32
    return scale.to(dtype), None if zero is None else zero.to(dtype)


def in_model_order(target: Target) -> Target:
    """The target with blocks of the same elements in the order of the model, in which QAT keeps the weight: for
    stacked experts [experts, inputs, outputs] `PerGroup(g)` becomes `PerBlock(g, 1)`."""
    spec = target.scheme.weight
    if not is_turned(target) or isinstance(spec.granularity, PerTensor):
        return target
    *_, rows, columns = spec.granularity.block_size(shape_of_blocks(target))
    turned = replace(spec, granularity=PerBlock(columns, rows))
    return replace(target, scheme=Scheme(turned, target.scheme.activation))


def in_order_of_linears(target: Target) -> Target:
    """The target with the scheme by which its weight is stored once it is converted; undoes `in_model_order`."""
    if not is_turned(target):
        return target
    spec = turned.spec_of_linears(target.scheme.weight, target.weight.shape[1])
    return replace(target, scheme=Scheme(spec, target.scheme.activation))


def converted_weight(
    target: Target, weight: FakeQuantizedTensor, scales: Scales, input_qparams: Qparams | None
) -> Tensor:
    """The weight for inference that `lowbit.qat.convert_` puts in the place of `weight`, which is that of the target or
    a part of it. `scales` and `input_qparams` are as `FakeQuantizedTensor.frozen_by` takes them."""
    made = weight.frozen_by(scales, input_qparams)
    return turned.in_order_of_linears(made) if is_turned(target) else made


def rounding_owner(target: Target) -> Owner:
    """The first of `rounding_owners`, which has the static scale of the input."""
    owner = next(iter(rounding_owners(target)), None)
    if owner is None:
        raise NotImplementedError(
            f"{target.fqn} belongs to a {type(target.owners[0].module).__name__}, and the static scale of "
            "its input to another module; accepted: torch.nn.utils.parametrize.remove_parametrizations before"
        )
    return owner
