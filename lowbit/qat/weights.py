"""The prepared weight of a target, and the order in which QAT keeps it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lowbit.convert import Target, is_conv, is_turned, shape_of_blocks
from lowbit.numerics.granularity import PerBlock, PerTensor
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.frozen.turned import spec_of_linears
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import Quantizer


def prepared_weight(
    target: Target, values: Tensor, scheme: Scheme, quantizer: Quantizer
) -> FakeQuantizedTensor:
    """Plain `values` in place of the weight of `target`."""
    return FakeQuantizedTensor(
        values, scheme, "convolution" if is_conv(target) else "matrix", quantizer
    )


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
    spec = spec_of_linears(target.scheme.weight, target.weight.shape[1])
    return replace(target, scheme=Scheme(spec, target.scheme.activation))
