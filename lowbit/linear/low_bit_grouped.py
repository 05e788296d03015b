"""The products of experts in int8 or float8, forward and backward, for 3-D weights of schemes with `LowbitProducts`.

A grouped product multiplies rows (tokens), sorted by expert, by the weights of their experts; only the device knows how
many rows each has. As in `low_bit_linear`, every product reads both operands along the dimension that it sums over:

    output       y[m]  = x[m] · w[e]ᵀ        rows of x, rows of w[e], both with a scale a row
    grad_input   dx[m] = dy[m] · w[e]        the same codes of w[e], transposed. Their scales belong to the dimension
                                             that is summed over, so they multiply dy before it is quantized along rows
    grad_weight  dw[e] = dyᵀ · x             over the rows of e: columns of x and dy, a scale a column and expert

`Float8BlockMixedPrecision` has scales of blocks, which no product moves into the gradient: dy is quantized as it is,
and the products are `grouped_block_mm`. Blocks of columns lie within an expert.

So the weight is rounded once. Backward keeps the columns of x, one byte an element. It does not keep the codes of the
weight, which would add half to the memory of all experts in bfloat16. It makes them again, with the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lowbit_kernels as kernels
from lowbit.linear.dequantized import grouped_in_high_precision
from lowbit.linear.frozen.checks import check_first_derivative, in_rows
from lowbit.linear.low_bit_linear import quantized_in_blocks, quantized_input
from lowbit.linear.operands import Kept, rounded_product
from lowbit.tracing import tracer
from lowbit.tracing.tracer import Note
from lowbit_kernels.runtime.seeds import seed_of


def low_bit_grouped_mm(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    """x [M, K] times the experts [E, K, N] of `weight`: [M, N] in x's dtype. Rows that no expert has are 0 after a
    product in low bits, here and in the gradient of x. PyTorch's product leaves them uninitialized.

    `weight`: a TrainableTensor with a scheme of `LowbitProducts`, `expert_codes()` and `expert_codes_t()` of its
    transpose. Runs in high precision where `LowbitProducts.grouped_plain_because` has a reason.
    """
    stored = weight.transpose(-2, -1)
    with torch._C.DisableTorchFunctionSubclass():  # faster
        experts, n, k = stored.shape
        learns = weight.requires_grad and torch.is_grad_enabled()
    m, scheme = x.shape[0], weight.scheme
    why = scheme.grouped_plain_because(x.device, m, experts, n, k)
    most = kernels.scaled_mm.MOST_TERMS
    in_int8 = "int8" in (scheme.forward_format, scheme.backward_format)
    if why is None and in_int8 and max(n, k) > most:
        why = f"sums over more than {most} products may overflow"
    note = tracer.note(m, n, k, why, stored)
    if why is not None:
        return grouped_in_high_precision(x, weight, offsets)
    scheme.check_dtype(x.dtype)
    columns = scheme.grad_weight and learns
    quantized = quantized_input(x, scheme, rows=scheme.output, columns=columns, offsets=offsets)
    how = GroupedOperands(scheme, note)
    return rounded_product(x, stored, None, how, offsets, *quantized)


class GroupedOperands(NamedTuple):
    """x [M, K] and the transposed weights [E, N, K] of the rows' experts: `LowBitOperands` of grouped products."""

    scheme: Any
    note: Note | None

    def output(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        needs: Sequence[bool],
        *others: Any,
    ) -> tuple[Tensor, Kept]:
        """`others`: the offsets, and what `quantized_input` gave. There is no bias."""
        offsets, codes, scale, codes_t, scale_t = others
        scheme = self.scheme
        kept = ((codes_t, scale_t) if scheme.grad_weight else (x,)) if needs[1] else ()
        if not scheme.output:
            tracer.record(self.note, "output", x.dtype)
            values = weight.values().to(x.dtype).transpose(-2, -1)
            y = torch._grouped_mm(x, values, offs=offsets)
            return y, (offsets, weight.detach(), None, *kept)
        w_codes, w_scale = weight.expert_codes()
        if self.note is not None:
            tracer.record(self.note, "output", scheme.forward_format)
        y = self._multiply(codes, w_codes, scale, w_scale, offsets, out_dtype=x.dtype)
        return y, (offsets, weight.detach(), w_scale, *kept)

    @property
    def _multiply(self) -> Callable[..., Tensor]:
        if self.scheme.in_blocks:
            return kernels.grouped_block_mm.grouped_block_mm
        return kernels.grouped_scaled_mm.grouped_scaled_mm

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        offsets, weight, w_scale, *of_x = kept
        check_first_derivative(weight)
        grad = in_rows(grad)
        scheme, note = self.scheme, self.note
        for_x, for_weight = needs[:2]
        rows, columns = for_x and scheme.grad_input, for_weight and scheme.grad_weight
        fmt = scheme.backward_format
        multiply = self._multiply
        grad_x = grad_weight = None
        if rows or columns:
            w_codes: Any = None
            if rows:
                w_codes, w_scale = weight.expert_codes_t(w_scale, after=grad)
            else:
                w_scale = None
            if scheme.in_blocks:
                codes, scale, codes_t, scale_t = quantized_in_blocks(
                    grad, scheme, rows=rows, columns=columns, offsets=offsets
                )
            else:
                seed = seed_of(grad, scheme.seed) if scheme.rounds_stochastically else None
                codes, scale, codes_t, scale_t = kernels.quantize_grouped.quantize_grouped(
                    grad, offsets, fmt, rows=rows, columns=columns, seed=seed, row_factor=w_scale
                )
        if rows:
            tracer.record(note, "grad_input", fmt)
            if not scheme.in_blocks:
                w_scale = scale.new_ones(1)  # the gradient's rows have the weight's scales
            grad_x = multiply(codes, w_codes, scale, w_scale, offsets, out_dtype=grad.dtype)
        elif for_x:
            tracer.record(note, "grad_input", grad.dtype)
            grad_x = torch._grouped_mm(grad, weight.values().to(grad.dtype), offs=offsets)
        if columns:
            tracer.record(note, "grad_weight", fmt)
            grad_weight = multiply(
                codes_t, of_x[0], scale_t, of_x[1], offsets, out_dtype=weight.dtype
            )
        elif for_weight:
            tracer.record(note, "grad_weight", grad.dtype)
            grad_weight = torch._grouped_mm(grad.t(), of_x[0], offs=offsets)
        return grad_x, grad_weight
