"""MixedPrecisionTensor: a high-precision weight whose products run in int8 or float8.

`F.linear` quantizes the input once: along rows for the output, along columns, transposed, for the weight's gradient,
of which backward keeps the one byte an element and not the input. The weight is quantized along rows for the output,
and anew along columns for the input's gradient: that costs a hundredth of the products, keeping it a byte a weight.
The gradient of the output is quantized once too, rows and columns. So every product reads both its operands along
the dimension that it sums over (`lowbit_kernels.scaled_mm`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit import tracer
from lowbit.products import (
    autocast_inputs,
    check_first_derivative,
    check_linear,
    unflattened,
)
from lowbit.tensor.base import InnerShapes, LowbitTensor, aten
from lowbit.tensor.fsdp import as_bytes
from lowbit.tensor.kernels import quantize_rowcol, scaled_mm
from lowbit.tensor.shared_input import quantized_input
from lowbit.tensor.trainable import GatheredForm, TrainableTensor, Values
from lowbit.tracer import Note
from lowbit.train_scheme import MixedPrecision, TrainingScheme

MOST_TERMS = 2**17
"""Of a sum of products of two int8 codes, -127 to 127, that surely stays within an int32."""
Codes = tuple[Tensor, Tensor]
"""Codes [rows, columns rounded up to 16], and the scale of each row or of all."""


class MixedPrecisionTensor(TrainableTensor):
    """A trainable weight [..., N, K] with low-bit products. `weight` is the high-precision tensor inside."""

    already = "prepared for training already; lowbit.train.restore_(model) gives back plain weights"

    scheme: MixedPrecision

    def dequantize(self) -> Tensor:
        """The high-precision weight, in this tensor's dtype, without gradient."""
        return self.weight.detach().to(self.dtype).reshape(self.shape)

    def row_codes(self) -> Codes:
        """The weight [N, K] as the output's product reads it: codes [N, K16]."""
        scheme = self.scheme
        codes, scale, _, _ = quantize_rowcol(
            self.weight, scheme.forward_format, columns=False, tensorwise=scheme.one_scale
        )
        return codes, scale

    def column_codes(self) -> Codes:
        """The weight [N, K] as the product for the input's gradient reads it: codes [K, N16]."""
        scheme = self.scheme
        _, _, codes, scale = quantize_rowcol(
            self._exact(), scheme.forward_format, rows=False, tensorwise=scheme.one_scale
        )
        return codes, scale

    def _exact(self) -> Tensor:
        """The values in the dtype in which there are most of them."""
        return self.weight.detach()

    def rows(self, indices: Tensor) -> Tensor:
        """Some rows of `values()`."""
        return self.weight[indices].to(self.dtype)

    @classmethod
    def meta_from_json(cls, data: Any) -> dict[str, Any]:
        return {"scheme": TrainingScheme.from_dict(data["scheme"])}

    def _wire(self) -> LowbitTensor:
        """Under FSDP2 one byte an element travels, and a scale a row, if no product needs more."""
        scheme = self.scheme
        quantizes = scheme.output and scheme.grad_input
        if not quantizes or not (scheme.always or self.device.type == "cuda"):
            return self
        n, k = self.shape[:-1].numel(), self.shape[-1]
        codes, scale, _, _ = quantize_rowcol(
            self.weight.reshape(n, k),
            scheme.forward_format,
            columns=False,
            tensorwise=scheme.one_scale,
        )
        tensors = {
            "codes": codes.view(*self.shape[:-1], codes.shape[1]),
            "scale": scale.expand(n).contiguous().view(*self.shape[:-1], 1),
        }
        return GatheredMixedPrecision.from_inner(tensors, self.meta(), self.shape, self.dtype)


class GatheredMixedPrecision(GatheredForm, MixedPrecisionTensor):
    """What FSDP2 gathers a MixedPrecisionTensor to: the codes of its rows. Products in high precision, the one for the
    input's gradient, and an embedding tied to it read the weight that they stand for."""

    tensor_attrs: ClassVar[tuple[str, ...]] = ("codes", "scale")

    codes: Tensor
    scale: Tensor

    def _exact(self) -> Tensor:
        codes = self.codes[..., : self.shape[-1]]
        # int8 times float32 is one operation; float8 has no such product
        return codes * self.scale if codes.dtype is torch.int8 else codes.float().mul_(self.scale)

    def dequantize(self) -> Tensor:
        return self._exact().to(self.dtype)

    def row_codes(self) -> Codes:
        return self.codes, self.scale.view(-1)

    def values(self) -> Tensor:
        return self.dequantize()

    def rows(self, indices: Tensor) -> Tensor:
        codes = as_bytes(self.codes)[indices].view(self.codes.dtype)[..., : self.shape[-1]]
        return (codes.float() * self.scale[indices]).to(self.dtype)

    def inner_shapes(self, shape: Sequence[int]) -> InnerShapes:
        padded = -(-shape[-1] // 16) * 16
        return {
            "codes": ((*shape[:-1], padded), self.codes.dtype),
            "scale": ((*shape[:-1], 1), torch.float32),
        }


class _Linear(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed, plus bias [N]: the products that the scheme names in low bits.

    `quantized`: x along rows and columns, as far as products need it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: MixedPrecisionTensor,
        bias: Tensor | None,
        note: Note | None,
        *quantized: Tensor,
    ) -> Tensor:
        scheme = weight.scheme
        codes, scale, codes_t, scale_t = quantized
        ctx.note, ctx.dtype = note, x.dtype
        # an alias: a weight that a graph holds could not be moved or cast, which swaps the tensors of a subclass
        kept = (codes_t, scale_t) if scheme.grad_weight else (x,)
        ctx.save_for_backward(weight.detach(), *(kept if ctx.needs_input_grad[1] else ()))
        if scheme.output:
            rows = weight.row_codes()
            return low_bit_product(
                note, "output", scheme.forward_format, (codes, scale), rows, x.dtype, bias
            )
        tracer.record(note, "output", x.dtype)
        return F.linear(x, weight.values().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        weight, *kept = ctx.saved_tensors
        check_first_derivative(weight)
        scheme, note = weight.scheme, ctx.note
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows, columns = for_x and scheme.grad_input, for_weight and scheme.grad_weight
        fmt = scheme.backward_format
        grad_x = grad_weight = grad_bias = None
        if rows or columns:
            seed = _seed_of(grad, scheme.seed) if scheme.stochastic_rounding else None
            codes, scale, codes_t, scale_t = quantize_rowcol(
                grad, fmt, rows=rows, columns=columns, tensorwise=scheme.one_scale, seed=seed
            )
        if rows:
            other = weight.column_codes()
            grad_x = low_bit_product(note, "grad_input", fmt, (codes, scale), other, ctx.dtype)
        elif for_x:
            tracer.record(note, "grad_input", grad.dtype)
            grad_x = grad @ weight.values().to(grad.dtype)
        if columns:
            own = (codes_t, scale_t)
            grad_weight = low_bit_product(note, "grad_weight", fmt, own, tuple(kept), weight.dtype)
        elif for_weight:
            tracer.record(note, "grad_weight", grad.dtype)
            grad_weight = grad.t() @ kept[0]
        if for_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _seed_of(grad: Tensor, seed: int) -> Tensor:
    """int64 [1]: a function of `seed` and the bits of 64 rows or more of `grad`, whatever the order of summation. So
    nothing counts steps or microbatches, and replicas that have one gradient round it alike."""
    some = grad[:: max(1, grad.shape[0] // 64)].float()
    return (some.view(torch.int32).sum() + seed * 0x9E3779B1).view(1)


def low_bit_product(
    note: Note | None,
    name: str,
    fmt: str,
    a: Codes,
    b: Codes,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """a @ b.T, scaled; sums of int8 products that an int32 might not hold are cut, and the rest added in float32."""
    tracer.record(note, name, fmt)
    if fmt != "int8" or a[0].shape[1] <= MOST_TERMS:
        return scaled_mm(fmt, a[0], b[0], a[1], b[1], bias=bias, out_dtype=dtype)
    parts = zip(a[0].split(MOST_TERMS, 1), b[0].split(MOST_TERMS, 1), strict=True)
    sums = [
        scaled_mm(fmt, p.contiguous(), q.contiguous(), a[1], b[1], out_dtype=torch.float32)
        for p, q in parts
    ]
    y = torch.stack(sums).sum(0)
    return (y if bias is None else y + bias).to(dtype)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, MixedPrecisionTensor) or isinstance(input, LowbitTensor):
        raise NotImplementedError(
            f"linear of a {type(input).__name__} with a {type(weight).__name__}: only the weight may be a "
            "MixedPrecisionTensor; call .dequantize() on the other for a plain tensor"
        )
    check_linear(input, weight)
    x, bias = autocast_inputs(input, weight, bias)
    return mixed_linear(x, weight, bias)


def mixed_linear(x: Tensor, weight: MixedPrecisionTensor, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype.

    In high precision where `LowbitProducts.plain_because` has a reason. Raises ValueError in float64 where it has none.
    """
    scheme = weight.scheme
    n, k = weight.shape
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    why = scheme.plain_because(x.device, m, n, k)
    note = tracer.note(m, n, k, why, weight)
    if why is not None:
        return F.linear(x, Values.apply(weight).to(x.dtype), bias)
    scheme.check_dtype(x.dtype)
    learns = weight.requires_grad and torch.is_grad_enabled()
    columns = scheme.grad_weight and learns
    quantized = quantized_input(
        x,
        scheme.forward_format,
        rows=scheme.output,
        columns=columns,
        tensorwise=scheme.one_scale,
    )
    y = _Linear.apply(x.reshape(m, k), weight, bias, note, *quantized)
    return unflattened(y, x)


MixedPrecisionTensor.products = {F.linear: _linear}


@MixedPrecisionTensor.implements(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Of a weight tied to a linear's; only the rows asked for are made of what FSDP2 gathered."""
    return args[0].rows(args[1])


@MixedPrecisionTensor.implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> LowbitTensor:
    """The high-precision weight takes the dtype asked for: it is the tensor's own memory."""
    self = args[0]
    dtype = kwargs.get("dtype") or self.dtype
    if not dtype.is_floating_point:
        raise self._unsupported(f"conversion to {dtype} (accepted: floating dtypes)")
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)

    def move(t: Tensor) -> Tensor:
        to = dtype if t is getattr(self, "weight", None) else t.dtype
        return t.to(device=device or t.device, dtype=to, non_blocking=non_blocking, copy=True)

    return self._map(move, dtype=dtype)
