"""The linear of a frozen quantized weight: checks, the choice of a row, autograd.

A condition of `BUILT_IN` decides by shapes, dtypes, devices and the weight's metadata alone. So the weight caches its
last decisions with everything that decided them (`known`), and the next product with equal arguments checks nothing
again. A registered condition may read anything, such as strides or global flags. So each product asks it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit.linear.frozen import built_in, registered
from lowbit.linear.frozen.checks import autocast_inputs, check_addend, check_linear
from lowbit.linear.frozen.row import Row, Weight
from lowbit.linear.operands import Kept, known, remember, rounded_product
from lowbit.tracing import tracer

# Names of this module, because looking up an attribute takes as long as some of these calls.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
# Without this, reading the shape or dtype of a weight goes through its __torch_function__, at microseconds each.
_PlainAttributes = torch._C.DisableTorchFunctionSubclass


def quantized_linear(
    input: Tensor, weight: Weight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """input [..., K] times weight [N, K] transposed, plus bias [N], plus residual [..., N]: [..., N].

    Differentiable in input, bias and residual.

    Raises:
        RuntimeError: the weight requires a gradient; it is quantized for inference and has none.
        ValueError: shapes or dtypes that do not fit, or tensors on several devices.
        NotImplementedError: an input in low bits, or a transform of torch.func.
    """
    x: Tensor = input
    row: Any = None
    arguments: Any = None
    if not _is_compiling():
        is_autocast = _is_any_autocast_enabled()
        if is_autocast:
            x, bias = autocast_inputs(x, weight, bias)
        # All that conditions and checks depend on and that can change during the life of a weight object.
        arguments = (x.shape, x.dtype, x.device, weight.spec, weight.activation, is_autocast)
        if bias is not None:
            arguments += ("bias", bias.shape, bias.dtype, bias.device)
        if residual is not None:
            arguments += ("residual", residual.shape, residual.dtype, residual.device)
        row = known(weight, x, arguments)
    if row is None:
        with _PlainAttributes():
            x, bias, row = _decide(x, weight, bias, residual, arguments)
    if registered.rows:
        with _PlainAttributes():
            row = registered.registered_row(x, weight, bias) or row
    if _is_grad_enabled():
        with _PlainAttributes():
            if weight.requires_grad:
                raise RuntimeError(
                    f"{weight!r} is quantized and cannot be trained: call .requires_grad_(False) on it, or train with "
                    "lowbit.qat.prepare_ and convert afterwards"
                )
            if (
                x.requires_grad
                or (bias is not None and bias.requires_grad)
                or (residual is not None and residual.requires_grad)
            ):
                how = row if tracer.active is None else _TracedRow(row)
                y = rounded_product(x, weight, bias, how)
                return y if residual is None else y + residual
    return _run(row, x, weight, bias, residual)


def any_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`lowbit.inference.linear` in eager code: of a frozen weight, or a plain one."""
    if getattr(weight, "stored_as", None) is not None:
        return quantized_linear(x, weight, bias, residual)
    check_addend("residual", residual, (*x.shape[:-1], weight.shape[0]), x, weight)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


# ---- the decision ------------------------------------------------------------------------------------------


def _decide(
    input: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, arguments: Any
) -> tuple[Tensor, Tensor | None, Row]:
    """Check the arguments, cast them as autocast does, choose the built-in row, and let the weight remember it."""
    check_linear(input, weight, bias)
    check_addend("residual", residual, (*input.shape[:-1], weight.shape[0]), input, weight)
    x, bias = autocast_inputs(input, weight, bias)
    row = built_in.built_in_row(x, weight, bias)
    if arguments is not None:
        remember(weight, x, arguments, row)
    return x, bias, row


def _run(
    row: Row, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Run a product that autograd does not see."""
    if tracer.active is not None:
        with tracer.running(x, weight, row.name):
            return _product(row, x, weight, bias, residual)
    return _product(row, x, weight, bias, residual)


def _product(
    row: Row, x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    if residual is None:
        return row.implementation(x, weight, bias)
    if row.takes_residual and residual.dtype is x.dtype:
        return row.implementation(x, weight, bias, residual)
    return row.implementation(x, weight, bias) + residual


class _TracedRow:
    """A `Row` that a trace notes."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.note: Any = None

    def output(
        self, x: Tensor, weight: Weight, bias: Tensor | None, needs: Sequence[bool]
    ) -> tuple[Tensor, Kept]:
        with tracer.running(x, weight, self.row.name) as self.note:
            return self.row.output(x, weight, bias, needs)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, None]:
        if needs[0]:
            tracer.record(self.note, "grad_input", grad.dtype)
        return self.row.gradients(grad, kept, needs)
