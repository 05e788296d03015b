"""The weight of an nn.Conv1d or nn.Conv2d that is prepared for QAT: blocks divide its rows, as in `ConvTensor`.

A weight [N, C/groups, k…] stays a tensor of that shape. It is rounded as the matrix [N, K] of its rows, as which it is
converted, and learned scales have the shape that they have for this matrix. FSDP2 gathers the weight itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from lowbit.tensor.frozen.conv_tensor import ConvTensor, check_convolution
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import LearnedScalesTensor


class FakeQuantizedConvTensor(FakeQuantizedTensor, codec=None):
    """A `FakeQuantizedTensor` of a convolution."""

    is_described = False
    frozen_as = ConvTensor
    products: ClassVar[dict[Any, str]] = {F.conv1d: "conv1d", F.conv2d: "conv2d"}

    def rows(self, values: Tensor) -> Tensor:
        return values.flatten(1)

    def settled(self) -> Tensor:
        return self.read()  # a part of its rows is not a weight of a convolution

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        return (self.shape[0], self.shape[1:].numel())

    @property
    def has_rows_alone(self) -> bool:
        return False

    @property
    def swaps_last(self) -> bool:
        return False

    def _transposed(self) -> Any:
        raise self._unsupported("transposition")

    @classmethod
    def conv1d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv1d(*_operands(input, weight, bias), *args, **kwargs)

    @classmethod
    def conv2d(
        cls, input: Tensor, weight: Any, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        return F.conv2d(*_operands(input, weight, bias), *args, **kwargs)


def _operands(
    input: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    check_convolution(input, weight)
    values = weight.operand()
    return FakeQuantizedTensor.operands(input, weight, values, bias, product="convolution")


class LearnedScalesConvTensor(FakeQuantizedConvTensor, LearnedScalesTensor):
    """A `LearnedScalesTensor` of a convolution."""
