"""The products of a FakeQuantizedTensor besides its linear: matmul, experts, convolutions and lookups. They run in high
precision, of values that are rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.checks import autocast_inputs, refuse_transforms
from lowbit.linear.fused_rounding import fake_quantize
from lowbit.linear.operands import Values
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.frozen.conv_tensor import check_convolution


class OtherProducts:
    """Mixin of FakeQuantizedTensor: the methods that its `products` name."""

    @staticmethod
    def operands(
        input: Tensor,
        weight: Any,
        values: Tensor,
        bias: Tensor | None,
        rounded: Callable[[Tensor], Tensor] | None = None,
        product: str = "linear",
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The plain input, weight and bias that torch's own function multiplies: cast, the input rounded.

        Args:
            values: what products see of the weight.
            rounded: rounds the input, where its scale is static.
            product: the name of torch's function, for messages.
        """
        refuse_transforms(weight)
        x, bias = autocast_inputs(input, weight, bias, product)
        x = weight._rounded_input(x, weight, rounded)
        return x, values.to(x.dtype), bias

    @classmethod
    def matmul(cls: Any, x: Any, weight: Any) -> Tensor:
        """As for every weight, and the product of experts [E, N, K] from the left with an input [E, K, M]. Experts
        multiply at once."""
        is_left = x.ndim == weight.ndim == 3 and isinstance(x, OtherProducts)
        if is_left and not isinstance(weight, LowbitTensor):
            experts, inputs = x, weight
            cls.check_stacked(inputs.transpose(-2, -1), experts.transpose(-2, -1))
            inputs = experts.rounded_for_experts(inputs.transpose(-2, -1)).transpose(-2, -1)
            return torch.bmm(experts.operand().to(inputs.dtype), inputs)
        cls.check_operands(x, weight)
        if weight.ndim == 2:
            return super().matmul(x, weight)  # type: ignore[misc]
        cls.check_stacked(x, weight)
        return torch.bmm(weight.rounded_for_experts(x), weight.operand().to(x.dtype))

    @classmethod
    def product_of_expert(cls: Any, x: Tensor, weight: Any) -> Tensor:
        """In high precision, as converted experts multiply."""
        return cls.product(x, weight, None, weight.scales_now("a product"), in_codes=False)

    @classmethod
    def product_of_experts(cls, x: Tensor, weight: Any, offs: Tensor) -> Tensor:
        x = weight.rounded_for_experts(x)
        return torch._grouped_mm(x, weight.operand().to(x.dtype), offs=offs)

    def rounded_for_experts(self: Any, x: Tensor) -> Tensor:
        """x [..., K], the input of a product of all experts, rounded as for the converted weight."""
        return x if self.input_spec is None else fake_quantize(x, self.input_spec)

    @classmethod
    def conv1d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv1d(*_convolved(input, weight, bias), *args, **kwargs)

    @classmethod
    def conv2d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv2d(*_convolved(input, weight, bias), *args, **kwargs)

    @classmethod
    def embedding(cls, input: Tensor, weight: Any, *args: Any, **kwargs: Any) -> Tensor:
        return weight._look_up(input, *args, **kwargs)

    def _look_up(self: Any, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.rounds_weight:
            return F.embedding(indices, self.high_precision(), *args, **kwargs)
        scales = self.scales_now("a lookup")
        if scales[0] is None:
            return self.rows_of(Values.apply(self), indices, scales, *args, **kwargs)
        return F.embedding(indices, self.seen_by(*scales).to(self.dtype), *args, **kwargs)


def _convolved(
    input: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The plain operands of torch's own convolution."""
    check_convolution(input, weight)
    return OtherProducts.operands(input, weight, weight.operand(), bias, product="convolution")
