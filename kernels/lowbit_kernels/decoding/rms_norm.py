"""RMS norm of rows (arXiv 1910.07467).

    y = x / sqrt(mean(x²) + eps) · (weight + offset)      over the last dimension, in float32, rounded once

    x       float [..., D]
    weight  float [D]
    offset  0, or 1 for models that store the weight minus 1
    y       x's dtype [..., D], contiguous

On a GPU with programmatic dependent launch the kernel loads the weight while the previous launch ends. Rows of more
than `BLOCK` columns are read twice, a block at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton

BLOCK = 8192
"""The most columns that a program holds at a time."""


@op("empty(x.dtype, *x.shape)", planned=True, x="float [..., D]", weight="float [D]")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float = 0.0) -> Tensor:
    """The norm of each row of x [..., D] times `weight` [D] + `offset`, in x's dtype; see the module's docstring."""
    y = x.float() * rms_factor(x, eps) * (weight.float() + offset)
    return y.to(x.dtype).contiguous()


reference = rms_norm.reference


def rms_factor(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension, which is kept: float32."""
    return (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()


@jit
def rms_factor_of(x, row, width, eps, BLOCK: tl.constexpr):
    """`rms_factor` of a contiguous row, in Triton."""
    columns = tl.arange(0, BLOCK)
    own = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(own * own, 0) / width + eps)


@jit
def _of_wide_row(x, weight, result, eps, offset, width, columns, BLOCK: tl.constexpr):
    squares = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        own = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        squares += own * own
    norm = tl.rsqrt(tl.sum(squares, 0) / width + eps)
    for begin in range(0, width, BLOCK):
        at = begin + columns
        own = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32) + offset
        y = own * norm * factor
        tl.store(result + at, y.to(result.dtype.element_ty), mask=at < width)


@jit
def _kernel(
    x,
    weight,
    result,
    eps,
    offset,
    width,
    x_stride,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # True if a row has more columns than a block
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x += row * x_stride
    result += row * width
    if WIDE:
        wait_for_previous(PDL)
        _of_wide_row(x, weight, result, eps, offset, width, columns, BLOCK)
    else:
        inside = columns < width
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
        wait_for_previous(PDL)
        own = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
        y = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps) * factor
        tl.store(result + columns, y.to(result.dtype.element_ty), mask=inside)


@rms_norm.kernel
def _launch(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    options = {"WIDE": x.shape[-1] > BLOCK, **overlap_options(x.device)}
    return norm_of_rows("rms_norm", _kernel, x, weight, eps, offset, **options)


def norm_of_rows(
    op: str, kernel: Any, x: Tensor, weight: Tensor, eps: float, offset: float, **options: Any
) -> Tensor | None:
    """The norm of x [..., D] by a Triton kernel, a program a row; None where it does not run.

    Args:
        op: the planned op whose call this is.
        kernel: takes x [M, D], weight [D], the result, eps, offset, D and the distance of rows of x.
        weight, eps, offset: as of `rms_norm`.
        options: further constants and options of the launch.
    """
    width = x.shape[-1]
    if not runs_on(x.device) or x.numel() == 0:
        return None
    ran(op, "triton")
    rows = x.reshape(-1, width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    result = torch.empty(x.shape, dtype=stored_dtype(x.dtype, x.device), device=x.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    launch(
        op,
        (x, weight),
        (result,),
        kernel,
        rows.shape[0],
        (rows, weight.contiguous(), result, eps, offset, width, rows.stride(0)),
        {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16), **options},
    )
    return result.to(x.dtype)
