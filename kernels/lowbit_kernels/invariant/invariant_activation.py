"""Activations of feed-forward layers with the same bits on every device.

    y = x / (1 + e^-g(x))      g(x) = x                                        "silu"
                               g(x) = 2 sqrt(2/π) (x + 0.044715 x³)            "gelu_tanh": x (1 + tanh(g(x) / 2)) / 2

    x   float, any shape
    y   x's dtype and shape, contiguous

All operations are float32 and round to nearest once; e^x is that of `arithmetic`, and its argument is kept within
-87 and 88.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_kernels.invariant.arithmetic import EXACT, exp, triton_exp
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton

KINDS = ("silu", "gelu_tanh")
BLOCK = 1024
_SLOPE = 1.5957691669464111  # 2 sqrt(2 / π)
_CUBIC = 0.044714998453855515


@op(
    "empty(x.dtype, *x.shape)",
    planned=True,
    x="float [...]",
    rules={"kind in KINDS": "kind must be one of {KINDS}, got {kind}"},
)
def invariant_activation(x: Tensor, *, kind: str) -> Tensor:
    """The activation `kind` of x, in x's dtype; see the module's docstring."""
    wide = x.float()
    g = wide
    if kind == "gelu_tanh":
        g = (wide * wide * wide * _CUBIC + wide) * _SLOPE
    return (wide / (exp((-g).clamp(-87.0, 88.0)) + 1.0)).to(x.dtype).contiguous()


reference = invariant_activation.reference


@jit
def _kernel(x, result, count, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    g = own
    if IS_GELU:
        g = (own * own * own * 0.044714998453855515 + own) * 1.5957691669464111
    below = triton_exp(tl.minimum(tl.maximum(-g, -87.0), 88.0)) + 1.0
    y = tl.div_rn(own, tl.where(g == g, below, 1.0))
    tl.store(result + at, y.to(result.dtype.element_ty), mask=at < count)


@invariant_activation.kernel
def _launch(x: Tensor, kind: str) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(x.device) or x.numel() == 0:
        return None
    ran("invariant_activation", "triton")
    own = x.contiguous()
    result = torch.empty(x.shape, dtype=stored_dtype(x.dtype, x.device), device=x.device)
    launch(
        "invariant_activation",
        (x,),
        (result,),
        _kernel,
        triton.cdiv(own.numel(), BLOCK),
        (own, result, own.numel()),
        {"IS_GELU": kind == "gelu_tanh", "BLOCK": BLOCK, **EXACT},
    )
    return result.to(x.dtype)
