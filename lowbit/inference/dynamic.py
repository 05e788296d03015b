"""Linears whose activation is quantized too: integer and float8 products, of `lowbit_kernels` and of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit import tracer
from lowbit.granularity import PerRow, PerToken
from lowbit.products import register_linear
from lowbit.scheme import Float8, Int
from lowbit.tensor.affine_tensor import AffineTensor
from lowbit.tensor.base import LowbitTensor
from lowbit.tensor.kernels import dynamic_linear, int8_sums

_MOST_K = (2**31 - 1) // 2**14  # codes reach −128 · −128, and the sum is an int32


_INT8, _FLOAT8 = Int(8), Float8()  # made once: conditions run for every product


def _is_rowwise(weight: LowbitTensor, fmt: Int | Float8) -> bool:
    """Per-row symmetric weight and per-token symmetric activation, both in `fmt`, stored as [N, K]."""
    return (
        isinstance(weight, AffineTensor)
        and weight.activation is not None
        and not weight.transposed
        and weight.zero_point is None
        and isinstance(weight.spec.granularity, PerRow)
        and isinstance(weight.activation.granularity, PerToken)
        and weight.activation.mapping.startswith("symmetric")
        and weight.spec.format == weight.activation.format == fmt
    )


def _can_int8(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> bool:
    if not _is_rowwise(weight, _INT8):
        return False
    n, k = weight.shape
    if k > _MOST_K:
        return False
    tokens = x.numel() // max(k, 1)
    if x.device.type == "cuda":  # what torch._int_mm takes
        return tokens > 16 and n % 8 == 0 and k % 8 == 0 and k > 0
    return x.device.type == "cpu" and tokens > 0 and n > 0 and k > 0


@register_linear(_can_int8)
def int8_dynamic_linear(x: Tensor, weight: AffineTensor, bias: Tensor | None) -> Tensor:
    """int8 × int8 with exact int32 sums, then token scale × row scale in float32: [..., N] in x's dtype."""
    assert weight.activation is not None
    tracer.multiplies_in("int8")
    codes, token_scale, _ = weight.activation.quantize(x.reshape(-1, x.shape[-1]))
    product = int8_sums(codes, weight.codes)
    # the weight's scale first: times the token's, which may be huge, the sum could overflow on the way
    y = product.float() * weight.scale.float().t() * token_scale
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _can_fused_int8(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> bool:
    """On a GPU, with the activation's mapping that the kernel's quantization has, and 16-bit outputs."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and _is_rowwise(weight, _INT8)
        and weight.activation.mapping == "symmetric_no_clipping_err"  # type: ignore[attr-defined]
        and 0 < weight.shape[1] <= _MOST_K
    )


@register_linear(_can_fused_int8, takes_residual=True)
def int8_dynamic_kernel(
    x: Tensor, weight: AffineTensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """The same with the tokens' quantization, scales, bias and residual fused: [..., N] in x's dtype."""
    tracer.multiplies_in("int8")
    return dynamic_linear(x, weight.codes, weight.scale, bias, residual)


def _can_float8(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> bool:
    if not x.is_cuda or not _is_rowwise(weight, _FLOAT8):
        return False
    n, k = weight.shape
    return (
        torch.cuda.get_device_capability(x.device) >= (8, 9)
        and x.dtype is torch.bfloat16  # the output dtype of row-wise _scaled_mm
        and x.numel() > 0
        and n % 16 == 0
        and k % 16 == 0
    )


@register_linear(_can_float8)
def float8_dynamic_linear(x: Tensor, weight: AffineTensor, bias: Tensor | None) -> Tensor:
    """float8 × float8 with float32 sums and both scales in the product: [..., N] in bfloat16."""
    tracer.multiplies_in("e4m3")
    return dynamic_linear(x, weight.codes, weight.scale, bias)
