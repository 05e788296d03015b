"""Products of PyTorch with the dequantized weight. They serve every weight, and are the reference of all others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen.row import Weight
from lowbit_kernels.runtime.library import FLOATS
from lowbit_kernels.weight_only.weight_operands import HALVES

_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing
_PlainAttributes = torch._C.DisableTorchFunctionSubclass
_LARGE = 2**20
"""Elements of a weight that PyTorch operations dequantize at a time."""


def is_float32_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    is_eager = not _is_compiling()  # while compiling, nothing is remembered
    both = x.dtype is weight.dtype is torch.float32
    return is_eager and x.is_cpu and both and not weight.transposed


def cpu_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """A kernel multiplies what it decodes. While gradients are enabled, `exact_cpu_linear`."""
    if _is_grad_enabled():
        return exact_cpu_linear(x, weight, bias)
    return cpu_half_linear(x, weight, bias)


def exact_cpu_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`plain_linear` to the bit. One kernel dequantizes, a tile of rows at a time where the weight is large, into
    memory that this thread's next product overwrites."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    values_t = weight.values_for_product()
    if values_t is not None:
        return x @ values_t if bias is None else F.linear(x, values_t.t(), bias)
    y = weight.product_in_tiles(x, bias)
    return _dequantized_linear(x, weight, bias) if y is None else y


def is_half_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return not _is_compiling() and x.is_cpu and x.dtype in HALVES and not weight.transposed


def cpu_half_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """A kernel multiplies what it decodes. Where PyTorch multiplies bfloat16 faster, it decodes a tile of rows at a
    time, which is rounded to bfloat16."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    y = weight.product_on_cpu(x, bias)
    if y is None:
        y = weight.product_in_tiles(x, bias)
    # None without a compiler, and while something traces the operations
    return _dequantized_linear(x, weight, bias) if y is None else y


def is_any(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return True


def plain_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Quantize and dequantize the activation if the scheme says so, dequantize the weight, multiply.

    This is the reference of every other implementation. A QAT-prepared layer computes the same, to the bit, unless it
    multiplies codes, as the converted one then does (`codes_product`).
    """
    turned_ternary = weight.stored_as == "ternary" and weight.transposed and x.numel() > 0
    if weight.activation is not None or turned_ternary:
        x = weight.rounded_input(x)
    return _dequantized_linear(x, weight, bias)


def _dequantized_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    with _PlainAttributes():
        if _is_large_on_cpu(x, weight, bias):
            return _in_tiles(x, weight, bias)
        return F.linear(x, weight.dequantize().to(x.dtype), bias)


def _is_large_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """True if a weight is best dequantized in tiles of rows, and can be: no rows share a scale."""
    if not x.is_cpu or x.dtype not in FLOATS or weight.numel() <= _LARGE or weight.transposed:
        return False
    is_seen = _is_compiling() or _dispatch_modes() or _is_traced()
    if torch.is_grad_enabled():
        # Autograd records the operations of a direct call of `plain_linear`.
        is_seen = is_seen or x.requires_grad or (bias is not None and bias.requires_grad)
    from lowbit_kernels.weight_only.weight_mm_tiles_cpu import has_tokens_inside

    return not is_seen and not has_tokens_inside(x) and weight.spec.block_size(weight.shape)[0] == 1


def _in_tiles(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The same without memory for the whole weight, which the system would have to clear in each call."""
    from lowbit_kernels.weight_only.dequantize_cpu import rows_in_tiles
    from lowbit_kernels.weight_only.weight_mm_tiles_cpu import linear

    n, k = weight.shape
    slices = rows_in_tiles(n, _LARGE // k)
    return linear(x, ((rows, weight[rows].dequantize().float()) for rows in slices), n, bias)
