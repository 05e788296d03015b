"""The parameters of a low-bit layer as vLLM's own classes, and its product."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)

from lowbit.interop.vllm.parts import LayerWeight, PartLayout, Stored

PREFIX = "weight_"
"""The prefix of a part's name: a parameter cannot have the name "weight.codes"."""


@register_weight_loader_v2_supported_method
class LowbitLinearMethod(LinearMethodBase):
    """How a layer of vLLM holds a weight in lowbit's format and multiplies by it. Also for the output head.

    Args:
        name: of the layer, for errors.
        stored: how the folder stores the weights that are merged in it.
    """

    def __init__(self, name: str, stored: Stored) -> None:
        self.name, self.stored = name, stored

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Give the layer an empty parameter for each part. The arguments are vLLM's. Raises ValueError as `LayerWeight`
        does."""
        weight = LayerWeight(
            self.stored, output_partition_sizes, input_size_per_partition, input_size, self.name
        )
        layer.lowbit_weight, layer.lowbit_dtype = weight, params_dtype
        for part in weight.parts:
            made = parameter(part, extra_weight_attrs["weight_loader"])
            layer.register_parameter(PREFIX + part.name, made)
            if part.rows > 1:  # vLLM divides the outputs of merged layers by this size
                layer.weight_block_size = list(weight.block)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the weights from the parts, which vLLM has filled: once it has loaded the folder, and again whenever
        it has reloaded the layer."""
        weight: LayerWeight = layer.lowbit_weight
        if not hasattr(layer, PREFIX + weight.parts[0].name):  # done already
            return
        tensors = {part.name: getattr(layer, PREFIX + part.name).data for part in weight.parts}
        made = weight.assembled(tensors, layer.lowbit_dtype)
        for name in tensors:
            delattr(layer, PREFIX + name)
        names = ["weight"] if len(made) == 1 else [f"weight_{i}" for i in range(len(made))]
        for name, own in zip(names, made, strict=True):
            layer.register_parameter(name, nn.Parameter(own, requires_grad=False))
        layer.lowbit_names = names

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times the weight [N, K], transposed, plus bias [N]."""
        weights: list[Tensor] = [getattr(layer, name) for name in layer.lowbit_names]
        if len(weights) == 1:
            return F.linear(x, weights[0], bias)
        joined = torch.cat([F.linear(x, weight) for weight in weights], dim=-1)
        return joined if bias is None else joined + bias

    def dequantize_weight(self, layer: Any) -> Tensor:
        """The values [N, K] of all merged weights."""
        weights: list[Any] = [getattr(layer, name) for name in layer.lowbit_names]
        return torch.cat([weight.dequantize() for weight in weights])

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Raises ValueError: an output head in low bits is no longer the embedding."""
        raise ValueError(
            f"{self.name} is in low bits, and config.json ties it to the embedding, which vLLM then reads instead; "
            "leave the output head out when quantizing"
        )


def parameter(part: PartLayout, weight_loader: Callable[..., Any]) -> nn.Parameter:
    """An empty parameter of vLLM that its layers fill as the layout of `part` says."""
    given = {"data": torch.empty(part.shape, dtype=part.dtype), "weight_loader": weight_loader}
    if part.per_layer:
        return PerTensorScaleParameter(**given)
    if part.codes_per_byte != 1:
        factor = Fraction(part.codes_per_byte).limit_denominator(8)
        return PackedvLLMParameter(
            input_dim=1, output_dim=0, packed_dim=1, packed_factor=factor, **given
        )
    if part.name == "codes":
        return ModelWeightParameter(input_dim=1, output_dim=0, **given)
    if part.rows > 1:
        return BlockQuantScaleParameter(input_dim=1, output_dim=0, **given)
    if part.cuts_inputs:
        return GroupQuantScaleParameter(input_dim=1, output_dim=0, **given)
    return ChannelQuantScaleParameter(output_dim=0, **given)
