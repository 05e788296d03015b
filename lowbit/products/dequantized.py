"""Products of PyTorch with the dequantized weight. They serve every weight, and are the reference of all others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.products.row import Weight
from lowbit_kernels.weight_operands import HALVES

_is_compiling = torch.compiler.is_dynamo_compiling
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


def is_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """In float32 or 16 bits, not while compiling, where nothing is remembered."""
    if _is_compiling() or not x.is_cpu or weight.transposed:
        return False
    return x.dtype in HALVES or x.dtype is weight.dtype is torch.float32


def cpu_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`plain_linear`, without the dequantized weight as a whole: a kernel decodes a tile of rows at a time, or, for few
    tokens in 16 bits, multiplies what it decodes.

    In float32 the result has the bits of `plain_linear`. In 16 bits, for few tokens, the weight is not rounded to them.
    """
    if weight.activation is not None:
        x = weight.rounded_input(x)
    if x.dtype is torch.float32:
        values_t = weight.values_for_product()
        if values_t is not None:
            return x @ values_t if bias is None else F.linear(x, values_t.t(), bias)
    y = weight.product_on_cpu(x, bias)
    # None without a compiler, and while something traces the operations
    return _dequantized_linear(x, weight, bias) if y is None else y


def is_any(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return True


def plain_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Quantize and dequantize the activation if the scheme says so, dequantize the weight, multiply.

    This is the reference of every other implementation. A QAT-prepared layer computes the same, to the bit, unless it
    multiplies codes, as the converted one then does (`codes_product`).
    """
    if weight.activation is not None:
        x = weight.rounded_input(x)
    return _dequantized_linear(x, weight, bias)


def _dequantized_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    with _PlainAttributes():
        return F.linear(x, weight.dequantize().to(x.dtype), bias)
