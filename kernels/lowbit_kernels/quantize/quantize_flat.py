"""A run of elements to int8 with a scale for each 128 of them, to nearest, and back: activations kept for backward.

For a block x whose largest finite magnitude is a, with m = 2**100 if a < 2**-100, else 1:

    scale = a                              in the dtype of x: exact. 1 for a block without finite values but zeros.
                                           Negative where no finite value of the block is.
    code  = round((x m) (126 / (a m)))     -126 .. 126
    value = (code (1/126)) a               |x - value| <= a / 252; zeros and the largest magnitude are exact

Codes 127, -127 and -128 stand for infinity, -infinity and NaN. Where the scale is negative, code -1 stands for a value
of about a / 504 (at least the smallest normal number) that would have become 0: the derivative of ReLU depends on
whether its result is 0. The last block is padded with zeros.

Every float32 operation is rounded once, so the kernels have the bits of the formulas. A Triton kernel reads each
element once: 3 bytes of memory traffic for a 16-bit element in either direction. `codes_of` and `values_of` are the
formulas alone, without pieces: torch.compile fuses them with their neighbours. `finite_codes_of` and `finite_values_of`
have the same codes in a third of the instructions, for what most graphs save: finite values, small ones of which may
become 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton

BLOCK = 128
MOST = 126
"""The code of a block's largest magnitude."""
_LEAST = 2.0**-119
"""The smallest scale of `finite_codes_of`: 126 divided by it is a finite float32."""
_PIECE = 2**17
"""Blocks that PyTorch's operations round at once: 64 MiB of float32 values."""
_BLOCKS = 16
"""Blocks of a Triton program."""


def codes_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """codes int8 [..., 128] and scale [..., 1] of a float [..., 128], by the formula of the module."""
    x = blocks.float()
    finite = torch.where(x.abs() < math.inf, x, 0.0)
    largest = finite.abs().amax(-1, keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    has_negative = finite.amin(-1, keepdim=True) < 0
    scale = torch.where(has_negative, largest, -largest).to(blocks.dtype)
    lifted = torch.where(largest < 2.0**-100, 2.0**100, 1.0)
    inverse = torch.full_like(largest, MOST) / (largest * lifted)
    code = (x * lifted * inverse).clamp(-MOST - 1, MOST + 1).round()
    code = torch.where((code == 0) & (x > 0) & ~has_negative, -1.0, code)
    return torch.where(x == x, code, -128.0).to(torch.int8), scale


def finite_codes_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`codes_of` where values are finite and small ones may become 0: a scale is never negative.

    Its codes equal those of `codes_of` in every block with a negative value, if the largest magnitude is 2**-119 or
    more. A smaller one counts as 2**-119. A block with an infinity or NaN becomes infinite or NaN as a whole.
    """
    x = blocks.float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=_LEAST)
    code = (x * (torch.full_like(largest, MOST) / largest)).round()
    return code.to(torch.int8), largest.to(blocks.dtype)


def finite_values_of(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, [..., 128]: `finite_codes_of` back."""
    return (codes.float() * (1 / MOST) * scale.float()).to(dtype)


def values_of(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in `dtype`, [..., 128]: `codes_of` back."""
    largest = scale.float().abs()
    small = (largest * (0.25 / MOST)).clamp(min=torch.finfo(dtype).smallest_normal)
    code = codes.float()
    x = code * (1 / MOST) * largest
    x = torch.where((code == -1) & (scale < 0), small, x)
    x = torch.where(code == MOST + 1, math.inf, x)
    x = torch.where(code == -MOST - 1, -math.inf, x)
    return torch.where(code == -128, math.nan, x).to(dtype)


@op(
    "empty(torch.int8, -(-N // 128), 128), empty(x.dtype, -(-N // 128), 1)",
    planned=True,
    x="float [N]",
)
def quantize_flat(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, int8 [ceil(N / 128), 128], and scales, [ceil(N / 128), 1] in the dtype of x [N]; see the module."""
    blocks = -(-x.numel() // BLOCK)
    codes = x.new_empty(blocks, BLOCK, dtype=torch.int8)
    scale = x.new_empty(blocks, 1)
    for part, *out in zip(
        x.split(_PIECE * BLOCK), codes.split(_PIECE), scale.split(_PIECE), strict=True
    ):
        padded = F.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        for target, found in zip(out, codes_of(padded), strict=True):
            target.copy_(found)
    return codes, scale


@op(
    "empty(scale.dtype, count)",
    planned=True,
    codes="int8 [B, 128]",
    scale="float [B, 1]",
    rules={"(B - 1) * 128 < count <= B * 128": "{B} blocks of 128 do not hold count={count}"},
)
def dequantize_flat(codes: Tensor, scale: Tensor, count: int) -> Tensor:
    """The values that `quantize_flat` has rounded, [count] in the dtype of `scale`."""
    values = scale.new_empty(codes.shape)
    for out, *parts in zip(*(t.split(_PIECE) for t in (values, codes, scale)), strict=True):
        out.copy_(values_of(parts[0], parts[1], scale.dtype))
    return values.view(-1)[:count]


reference = quantize_flat.reference


@jit
def _quantize(
    x,  # [count]
    codes,  # int8 [blocks, 128]
    scale,  # [blocks]
    count,
    blocks,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + at, mask=at < count, other=0).to(tl.float32)
    # The bits of magnitudes are ordered like the magnitudes, infinity and NaN last.
    most = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    least = tl.min(value, 1)
    if tl.max(most) < 0x7F800000 and tl.min(most) >= 0x0D800000 and tl.max(least) < 0:
        # All are finite, and each block has a negative value and a magnitude of 2**-100 or more.
        largest = most.to(tl.float32, bitcast=True)
        inverse = tl.div_rn(tl.full(largest.shape, MOST * 1.0, tl.float32), largest)
        code = value * inverse[:, None] + 12582912.0  # 1.5 * 2**23: the lowest byte is the code
        tl.store(scale + block, largest)
        tl.store(codes + at, code.to(tl.int32, bitcast=True).to(tl.int8))
    else:
        finite = tl.where(tl.abs(value) < float("inf"), value, 0.0)
        largest = tl.max(tl.abs(finite), 1)
        largest = tl.where(largest == 0, 1.0, largest)
        has_negative = tl.min(finite, 1) < 0
        tl.store(scale + block, tl.where(has_negative, largest, -largest), mask=block < blocks)
        lifted = tl.where(largest < 7.888609052210118e-31, 1.2676506002282294e30, 1.0)
        inverse = tl.div_rn(tl.full(largest.shape, MOST * 1.0, tl.float32), largest * lifted)
        code = value * lifted[:, None] * inverse[:, None]
        code = tl.minimum(tl.maximum(code, -MOST - 1.0), MOST + 1.0)
        code = (code + 12582912.0) - 12582912.0  # rounds half to even
        is_small = (code == 0) & (value > 0) & (has_negative == 0)[:, None]
        code = tl.where(value == value, tl.where(is_small, -1.0, code), -128.0)
        tl.store(codes + at, code.to(tl.int8), mask=(block < blocks)[:, None])


@jit
def _dequantize(
    codes,  # int8 [blocks, 128]
    scale,  # [blocks]
    values,  # [count]
    count,
    blocks,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,  # the smallest normal number of the values' dtype
    BLOCKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    stored = tl.load(scale + block, mask=block < blocks, other=1).to(tl.float32)
    code = tl.load(codes + at, mask=(block < blocks)[:, None], other=0).to(tl.float32)
    largest = tl.abs(stored)
    x = code * (1.0 / MOST) * largest[:, None]
    if tl.max(tl.max(tl.abs(code), 1)) > MOST or tl.min(stored) < 0:
        small = tl.maximum(largest * (0.25 / MOST), LEAST)
        x = tl.where((code == -1) & (stored < 0)[:, None], small[:, None], x)
        x = tl.where(code == MOST + 1, float("inf"), x)
        x = tl.where(code == -MOST - 1, -float("inf"), x)
        x = tl.where(code == -128, float("nan"), x)
    tl.store(values + at, x, mask=at < count)


def _launch(name: str, operands: Any, results: Any, kernel: Any, count: int, **more: Any) -> None:
    ran(name, "triton")
    blocks = -(-count // BLOCK)
    constants = {"MOST": MOST, "BLOCKS": _BLOCKS, "num_warps": 4, "enable_fp_fusion": False, **more}
    programs, arguments = triton.cdiv(blocks, _BLOCKS), (*operands, *results, count, blocks)
    launch(name, operands, results, kernel, programs, arguments, constants)


@quantize_flat.kernel
def _quantize_kernel(x: Tensor) -> tuple[Tensor, Tensor] | None:
    if not (x.numel() and runs_on(x.device)):
        return None
    blocks = -(-x.numel() // BLOCK)
    codes, scale = x.new_empty(blocks, BLOCK, dtype=torch.int8), x.new_empty(blocks, 1)
    # The interpreter reads subnormal bfloat16 numbers wrongly.
    x = x.contiguous().to(stored_dtype(x.dtype, x.device))
    _launch("quantize_flat", (x,), (codes, scale), _quantize, x.numel())
    return codes, scale


@dequantize_flat.kernel
def _dequantize_kernel(codes: Tensor, scale: Tensor, count: int) -> Tensor | None:
    if not (count and runs_on(codes.device)):
        return None
    values = scale.new_empty(count, dtype=stored_dtype(scale.dtype, scale.device))
    least = torch.finfo(scale.dtype).smallest_normal
    operands = codes.contiguous(), scale.contiguous()
    _launch("dequantize_flat", operands, (values,), _dequantize, count, LEAST=least)
    return values.to(scale.dtype)
