"""The prepared weight of a target."""

from __future__ import annotations

from torch import Tensor

from lowbit.convert import Target, is_conv
from lowbit.schemes.scheme import Scheme
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import Quantizer


def prepared_weight(
    target: Target, values: Tensor, scheme: Scheme, quantizer: Quantizer
) -> FakeQuantizedTensor:
    """Plain `values` in place of the weight of `target`."""
    return FakeQuantizedTensor(
        values, scheme, "convolution" if is_conv(target) else "matrix", quantizer
    )
