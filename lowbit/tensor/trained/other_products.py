"""The products of a FakeQuantizedTensor besides its linear: matmul, experts, convolutions and lookups. They run in high
precision, of values that are rounded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.checks import autocast_inputs, refuse_transforms
from lowbit.linear.fused_rounding import fake_quantize, rounded
from lowbit.linear.operands import Values
from lowbit.linear.rounded_linear import rounding_of
from lowbit.numerics.straight_through import StraightThrough
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.frozen import check_convolution
from lowbit.tensor.trained.quantizers import Scales


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

    def rows_of(
        self: Any, values: Tensor, indices: Tensor, scales: Scales, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The rows at `indices` of plain `values` [V, D], rounded as this weight is.

        Quantizes only the rows that are looked up, where scales belong to single rows. (Inductor 2.13 for CPU
        miscompiles the other order, a gather of rows that were padded to a whole group.)

        Args:
            values: plain, in place of its own.
            indices: of any shape.
            scales: what the quantizer gives.
            args, kwargs: as `F.embedding` takes them after the table.
        """
        scale, zero, joint = scales
        is_learned, shared = scale is not None, self.scheme.weight.shares_rows
        if shared or not (is_learned or self.quantizer.rounds_parts):
            if not is_sparse(args, kwargs):
                whole = self.rounded(values, *scales).to(self.dtype)
                return F.embedding(indices, whole, *args, **kwargs)
            if not is_learned:
                return _rows_with_sparse_gradient(self, values, indices, joint, *args, **kwargs)
        if not is_learned:
            return self.rounded(F.embedding(indices, values, *args, **kwargs)).to(self.dtype)
        index = indices.reshape(-1)
        rows = F.embedding(index, values, *args, **kwargs)
        table = values.detach() if shared else None  # its scale is that of any rows of it
        if not shared:
            scale, zero = (
                None if t is None else F.embedding(index, t, *args, **kwargs) for t in (scale, zero)
            )
        found = self.rounded(rows, scale, zero, table)
        return found.view(*indices.shape, values.shape[1]).to(self.dtype)


def _convolved(
    input: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The plain operands of torch's own convolution."""
    check_convolution(input, weight)
    return OtherProducts.operands(input, weight, weight.operand(), bias, product="convolution")


def _rows_with_sparse_gradient(
    weight: Any, values: Tensor, indices: Tensor, joint: Tensor | None, *args: Any, **kwargs: Any
) -> Tensor:
    """`rows_of` a table that is rounded as a whole. The gradient of the lookup, which is sparse, goes to `values`,
    since rounding has no gradient of a sparse one."""
    if not weight.quantizer.rounds_again:
        raise weight._unsupported(
            f"nn.Embedding(sparse=True) with the quantizer {weight.quantizer.name!r} (accepted: sparse=False)"
        )
    rows = F.embedding(indices, values, *args, **kwargs)
    rounding = rounding_of(weight, values.dtype)
    whole, inside = rounded(values, rounding.weight, rounding.scale_dtype, joint=joint)
    mask = inside.passed(torch.ones_like(whole))
    found = StraightThrough.apply(rows, whole[indices], mask[indices], operator.mul)
    return found.to(weight.dtype)


def is_sparse(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if these arguments of F.embedding after the table ask for a sparse gradient."""
    return bool(kwargs.get("sparse", args[4] if len(args) > 4 else False))
