"""The gate of a feed-forward layer (SwiGLU and GeGLU, arXiv 2002.05202).

    y = activation(f · gate) · (f · up)      in float32, rounded once
    f = 1, or 1 / sqrt(mean(x²) + eps)

    gate, up    float [..., N]
    x           float [..., D] or None: where gate and up are linear in x, and the RMS norm of x comes after them
    activation  "silu", or "gelu_tanh", gelu's approximation by tanh
    y           gate's dtype [..., N], contiguous

On a GPU with programmatic dependent launch the kernel reads x while the previous launch runs, so x must be older than
the launch that made gate and up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.decoding.overlap import launch_dependents, overlap_options, wait_for_previous
from lowbit_kernels.decoding.rms_norm import rms_factor, rms_factor_of
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, stored_dtype, tl, triton

ACTIVATIONS = ("silu", "gelu_tanh")
BLOCK = 256
"""Elements of a program."""


@op(
    "empty(gate.dtype, *gate.shape)",
    gate="float [..., N]",
    up="float [..., N]",
    x="float [..., D]",
    rules={
        "activation in ACTIVATIONS": "activation must be one of {ACTIVATIONS}, got {activation}"
    },
)
def gated_activation(
    gate: Tensor, up: Tensor, x: Tensor | None = None, *, activation: str = "silu", eps: float = 0.0
) -> Tensor:
    """activation(gate) · up, in gate's dtype; see the module's docstring."""
    g, u = gate.float(), up.float()
    if x is not None:
        factor = rms_factor(x, eps)
        g, u = g * factor, u * factor
    turned = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh")
    return (turned * u).to(gate.dtype).contiguous()


reference = gated_activation.reference


@jit
def _kernel(
    gate,
    up,
    x,  # unused unless FACTOR
    result,
    gate_stride,
    up_stride,
    width,
    x_width,
    eps,
    BLOCK: tl.constexpr,
    X_BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if FACTOR:
        factor = rms_factor_of(x, row, x_width, eps, X_BLOCK)
    wait_for_previous(PDL)
    own = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        own, other = own * factor, other * factor
    if SILU:
        y = own * tl.sigmoid(own) * other
    else:  # tanh(z) = 2 sigmoid(2 z) - 1
        y = own * tl.sigmoid(1.5957691216057308 * (own + 0.044715 * own * own * own)) * other
    tl.store(result + row * width + columns, y.to(result.dtype.element_ty), mask=inside)


@gated_activation.kernel
def _launch(gate, up, x, activation, eps) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(gate.device) or gate.numel() == 0:
        return None
    ran("gated_activation", "triton")
    width = gate.shape[-1]
    gates, ups = (t.reshape(-1, width) for t in (gate, up))
    gates, ups = (t if t.stride(1) == 1 else t.contiguous() for t in (gates, ups))
    if x is not None and not x.is_contiguous():  # a copy would be too new to read early
        raise ValueError(f"x must be contiguous, got strides {x.stride()}; pass x.contiguous()")
    result = torch.empty(
        gate.shape, dtype=stored_dtype(gate.dtype, gate.device), device=gate.device
    )
    x_width = 1 if x is None else x.shape[-1]
    with torch.cuda.device_of(gate):
        _kernel[(gates.shape[0], triton.cdiv(width, BLOCK))](
            *(gates, ups, gates if x is None else x, result),
            *(gates.stride(0), ups.stride(0), width, x_width, eps),
            BLOCK=BLOCK,
            X_BLOCK=triton.next_power_of_2(x_width),
            FACTOR=x is not None,
            SILU=activation == "silu",
            **overlap_options(gate.device),
        )
    return result.to(gate.dtype)
