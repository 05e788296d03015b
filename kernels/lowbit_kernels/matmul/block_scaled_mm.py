"""Products of two float8 matrices with a scale for each 128 elements along K.

    out[m, n] = sum_g (sum_{k in group g} a[m, k] * b[n, k]) * a_scale[g, m] * b_scale[...]  +  bias[n]

    a         float8_e4m3fn [M, K], K a multiple of 128
    b         float8_e4m3fn [N, K]
    a_scale   float32 [K/128, M]
    b_scale   float32 [K/128, N] of groups, or [N/128 rounded up, K/128] of tiles
    bias      float32, bfloat16 or float16 [N], or None
    out       out_dtype, one of these three [M, N], contiguous

Group g is k = 128 g .. 128 g + 127. b_scale[...] is b_scale[g, n] for a scale for each row and group, or
b_scale[n // 128, g] for a scale for each tile of 128 x 128.

`quantize_blocks` makes such operands. The sum of a group is scaled and added in float32, and the result is rounded once
to the output dtype (DeepSeek-V3, arXiv 2412.19437, 3.3.2). Where one group has the scale NaN, the result is NaN.

The device chooses the implementation:

    CUDA 12.9 or newer, compute capability 9.0   cuBLAS. On Hopper the sum of a group has about 14 bits
    elsewhere                                    the float32 product of the dequantized operands

cuBLAS takes multiples of 16 rows, and whole tiles of b; other operands are padded in a copy. It writes bfloat16 and
float32. A bias, and float16, take a second pass over float32 sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op

BLOCK = 128
E4M3 = torch.float8_e4m3fn
CUDA, CAPABILITY = (12, 9), (9, 0)
"""The CUDA version from which on cuBLAS has these products, and the GPUs that it has them for."""


@op(
    "empty(out_dtype, M, N)",
    flops="2 * M * N * K",
    a="float8_e4m3fn [M, K]; flatten leading dimensions first",
    b="float8_e4m3fn [N, K]; pass it transposed",
    a_scale="float32 [K // BLOCK, M]",
    b_scale="float32 [K // BLOCK, N] or [-(-N // BLOCK), K // BLOCK]",
    bias="float [N]",
    rules={
        "K % BLOCK == 0": "K must be a multiple of {BLOCK}, got {K}; pad both operands with zeros"
    },
    out_dtype="float",
)
def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a @ b.T with the scales of groups or tiles; see the module's docstring."""
    return product(torch.float64, a, b, a_scale, b_scale, bias, out_dtype)


reference = block_scaled_mm.reference


def product(dtype: torch.dtype, a, b, a_scale, b_scale, bias, out_dtype: torch.dtype) -> Tensor:
    """The product of the dequantized operands in `dtype`."""
    with torch.autocast(a.device.type, enabled=False):
        out = values(a, a_scale, dtype) @ values(b, b_scale, dtype).T
    return (out if bias is None else out + bias.to(dtype)).to(out_dtype)


def values(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values [rows, K] of codes [rows, K]. scale: of groups [K/128, rows], or of tiles [rows/128 rounded up,
    K/128]."""
    rows, k = codes.shape
    if scale.shape != (k // BLOCK, rows):
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].t()
    groups = codes.to(dtype).unflatten(1, (k // BLOCK, BLOCK))
    return (groups * scale.to(dtype).t().unsqueeze(2)).flatten(1)


_by_torch = functools.partial(product, torch.float32)


def runs_on(device: torch.device) -> bool:
    """True if the matrix units of this device run these products."""
    is_built = device.type == "cuda" and nvrtc.cuda_version() >= CUDA
    return is_built and nvrtc.capability(device) == CAPABILITY


def _by_cublas(a, b, a_scale, b_scale, bias, out_dtype) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    by_tile = b_scale.shape != (k // BLOCK, n)
    a, a_scale = _with_rows(a, 16), _padded(a_scale, 16)
    b = _with_rows(b, BLOCK if by_tile else 16)
    # cuBLAS reads the scales of four steps of K at once.
    b_scale = _padded(b_scale, 4 if by_tile else 16)
    direct = bias is None and out_dtype != torch.float16
    out = F.scaled_mm(
        a,
        b.t(),
        a_scale.t(),
        F.ScalingType.BlockWise1x128,
        b_scale.t(),
        F.ScalingType.BlockWise128x128 if by_tile else F.ScalingType.BlockWise1x128,
        F.SwizzleType.NO_SWIZZLE,
        F.SwizzleType.NO_SWIZZLE,
        output_dtype=out_dtype if direct else torch.float32,
    )
    out = out[:m, :n]
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype).contiguous()


def _with_rows(codes: Tensor, multiple: int) -> Tensor:
    """Codes with rows of zeros up to a multiple, contiguous."""
    extra = -codes.shape[0] % multiple
    if extra:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, extra)).view(codes.dtype)
    return _as_contiguous(codes)


def _padded(scale: Tensor, multiple: int) -> Tensor:
    """Scales with columns of zeros up to a multiple, contiguous."""
    extra = -scale.shape[1] % multiple
    return _as_contiguous(F.pad(scale, (0, extra)) if extra else scale)


def _as_contiguous(x: Tensor) -> Tensor:
    """x in contiguous memory. A dimension of size 1 may have any stride, but cuBLAS needs that of a full row."""
    return x.contiguous().view(-1).view(x.shape)


@block_scaled_mm.kernel
def _launch(a, b, *others) -> Tensor:
    name, multiply = _implementation(a, b)
    ran("block_scaled_mm", name)
    return multiply(a, b, *others)


def _implementation(a: Tensor, b: Tensor) -> tuple[str, Callable[..., Tensor]]:
    """The name and the function of the implementation for checked operands."""
    if 0 in (*a.shape, b.shape[0]):
        return "empty", _by_torch
    return ("cublas", _by_cublas) if runs_on(a.device) else ("torch", _by_torch)
