"""The linear of BitNet b1.58: rounded tokens times a ternary weight, an int8 product with exact sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_first_derivative,
    check_linear,
    unflattened,
)
from lowbit.linear.frozen.ternary import quantize_tokens
from lowbit.linear.low_bit_linear import low_bit_product, transposed
from lowbit.linear.operands import Kept, RoundedLinear
from lowbit.numerics.straight_through import StraightThrough
from lowbit.tracing import tracer
from lowbit.tracing.tracer import Note


def _ternary_product(
    tokens: tuple[Tensor, Tensor],
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The product [M, N] of `quantize_tokens`'s tokens with int8 `codes` [N, K] and their `scale`.

    `lowbit.linear.frozen.ternary` gives the same from codes in 2 bits. Training ternarizes the weight anew for every
    product, so packing the codes would only add work.
    """
    codes = F.pad(codes, (0, -codes.shape[1] % 16))
    out = _narrow(dtype)
    bias = None if bias is None else bias.to(out)
    scales = tokens[1], scale.view(1)
    y = kernels.scaled_mm.scaled_mm(tokens[0], codes, *scales, bias=bias, out_dtype=out)
    return y.to(dtype)


class TernaryOperands(NamedTuple):
    """x rounded a token, and the ternary weight, of which `output` takes the scale, or None: then the weight has it."""

    note: Note | None

    def output(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        needs: Sequence[bool],
        scale: Tensor | None,
    ) -> tuple[Tensor, Kept]:
        tokens = quantize_tokens(x)
        codes, scale = weight.ternary(scale)
        # A gathered weight has its own scale, which FSDP2 overwrites at the next gather.
        own = None if weight.is_gathered else scale
        if self.note is not None:
            tracer.record(self.note, "output", "int8")
        y = _ternary_product(tokens, codes, scale, bias, x.dtype)
        return y, (weight.detach(), own, *(tokens if needs[1] else ()))

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, scale, *tokens = kept
        scheme, note = weight.scheme, self.note
        for_x, for_weight = needs[:2]
        rows, columns = for_x and scheme.grad_input, for_weight and scheme.grad_weight
        grad_x = grad_weight = None
        if rows or for_weight:
            check_first_derivative(weight)
        if rows or columns:
            codes, scales, codes_t, scales_t = kernels.quantize_rowcol.quantize_rowcol(
                grad.to(_narrow(grad.dtype)), "int8", rows=rows, columns=columns
            )
        if for_x:
            ternary, scale = weight.ternary(scale)
            tracer.record(note, "grad_input", "int8" if rows else grad.dtype)
            if rows:
                turned = transposed(ternary, ternary.shape[1], after=grad)
                both = scales, scale.view(1)
                grad_x = kernels.scaled_mm.scaled_mm(
                    codes, turned, *both, out_dtype=_narrow(grad.dtype)
                )
                grad_x = grad_x.to(grad.dtype)
            else:
                grad_x = grad @ (ternary * scale).to(grad.dtype)
        if for_weight:
            x = (tokens[0][:, : weight.shape[1]] * tokens[1][:, None]).to(grad.dtype)
            if columns:
                _, _, *own = kernels.quantize_rowcol.quantize_rowcol(
                    x.to(_narrow(x.dtype)), "int8", rows=False
                )
                terms = (codes_t, scales_t), (own[0], own[1])
                out = _narrow(weight.dtype)
                grad_weight = low_bit_product(note, "grad_weight", "int8", *terms, out)
                grad_weight = grad_weight.to(weight.dtype)
            else:
                tracer.record(note, "grad_weight", grad.dtype)
                grad_weight = (grad.t() @ x).to(weight.dtype)
        return grad_x, grad_weight


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype that int8 products read and write for tensors of `dtype`."""
    return torch.float32 if dtype is torch.float64 else dtype


def bitnet_linear(
    x: Tensor, weight: Any, bias: Tensor | None, scale: Tensor | None = None
) -> Tensor:
    """x [..., K] times the BitNetTensor `weight` [N, K] transposed, plus bias [N]: [..., N] in x's dtype. `scale`: that
    of the whole weight, where `weight` is a part of it.

    Raises ValueError for sizes that do not fit, NotImplementedError for a part without scale.
    """
    # Each attribute of the weight, such as its shape, would pass through `__torch_function__`, in Python.
    with torch._C.DisableTorchFunctionSubclass():
        check_linear(x, weight, bias)
        n, k = weight.shape
        x, bias = autocast_inputs(x, weight, bias)
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    if 0 in (m, n, k):
        tracer.note(m, n, k, "there is nothing to multiply", weight)
        # zeros have the result of a product without terms, and pass a gradient to the weight
        zeros = torch.zeros((n, k), dtype=weight.dtype, device=weight.device)
        values = StraightThrough.apply(weight, zeros)
        return F.linear(x, values.to(x.dtype), bias)
    note = tracer.note(m, n, k, None, weight)
    y = RoundedLinear.apply(x.reshape(m, k), weight, bias, TernaryOperands(note), scale)
    return unflattened(y, x)
