"""Products of PyTorch with the dequantized weight. They serve every weight, and are the reference of all others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.products.row import Weight

_is_compiling = torch.compiler.is_dynamo_compiling
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


def is_float32_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    is_eager = not _is_compiling()  # while compiling, nothing is remembered
    both = x.dtype is weight.dtype is torch.float32
    return is_eager and x.is_cpu and both and not weight.transposed


def cpu_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`plain_linear` to the bit. One kernel dequantizes into memory that this thread's next product overwrites."""
    values_t = weight.values_for_product()
    if values_t is None:  # no compiler, or something traces the operations
        return plain_linear(x, weight, bias)
    if weight.activation is not None:
        x = weight.rounded_input(x)
    return x @ values_t if bias is None else F.linear(x, values_t.t(), bias)


def is_any(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return True


def plain_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Quantize and dequantize the activation if the scheme says so, dequantize the weight, multiply.

    This is the reference of every other implementation. A QAT-prepared layer computes the same, to the bit, unless it
    multiplies codes, as the converted one then does (`codes_product`).
    """
    if weight.activation is not None:
        x = weight.rounded_input(x)
    with _PlainAttributes():
        return F.linear(x, weight.dequantize().to(x.dtype), bias)
