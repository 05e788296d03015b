"""The results of a token's experts, added up by its routing weights.

out[t] = sum_i weights[t, i] · y[t · K + i]      in float32, in the order of i, rounded once

y           float [T · K, N]: a row for each pair of a token and an expert
weights     float [T, K]
out         y's dtype [T, N], contiguous
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton

BLOCK = 1024
"""The most columns of a program."""


@op(
    "empty(y.dtype, T, N)",
    planned=True,
    y="float [P, N]",
    weights="float [T, K]",
    rules={"P == T * K": "y must have a row for each of the {T} x {K} weights, got {P}"},
)
def weighted_sum(y: Tensor, weights: Tensor) -> Tensor:
    """The rows of y added up by their weights; see the module's docstring."""
    rows = y.float().view(*weights.shape, y.shape[1])
    return (rows * weights.float().unsqueeze(-1)).sum(1).to(y.dtype)


reference = weighted_sum.reference


@jit
def _kernel(
    y,
    weights,
    out,
    width,
    y_stride,
    weight_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    across = tl.cdiv(width, BLOCK)
    token = (tl.program_id(0) // across).to(tl.int64)
    columns = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_previous(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        weight = tl.load(weights + token * weight_stride + i).to(tl.float32)
        row = tl.load(y + (token * K + i) * y_stride + columns, mask=inside, other=0.0)
        total += weight * row.to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@weighted_sum.kernel
def _launch(y: Tensor, weights: Tensor) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    (tokens, k), width = weights.shape, y.shape[1]
    if not runs_on(y.device) or 0 in (tokens, k, width):
        return None
    ran("weighted_sum", "triton")
    operands = y, weights
    y, weights = (t if t.stride(1) == 1 else t.contiguous() for t in operands)
    out = torch.empty((tokens, width), dtype=stored_dtype(y.dtype, y.device), device=y.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    if tokens < 64:  # more programs
        block = min(block, 256)
    launch(
        "weighted_sum",
        operands,
        (out,),
        _kernel,
        tokens * triton.cdiv(width, block),
        (y, weights, out, width, y.stride(0), weights.stride(0)),
        {
            **{"K": k, "BLOCK": block, "num_warps": 4 if block > 256 else 1},
            **overlap_options(y.device),
        },
    )
    return out.to(y.dtype)
