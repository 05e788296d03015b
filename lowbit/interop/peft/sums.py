"""A low-bit weight with the sum that it stands for, and parameters as they were before a merge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.tensor.frozen.affine_tensor import AffineTensor


def attribute_of(layer: Any) -> str:
    """The name of the parameter that the adapters of this layer change."""
    return str(getattr(layer, "parameter_name", "weight"))


def values_of(weight: AffineTensor) -> Tensor:
    wide: Any = weight._with(dtype=torch.promote_types(weight.dtype, torch.float32))
    values: Tensor = wide.dequantize()
    return values


@dataclass
class Sum:
    """A low-bit weight, rounded to nearest, and the sum that it stands for.

    Attributes:
        layer: of PEFT.
        held: the parameter of its base layer.
        values: float32, the sum.
        at: the place of the weight in the report.
        before: the parameters of the base layer before.
    """

    layer: Any
    held: Any
    values: Tensor
    at: int
    before: Kept | None = None

    def put(self, weight: Any) -> None:
        setattr(self.layer.get_base_layer(), attribute_of(self.layer), weight)


class Kept:
    """Parameters before a merge.

    Args:
        parameters: copied.
        layer: of PEFT, whose base layer has them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], layer: Any = None) -> None:
        self.layer = layer
        self.merged = [] if layer is None else [*layer.merged_adapters]
        self.tensors = [(p, p.detach().clone()) for p in parameters]

    @classmethod
    def of_layer(cls, layer: Any) -> Kept:
        own = layer.get_base_layer()._parameters.items()
        names = (attribute_of(layer), "bias")
        return cls([p for name, p in own if p is not None and name in names], layer)

    def weight(self, of: Sum) -> Any:
        """What the weight of a sum was."""
        found = next(t for p, t in self.tensors if p is of.held)
        return nn.Parameter(found, requires_grad=False)

    def biases(self, of: Sum) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters beside the weight of a sum, with what they were. LoRA with `lora_bias` and IA3 change them."""
        return [(p, t) for p, t in self.tensors if p is not of.held]

    def restore(self) -> None:
        with torch.no_grad():
            for param, before in self.tensors:
                param.copy_(before)
        if self.layer is not None:
            self.layer.merged_adapters[:] = self.merged
