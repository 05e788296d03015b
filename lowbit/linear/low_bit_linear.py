"""The products of a linear in int8 or float8, forward and backward, for weights of schemes with `LowbitProducts`.

    y  = x̂ ŵᵀ                   x rounded along its rows; ŵ = scale[n] · codes[n, k], a scale a row
    dx = (dy · scale)^ codes    dy times the weight's scales, rounded along its rows
    dw = dŷᵀ x̂                  both rounded along the columns of dy and x

Both products of the weight read the same codes, since its scales can be moved into dy. So the gradient is that of the
weight that the output saw. With a scale a row it is the same where FSDP2 gathers codes and where the weight is whole;
with one scale a tensor, each shard has its own. The input is quantized once, along rows and, transposed, along columns.
Backward keeps the latter, one byte an element, and not the input.

`Float8BlockMixedPrecision` has a scale for each 128 elements along that dimension instead. Its products are
`block_scaled_mm`, and scales are then matrices.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit.linear.dequantized import DequantizedOperands
from lowbit.linear.frozen.checks import (
    autocast_inputs,
    check_linear,
    flattened,
    refuse_second_derivative,
    remembered,
    unflattened,
)
from lowbit.linear.operands import Kept, Values, remember, rounded_product
from lowbit.tracing import tracer
from lowbit.tracing.tracer import Note

_is_compiling = torch.compiler.is_dynamo_compiling

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]
"""Codes and scales of a matrix along its rows, and of its transpose along its columns."""
Codes = tuple[Tensor, Tensor]
"""Codes [rows, columns rounded up to 16], and the scale of each row or of all. In blocks: codes [rows, columns rounded
up to 128], and scales as `lowbit_kernels.matmul.block_scaled_mm` takes them."""
Operand = tuple[Tensor, Tensor | None]
"""Codes and scales of a weight, or its values in high precision and None."""


def low_bit_linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N]: [..., N] in x's dtype.

    `weight`: a TrainableTensor with a scheme of `LowbitProducts` and `product_operand()`, or, where the scheme
    `makes_codes`, `row_codes()` and `transposed_codes()`. Runs in high precision where `LowbitProducts.plain_because`
    has a reason. Raises ValueError in float64 where it has none.
    """
    # Each attribute of the weight, such as its shape, would pass through `__torch_function__`, in Python.
    with torch._C.DisableTorchFunctionSubclass():
        given = x
        x, bias, arguments, how = remembered(x, weight, bias)
        if how is None:
            x, bias, how = _decide(x, weight, bias)
            if how is None:
                return F.linear(x, Values.apply(weight).to(x.dtype), bias)
            if arguments is not None:
                remember(weight, x, arguments, how)
        if how is DequantizedOperands:
            return rounded_product(x, weight, bias, DequantizedOperands.of(weight))
        scheme = how.scheme
        columns = scheme.grad_weight and weight.requires_grad and torch.is_grad_enabled()
        quantized = quantized_input(x, scheme, rows=scheme.output, columns=columns, given=given)
        return rounded_product(x, weight, bias, how, *quantized)


def _decide(
    x: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, LowBitOperands | type[DequantizedOperands] | None]:
    """Check the operands, cast them as autocast does, and choose the operands of the product: `DequantizedOperands`
    itself, which are made for each, or None for a product in high precision that torch differentiates."""
    check_linear(x, weight, bias)
    x, bias = autocast_inputs(x, weight, bias)
    scheme, bits = weight.scheme, getattr(weight, "code_bits", None)
    n, k = weight.shape
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    why = scheme.plain_because(x.device, m, n, k)
    if bits is not None and (why is not None or weight.transposed):
        why = f"int{bits} weight, dequantized: {why or 'its scales belong to columns'}"
    note = tracer.note(m, n, k, why, weight)
    if why is not None:
        return x, bias, None if bits is None else DequantizedOperands
    scheme.check_dtype(x.dtype)
    choices = Choices(*(getattr(scheme, name) for name in Choices._fields))
    return x, bias, LowBitOperands(choices, note, type(weight).__name__, weight.dtype, k)


class Choices(NamedTuple):
    """The attributes of a `LowbitProducts` that products read. There most are properties, which take longer to read."""

    output: bool
    grad_input: bool
    grad_weight: bool
    forward_format: str
    backward_format: str
    rounds_stochastically: bool
    seed: int
    one_scale: bool
    in_blocks: bool
    power_of_two: bool
    makes_codes: bool
    input_rounding: tuple[Any, ...]


class LowBitOperands(NamedTuple):
    """The products that `scheme` names run in low bits, the others in high precision.

    `output` takes besides x, the weight and the bias what `quantized_input` gave: codes and scales of x along its rows
    and along its columns, [0, 0] for those that no product needs.
    """

    scheme: Choices
    note: Note | None
    kind: str
    """The name of the weight's class, for an error."""
    dtype: torch.dtype
    """The dtype of the weight."""
    k: int

    def output(
        self,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        needs: Sequence[bool],
        codes: Tensor,
        scale: Tensor,
        codes_t: Tensor,
        scale_t: Tensor,
    ) -> tuple[Tensor, Kept]:
        scheme = self.scheme
        # Autograd compares the versions of what is kept, so it refuses a backward pass after an update of the weight.
        # The inner tensors have the weight's version, and making them takes less time than an alias.
        reads = scheme.output or scheme.grad_input
        operand = weight.product_operand() if reads and not scheme.makes_codes else None
        own: Kept
        if operand is None or not scheme.grad_input:
            own = weight.detach(), None, None
        else:
            own = *operand, weight.row_counter()
        kept = ((codes_t, scale_t) if scheme.grad_weight else (x,)) if needs[1] else ()
        if self.note is not None:
            tracer.record(self.note, "output", scheme.forward_format if scheme.output else x.dtype)
        if not scheme.output:
            y = F.linear(flattened(x), weight.values().to(x.dtype), bias)
        elif operand is None:
            y = _product((codes, scale), weight.row_codes(), x.dtype, bias)
        elif operand[1] is None:
            y = kernels.linear_output.linear_output(
                codes,
                scale,
                operand[0],
                scheme.forward_format,
                tensorwise=scheme.one_scale,
                bias=bias,
                out_dtype=x.dtype,
            )
        else:
            stored, w_scale = operand
            stored = F.pad(stored, (0, extra)) if (extra := -stored.shape[1] % 16) else stored
            y = _product((codes, scale), (stored, w_scale), x.dtype, bias)
        return unflattened(y, x), (*own, *kept)

    def gradients(
        self, grad: Tensor, kept: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        refuse_second_derivative("a linear of {}", self.kind)
        scheme, note, given, grad = self.scheme, self.note, grad, flattened(grad)
        stored, w_scale, _, *of_x = kept
        for_x, for_weight = needs[:2]
        low = scheme.grad_input and for_x, scheme.grad_weight and for_weight
        grad_x = grad_weight = None
        if any(low):
            turned: Operand | None = None
            if low[0] and scheme.makes_codes:
                turned = stored.transposed_codes(after=grad)
            elif low[0] and w_scale is None:
                turned = stored, None
            elif low[0]:
                turned = transposed(stored, self.k, grad), w_scale
            own = tuple(of_x) if low[1] else None
            grad_x, grad_weight = low_bit_gradients(note, scheme, grad, turned, own, self.dtype)
        if for_x and not low[0]:
            tracer.record(note, "grad_input", grad.dtype)
            grad_x = grad @ stored.values().to(grad.dtype)
        if for_weight and not low[1]:
            tracer.record(note, "grad_weight", grad.dtype)
            grad_weight = grad.t() @ flattened(of_x[0])
        return None if grad_x is None else unflattened(grad_x, given), grad_weight


def low_bit_gradients(
    note: Note | None,
    scheme: Any,
    grad: Tensor,
    weight: Operand | None,
    x: Codes | None,
    dtype: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x [M, K], in grad's dtype, and of the weight [N, K], in `dtype`, from grad [M, N].

    Args:
        weight: codes [K, N16] and scales [N] or [1], or the weight [N, K] in high precision and None. With several
            scales, as shards have, the gradient gets a scale a row even in a tensorwise scheme.
        x: codes [K, M16] and scales [K] or [1].

    None for one of them skips the gradient that needs it.
    """
    fmt = scheme.backward_format
    if scheme.in_blocks:
        return _block_gradients(note, scheme, grad, weight, x, dtype)
    if note is not None and weight is not None and x is not None:
        # A trace tells the kernels of two products apart by the calls between which they run.
        of_x, _ = low_bit_gradients(note, scheme, grad, weight, None, dtype)
        return of_x, low_bit_gradients(note, scheme, grad, None, x, dtype)[1]
    if note is not None:
        tracer.record(note, "grad_input" if x is None else "grad_weight", fmt)
    several = weight is not None and weight[1] is not None and weight[1].numel() != 1
    stochastic = scheme.rounds_stochastically
    grad_x, grad_weight = kernels.linear_gradients.linear_gradients(
        grad,
        fmt,
        *(weight or (None, None)),
        *(x or (None, None)),
        stochastic=stochastic,
        seed=scheme.seed if stochastic else 0,
        tensorwise=scheme.one_scale and not several,
        dtype=dtype,
    )
    return None if weight is None else grad_x, None if x is None else grad_weight


def _block_gradients(
    note: Note | None, scheme: Any, grad: Tensor, weight: Any, x: Codes | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """`low_bit_gradients` where scales are those of blocks, which no product moves into the gradient."""
    fmt = scheme.backward_format
    codes, scale, codes_t, scale_t = quantized_in_blocks(
        grad, scheme, rows=weight is not None, columns=x is not None
    )
    grad_x = grad_weight = None
    if weight is not None:
        grad_x = low_bit_product(note, "grad_input", fmt, (codes, scale), weight, grad.dtype)
    if x is not None:
        grad_weight = low_bit_product(note, "grad_weight", fmt, (codes_t, scale_t), x, dtype)
    return grad_x, grad_weight


def transposed(codes: Tensor, columns: int, after: Tensor | None = None) -> Tensor:
    """The first `columns` columns of codes [N, K16] as codes [columns, N16]; `after` as of the kernel."""
    return kernels.transpose_codes.transpose_codes(codes.unsqueeze(0), columns, after).squeeze(0)


def low_bit_product(
    note: Note | None, name: str, fmt: str, a: Codes, b: Codes, dtype: torch.dtype
) -> Tensor:
    """a @ b.T by the kernels, [M, N].

    Args:
        note: what a trace notes of the call, or None.
        name: of the product, for the trace: one of `PRODUCTS`.
        fmt: the format of a and b as `quantize_rowcol` names it, for the trace.
        a, b: codes [M, K] and [N, K], and their scales.
        dtype: of the result.
    """
    if note is not None:
        tracer.record(note, name, fmt)
    return _product(a, b, dtype)


def _product(a: Codes, b: Codes, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a @ b.T, scaled."""
    if a[1].dim() == 2:
        return kernels.block_scaled_mm.block_scaled_mm(
            a[0], b[0], a[1], b[1], bias=bias, out_dtype=dtype
        )
    return kernels.scaled_mm.scaled_mm(a[0], b[0], a[1], b[1], bias=bias, out_dtype=dtype)


# ---- the quantized input, shared by layers that read the same one ---------------------------------------------------

Made = TypeVar("Made", bound=tuple[Tensor, ...])

_last: tuple[weakref.ref[Tensor], Any, Any] | None = None


def quantized_in_blocks(
    x: Tensor, scheme: Any, *, rows: bool, columns: bool, offsets: Tensor | None = None
) -> Quantized:
    """Codes and scales of groups of x [M, K] along its rows, and of its transpose along its columns, those of each
    expert apart if there are `offsets`."""
    return kernels.quantize_blocks.quantize_blocks(
        x,
        tiles=False,
        rows=rows,
        columns=columns,
        power_of_two=scheme.power_of_two,
        offsets=offsets,
    )


def _quantize(x: Tensor, scheme: Any, *, rows: bool, columns: bool) -> Quantized:
    """Codes and scales of x [M, K] along its rows, and of its transpose along its columns, in the scheme's forward
    format."""
    if scheme.in_blocks:
        return quantized_in_blocks(x, scheme, rows=rows, columns=columns)
    return kernels.quantize_rowcol.quantize_rowcol(
        x, scheme.forward_format, rows=rows, columns=columns, tensorwise=scheme.one_scale
    )


class _Same:
    """A tensor in a key, equal to itself only."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and self.tensor is other.tensor
            and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def quantized_input(
    x: Tensor,
    scheme: Any,
    *,
    rows: bool,
    columns: bool,
    offsets: Tensor | None = None,
    given: Tensor | None = None,
) -> Quantized:
    """Codes and scales of an input in the scheme's forward format, without gradient. Layers that read the same input
    share them (`of_last_input`).

    Args:
        x: [..., K], viewed as [M, K].
        scheme: of training.
        rows, columns: True for codes along the rows of x, and along its columns.
        offsets: the ends of each expert's rows, whose columns are quantized apart, or None.
        given: the layer's input, of which x is a cast, or None.
    """
    grouped = None if offsets is None or torch.compiler.is_compiling() else _Same(offsets)

    def found() -> Quantized:
        flat, fmt = x.detach(), scheme.forward_format
        flat = flat if flat.ndim == 2 else flat.reshape(-1, x.shape[-1])
        if offsets is None:
            return _quantize(flat, scheme, rows=rows, columns=columns)
        if scheme.in_blocks:
            return quantized_in_blocks(flat, scheme, rows=rows, columns=columns, offsets=offsets)
        if columns:
            return kernels.quantize_grouped.quantize_grouped(flat, offsets, fmt, rows=rows)
        # rows do not depend on the expert
        return kernels.quantize_rowcol.quantize_rowcol(flat, fmt, rows=rows, columns=False)

    key = scheme.input_rounding, rows, columns, grouped, x.dtype
    return of_last_input(x if given is None else given, key, found)


def of_last_input(x: Tensor, key: tuple[Any, ...], found: Callable[[], Made]) -> Made:
    """`found()`, a function of x and `key`, or the last result again if both are the last ones, as for the layers of
    query, key and value.

    Only results of autograd are shared. Leaves may be rewritten without a new version, as a CUDA graph does with its
    inputs and results. Under torch.compile the compiler merges equal operations itself.
    """
    global _last
    if _is_compiling() or x.grad_fn is None or torch.compiler.is_compiling():
        return found()
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    key = (x._version, captured, *key)
    last = _last
    if last is not None and last[0]() is x and last[1] == key:
        return last[2]
    made = found()
    _last = (weakref.ref(x, _forget), key, made)
    return made


def _forget(reference: weakref.ref[Tensor]) -> None:
    """Frees the codes together with their input."""
    global _last
    if _last is not None and _last[0] is reference:
        _last = None
