"""Choose the implementation of each product of a quantized weight, and run it.

Every `F.linear` with a quantized weight, and every `lowbit.inference.linear`, ends in `quantized_linear`. It goes
through a list of rows (condition, implementation) and runs the first whose condition holds: first the registrations
of `register_linear`, the last registered first; then `BUILT_IN`, the literal list at the end of this file.

A condition of `BUILT_IN` decides by shapes, dtypes, devices and the weight's metadata alone. So the weight caches its
last decisions with everything that decided them (`_Known`), and the next product with equal arguments checks nothing
again. A registered condition may read anything, such as strides or global flags. So each product asks it again.

A kernel or backend is one registration:

    @register_linear(lambda x, w, bias: x.is_cuda and w.spec.format == Int(4))
    def my_linear(x, w, bias):
        return ...

Representations import this module, so conditions read `weight.stored_as`, `weight.spec` and `weight.activation` instead
of asking for a class.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit_kernels as kernels
from lowbit import tracer
from lowbit.granularity import PerBlock, PerGroup, PerRow, PerToken
from lowbit.scheme import Float8, Int, Spec
from lowbit_kernels.weight_operands import GROUP_STEP, HALVES

Weight = Any
"""A LowbitTensor [N, K] with the attributes of an AffineTensor. Both import this module, so it does not name them."""
Condition = Callable[[Tensor, Weight, Tensor | None], bool]
Implementation = Callable[..., Tensor]
"""(x, weight, bias) -> product, or (x, weight, bias, residual) -> product + residual."""


class Row(NamedTuple):
    """One row of the list."""

    name: str
    """The name in reports."""
    condition: Condition
    implementation: Implementation
    takes_residual: bool = False
    source: str = ""
    """Names the code of a registration for the caches of compiled graphs; empty for built-in rows."""


# ---- the public product ------------------------------------------------------------------------------------

# Names of this module, because looking up an attribute takes as long as some of these calls.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_has_transforms = torch._C._are_functorch_transforms_active
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
        if type(x) is Tensor and not _has_transforms():
            for known in weight._known_products:
                if known.arguments == arguments:
                    row = known.row
                    break
    if row is None:
        with _PlainAttributes():
            x, bias, row = _decide(x, weight, bias, residual, arguments)
    if _registered:
        with _PlainAttributes():
            row = _registered_row(x, weight, bias) or row
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
                y = _Linear.apply(x, weight, bias, row)
                return y if residual is None else y + residual
    return _run(row, x, weight, bias, residual)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`x` [..., K] times `weight` [N, K] transposed, plus `bias` [N] and `residual` [..., N].

    Returns [..., N] in x's dtype, or in the dtype that a residual of another dtype promotes it to. On a GPU, in
    16 bits, the decode and large-batch kernels of `lowbit_kernels` add the residual before they round: it costs neither
    a launch nor a second rounding. All other products, and those that autograd differentiates, add it afterwards.

        h = lowbit.inference.linear(attended, block.out.weight, residual=h)

    Raises:
        ValueError: shapes or dtypes that do not fit.
        RuntimeError: the same with a plain weight, from F.linear.
    """
    if getattr(weight, "stored_as", None) is not None:
        return quantized_linear(x, weight, bias, residual)
    _check_addend("residual", residual, (*x.shape[:-1], weight.shape[0]), x, weight)
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


# ---- the decision ------------------------------------------------------------------------------------------


_MOST_KNOWN = 4
"""Decisions that a weight remembers: prefill and decoding alternate, with and without a residual."""


class _Known:
    """A decision on a weight: for such `arguments`, this row of `BUILT_IN`. Never changed, only replaced."""

    __slots__ = ("arguments", "row")

    def __init__(self, arguments: tuple[Any, ...], row: Row) -> None:
        self.arguments, self.row = arguments, row

    def __deepcopy__(self, memo: Any) -> _Known:
        """The decision holds for a copy of the weight too."""
        return self


def _decide(
    input: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, arguments: Any
) -> tuple[Tensor, Tensor | None, Row]:
    """Check the arguments, cast them as autocast does, choose the built-in row, and let the weight remember it."""
    check_linear(input, weight)
    n = weight.shape[0]
    _check_addend("bias", bias, (n,), input, weight)
    _check_addend("residual", residual, (*input.shape[:-1], n), input, weight)
    x, bias = autocast_inputs(input, weight, bias)
    row = _built_in_row(x, weight, bias)
    if arguments is not None and type(x) is Tensor:
        # A list is searched faster than a spec is hashed. It is replaced, because other threads may search it.
        latest = weight._known_products[: _MOST_KNOWN - 1]
        weight._known_products = (_Known(arguments, row), *latest)
    return x, bias, row


def choose_linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Row:
    """The first row whose condition holds for this product."""
    return _registered_row(x, weight, bias) or _built_in_row(x, weight, bias)


def _registered_row(x: Tensor, weight: Weight, bias: Tensor | None) -> Row | None:
    for row in _registered:
        if row.condition(x, weight, bias):
            return row
    return None


def _built_in_row(x: Tensor, weight: Weight, bias: Tensor | None) -> Row:
    return next(row for row in BUILT_IN if row.condition(x, weight, bias))


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


class _Linear(torch.autograd.Function):
    """The same for every implementation: the gradient of the input is a product with the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, row: Row) -> Tensor:
        # Save an alias: a weight that a graph holds could not be moved or cast, because torch then swaps the tensors.
        ctx.save_for_backward(weight.detach())
        ctx.note = None
        if tracer.active is None:
            return _product(row, x, weight, bias, None)
        with tracer.running(x, weight, row.name) as ctx.note:
            return _product(row, x, weight, bias, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            tracer.record(ctx.note, "grad_input", grad.dtype)
            with _PlainAttributes():
                grad_x = grad @ weight.dequantize().to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad
        return grad_x, None, grad_bias, None


# ---- registrations -----------------------------------------------------------------------------------------


def register_linear(
    condition: Condition, impl: Implementation | None = None, *, takes_residual: bool = False
) -> Callable[[Implementation], Implementation]:
    """Try `impl` before everything that is in the list; as `@register_linear(condition)`, a decorator.

    Args:
        condition: `(x, weight, bias) -> bool`, of the activation [..., K], the quantized weight [N, K] and the bias [N]
            or None. Every product asks it, also about strides or global flags, so it should be cheap. Any size may
            be 0. Check `weight.stored_as` before reading `weight.codes` ("integers", "float8", "ternary", or the
            name that your own tensor class gives).
        impl: `(x, weight, bias) -> Tensor`, [..., N] in x's dtype. It needs no gradient: those of input, bias and
            residual are computed in the same way for all implementations.
        takes_residual: `impl` may be called with a fourth argument, a tensor [..., N] of x's dtype that it adds.

    A kernel that torch.compile cannot trace is an op of torch.library; `impl` calls the op. Its launcher calls
    `lowbit_kernels.launches.ran`, so that `lowbit.trace` names the kernel.

    A compiled model asks the condition while it compiles. After a registration, call `torch._dynamo.reset()`: torch
    does not notice that a graph is out of date. torch's caches on disk tell registrations apart by the files that
    define the two functions, not by the modules that those import. Functions with a closure, methods, and functions
    without a file share no graph with another process.

    Returns:
        The decorator.

    Raises TypeError for anything but functions.
    """

    for given in (condition, condition if impl is None else impl):
        if not callable(given):
            raise TypeError(
                "register_linear takes functions, condition(x, weight, bias) -> bool and impl(x, weight, bias), got "
                f"{given!r}"
            )

    def register(fn: Implementation) -> Implementation:
        global _registered
        name = getattr(fn, "__name__", type(fn).__name__)
        source = f"{_source(condition)} {_source(fn)} {takes_residual}"
        _registered = (Row(name, condition, fn, takes_residual, source), *_registered)
        return fn

    if impl is not None:
        register(impl)
    return register


def unregister_linear(impl: Implementation) -> None:
    """Remove every registration of `impl`.

    Raises ValueError if there is none.
    """
    global _registered
    kept = tuple(row for row in _registered if row.implementation is not impl)
    if len(kept) == len(_registered):
        names = [row.name for row in _registered]
        raise ValueError(f"{impl!r} is not registered; registered: {names}")
    _registered = kept


def registered_sources() -> tuple[str, ...]:
    """What the keys of compiled graphs need to know of the registrations, the last first."""
    return tuple(row.source for row in _registered)


def _source(fn: Callable[..., Any]) -> str:
    """A digest of the file and the position in it of a function; random where these do not tell what it computes."""
    code = getattr(fn, "__code__", None)
    has_state = getattr(fn, "__closure__", None) or hasattr(fn, "__self__")
    if code is None or has_state or not os.path.isfile(code.co_filename):
        return os.urandom(16).hex()
    digest = hashlib.sha256(Path(code.co_filename).read_bytes())
    digest.update(repr((fn.__module__, fn.__qualname__, *code.co_positions())).encode())
    return digest.hexdigest()


# ---- checks ------------------------------------------------------------------------------------------------
# The ops of lowbit_kernels check the tensors that they get, when the layouts are new. These checks come first, because
# PyTorch's rows would broadcast a bias or a residual of another shape, and because only they can name the weight. They
# run once for each decision that a weight remembers.


def check_linear(x: Any, weight: Weight) -> None:
    """Raise ValueError unless x [..., K] and a weight [N, K] fit and are on one device, and NotImplementedError for an
    x in low bits and inside of torch.func."""
    if weight.ndim != 2:
        raise ValueError(
            f"linear takes a weight [N, K], got {weight!r}; index one expert of a 3-D weight first"
        )
    if tracer.is_low_bit(x):
        raise x._unsupported(
            "linear with it as the input (accepted: a plain input and a low-bit weight)"
        )
    if x.device != weight.device:
        raise ValueError(
            f"linear of an input on {x.device} with a weight on {weight.device}; accepted: both on one device, by "
            "model.to(device) or input.to(device)"
        )
    if x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear of input {tuple(x.shape)} with weight {tuple(weight.shape)}: K differs"
        )
    if not torch.compiler.is_compiling() and _has_transforms():
        raise weight._unsupported(
            "torch.func's transforms, such as grad and vmap (accepted: backward() and torch.autograd.grad)"
        )


def _check_addend(
    name: str, addend: Tensor | None, shape: tuple[int, ...], x: Tensor, weight: Tensor
) -> None:
    """Raise ValueError unless the bias or residual has this shape and is on the weight's device."""
    if addend is not None and addend.shape != shape:
        raise ValueError(
            f"linear of input {tuple(x.shape)} with weight {tuple(weight.shape)} takes a {name} of shape {shape}, got "
            f"{tuple(addend.shape)}"
        )
    if addend is not None and addend.device != weight.device:
        raise ValueError(
            f"linear of a {name} on {addend.device} with a weight on {weight.device}; accepted: both on one device, by "
            f"model.to(device) or {name}.to(device)"
        )


def check_first_derivative(weight: Weight) -> None:
    """Raise NotImplementedError in a backward pass that itself should be differentiated."""
    if _is_differentiated():
        raise weight._unsupported(f"second derivatives ({_FIRST_ONLY})")


def refuse_second_derivative(what: str) -> None:
    """`check_first_derivative` where no weight is at hand, for an error that names `what`."""
    if _is_differentiated():
        raise NotImplementedError(f"second derivatives of {what} ({_FIRST_ONLY})")


_FIRST_ONLY = "accepted: backward() and autograd.grad without create_graph=True"


def _is_differentiated() -> bool:
    # AOTAutograd needs no second derivative, but traces with gradients enabled.
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def autocast_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: str = "linear"
) -> tuple[Tensor, Tensor | None]:
    """Cast x and bias as `F.linear` does under autocast; the weight's values are cast once dequantized.

    Raises ValueError where, without autocast, x and the weight or the bias differ in dtype. `product`: how the message
    names it.
    """
    takes_part = not x.is_meta and x.dtype is not torch.float64
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # the last takes longer
    if takes_part and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
        return x, None if bias is None else bias.to(x.dtype)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"{product} of a {x.dtype} input with a weight of dtype {weight.dtype}: convert one "
            "(model.to(dtype) keeps the codes) or use torch.autocast"
        )
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(
            f"{product} of a {x.dtype} input with a bias of dtype {bias.dtype}: convert it (bias.to(x.dtype)) or use "
            "torch.autocast"
        )
    return x, bias


def unflattened(y: Tensor, x: Tensor) -> Tensor:
    """The product y [M, N] of a flattened input as [..., N], where x is [..., K]; no view, of which FSDP2 warns."""
    return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], y.shape[1]])


# ---- int4 and int8 weights, activations in 16 bits ---------------------------------------------------------
# Not for float32, where a converted model has the outputs of the model prepared for QAT, to the bit. In 16 bits the
# weights are equal to the bit, but the decode kernel does not round them to 16 bits.


def _has_weight_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """For a weight [..., N, K] in signed integers of 4 or 8 bits, with integer zero points or none."""
    if x.dtype not in HALVES or x.device.type not in ("cpu", "cuda"):
        return False
    if weight.stored_as != "integers" or weight.transposed:
        return False
    spec = weight.spec
    if spec.format not in (Int(4), Int(8)) or spec.zero_point_is_value:
        return False
    if spec.format.bits == 8 and weight.activation is not None:
        return False  # int8 by int8 is faster
    if isinstance(spec.granularity, PerGroup):
        return spec.granularity.group_size % GROUP_STEP == 0
    return isinstance(spec.granularity, PerRow)


def weight_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """A kernel unpacks the codes in registers. The activation is rounded before, if the scheme quantizes it."""
    if weight.activation is not None:
        x = weight.rounded_input(x)
    tensors = (x, weight.codes, weight.scale, weight.zero_point, bias, residual)
    return kernels.weight_linear.weight_linear(*tensors, group_size=_group_size(x, weight))


def _group_size(x: Tensor, weight: Weight) -> int:
    """Elements of a row that share a scale."""
    granularity = weight.spec.granularity
    return granularity.group_size if type(granularity) is PerGroup else max(x.shape[-1], 1)


# ---- activations and weights in 8 bits ---------------------------------------------------------------------


def _is_rowwise(weight: Weight, format: Int | Float8) -> bool:
    """One symmetric scale a row of the weight and a token of the activation, both in `format`."""
    spec, activation = weight.spec, weight.activation
    return (
        weight.stored_as in ("integers", "float8")
        and activation is not None
        and not weight.transposed
        and weight.zero_point is None
        and isinstance(spec.granularity, PerRow)
        and isinstance(activation.granularity, PerToken)
        and activation.mapping.startswith("symmetric")
        and spec.format == activation.format == format
    )


def _has_dynamic_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return x.is_cuda and (_fits_int8_kernel(x, weight) or _fits_float8_kernel(x, weight))


def _fits_int8_kernel(x: Tensor, weight: Weight) -> bool:
    return (
        x.dtype in HALVES
        and _is_rowwise(weight, Int(8))
        and weight.activation.mapping == "symmetric_no_clipping_err"  # the kernel's own
        and 0 < weight.shape[1] <= kernels.dynamic_linear.MOST_K
    )


def _fits_float8_kernel(x: Tensor, weight: Weight) -> bool:
    return (
        x.dtype is torch.bfloat16  # the output dtype of row-wise _scaled_mm
        and _is_rowwise(weight, Float8())
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and x.numel() > 0
        and all(size % 16 == 0 for size in weight.shape)
    )


def dynamic_linear(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """int8 by int8 or float8 by float8 on a GPU. The op quantizes the tokens; scales, bias and residual are fused."""
    tracer.multiplies_in(kernels.dynamic_linear.FORMATS[weight.codes.dtype])
    codes, scale = weight.codes, weight.scale
    return kernels.dynamic_linear.dynamic_linear(x, codes, scale, bias, residual)


_BLOCK = 128


def _has_block_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """e4m3 weights with a scale for each 128 x 128, and inputs with one for each 128."""
    activation = weight.activation
    return (
        weight.stored_as == "float8"
        and activation is not None
        and not weight.transposed
        and weight.spec.format == activation.format == Float8()
        and weight.spec.granularity == PerBlock(_BLOCK, _BLOCK)
        and activation.granularity == PerGroup(_BLOCK)
        and x.dtype is not torch.float64
        and kernels.block_scaled_mm.runs_on(x.device)
    )


def block_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """float8 by float8 in blocks: x is quantized in groups of 128, and the sum of each is scaled in float32."""
    tracer.multiplies_in("e4m3")
    k = x.shape[-1]
    codes, scale, _, _ = kernels.quantize_blocks.quantize_blocks(
        x.reshape(math.prod(x.shape[:-1]), k), tiles=False, columns=False
    )
    own = weight.codes[: weight.shape[0]]  # without the rows of padding
    y = kernels.block_scaled_mm.block_scaled_mm(
        codes, own, scale, weight.scale.float(), bias=bias, out_dtype=x.dtype
    )
    return unflattened(y, x)


_NAMES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""Formats of operands, as traces name them."""


def _has_static_scale(weight: Weight) -> bool:
    """One symmetric scale a row of the weight, and one for all inputs, whose integer zero point may be any."""
    spec, activation = weight.spec, weight.activation
    return (
        activation is not None
        and activation.static
        and weight.stored_as in ("integers", "float8")
        and not weight.transposed
        and weight.zero_point is None
        and isinstance(spec.granularity, PerRow)
        and not activation.zero_point_is_value
    )


def _has_static_kernel(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    """On a GPU, for symmetric inputs. float8 as `scaled_mm` multiplies it, on a GPU that has the units."""
    if not x.is_cuda or not _has_static_scale(weight) or weight.activation.has_zero_point:
        return False
    n, k = weight.shape
    formats = weight.activation.format.dtype, weight.spec.format.dtype
    fits = formats in kernels.scaled_mm.OPERANDS and x.dtype is not torch.float64
    if k % 16 or 0 in (x.numel(), n) or not fits:
        return False
    if weight.spec.format.dtype is torch.int8:
        return weight.spec.format == Int(8) and k <= kernels.dynamic_linear.MOST_K
    return n % 16 == 0 and torch.cuda.get_device_capability(x.device) >= (8, 9)


def static_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 or float8 by float8 on a GPU, by the kernel of the dynamic schemes. No pass over x finds a scale."""
    codes, scale, _ = weight.quantized_input(x.reshape(-1, x.shape[-1]))
    tracer.multiplies_in(_NAMES[codes.dtype])
    y = kernels.scaled_mm.scaled_mm(
        codes,
        weight.codes,
        scale.view(1),
        weight.scale.float().flatten(),
        bias=bias,
        out_dtype=x.dtype,
    )
    return unflattened(y, x)


def _can_static_int_mm(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    if not _has_static_scale(weight) or weight.spec.format != Int(8):
        return False
    fmt = weight.activation.format
    if not isinstance(fmt, Int) or not fmt.signed:
        return False
    terms = 2 if weight.activation.has_zero_point else 1  # sums of both must fit in int32
    return _fits_int_mm(x, weight, kernels.dynamic_linear.MOST_K // terms)


def int8_static_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 in torch._int_mm. A zero point z takes z times the sum of a row of the weight from each product."""
    codes, scale, zero_point = weight.quantized_input(x.reshape(-1, x.shape[-1]))
    tracer.multiplies_in("int8")
    sums = kernels.scaled_mm.int8_sums(codes, weight.codes)
    if zero_point is not None:
        sums = sums - zero_point.int() * weight.codes.sum(1, dtype=torch.int32)
    y = _scaled_sums(sums, scale, weight.scale, bias, x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])


def _can_int_mm(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return _is_rowwise(weight, Int(8)) and _fits_int_mm(x, weight, kernels.dynamic_linear.MOST_K)


def _fits_int_mm(x: Tensor, weight: Weight, most_k: int) -> bool:
    n, k = weight.shape
    tokens = x.numel() // max(k, 1)
    if k > most_k or 0 in (tokens, n, k):
        return False
    if x.is_cuda:  # as torch._int_mm takes it
        return tokens > 16 and n % 8 == 0 and k % 8 == 0
    return x.is_cpu


def int8_dynamic_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 by int8 in torch._int_mm: exact int32 sums, then token scale times row scale in float32."""
    codes, token_scale, _ = weight.activation.quantize(x.reshape(-1, x.shape[-1]))
    tracer.multiplies_in("int8")
    sums = kernels.scaled_mm.int8_sums(codes, weight.codes)
    y = _scaled_sums(sums, token_scale, weight.scale, bias, x.dtype)
    return y.reshape(*x.shape[:-1], y.shape[1])


def _scaled_sums(
    sums: Tensor, scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product of x from its int32 sums [M, N]; `scale`: of x, [M, 1] or [1, 1]; `weight_scale`: [N, 1]."""
    # Multiply by the weight's scale first: that of x may be huge, and the sum could overflow on the way.
    y = sums.float() * weight_scale.float().t() * scale
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


# ---- the same products of codes that the caller has -----------------------------------------------------------------


class Described(NamedTuple):
    """The attributes of a converted weight [N, K] that the conditions above read, before that weight exists. It has no
    zero points."""

    shape: torch.Size
    spec: Spec
    activation: Spec | None
    stored_as: str
    zero_point: None = None
    transposed: bool = False


class CodesProduct(NamedTuple):
    """How a converted weight multiplies codes of x, for a caller that has those of both and keeps them."""

    by_kernel: bool
    """Whether `scaled_mm` multiplies, as in "dynamic_linear" for many tokens and in "static_linear", or torch._int_mm
    does."""
    quantizes: bool
    """Whether `quantize_tokens` gives the codes of x, or the spec of the activation does."""

    def codes_of(self, x: Tensor, activation: Spec) -> tuple[Tensor, Tensor]:
        """Codes [M, K or more] and scale [M, 1] of x [M, K], by the dynamic `activation`."""
        if not self.quantizes:
            return activation.quantize(x)[:2]
        format = kernels.dynamic_linear.FORMATS[activation.format.dtype]
        codes, scale = kernels.quantize_tokens.quantize_tokens(x, format)
        return codes, scale.view(-1, 1)

    def multiply(
        self,
        codes: Tensor,
        scale: Tensor,
        weight_codes: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The product [M, N] in `dtype`, of x's codes and scale [M, 1] or [1, 1], and the weight's and [N, 1]."""
        if not self.by_kernel:
            sums = kernels.scaled_mm.int8_sums(codes, weight_codes)
            return _scaled_sums(sums, scale, weight_scale, bias, dtype)
        if padding := codes.shape[1] - weight_codes.shape[1]:
            padded = F.pad(weight_codes.view(torch.int8), (0, padding))
            weight_codes = padded.view(weight_codes.dtype)
        scales = scale.view(-1), weight_scale.float().flatten()
        return kernels.scaled_mm.scaled_mm(codes, weight_codes, *scales, bias=bias, out_dtype=dtype)


def _has_no_zero_points(weight: Described) -> bool:
    activation = weight.activation
    return activation is not None and not (activation.has_zero_point or weight.spec.has_zero_point)


def codes_format(weight: Described) -> str | None:
    """The format in which `codes_product` may multiply, "int8" or "e4m3"; None where it never does."""
    spec, activation = weight.spec, weight.activation
    if activation is None or not _has_no_zero_points(weight):
        return None
    formats = [f for f in (Int(8), Float8()) if spec.format == activation.format == f]
    if not formats or not (_is_rowwise(weight, formats[0]) or _has_static_scale(weight)):
        return None
    return kernels.dynamic_linear.FORMATS[formats[0].dtype]


def codes_product(x: Tensor, weight: Described) -> CodesProduct | None:
    """How `BUILT_IN` multiplies x by such a weight in 8 bits; None where it does not, or where x has a zero point."""
    if not _has_no_zero_points(weight):
        return None
    if _has_dynamic_kernel(x, weight, None):
        return CodesProduct(by_kernel=True, quantizes=True)
    if _can_int_mm(x, weight, None):
        return CodesProduct(by_kernel=False, quantizes=False)
    if _has_static_kernel(x, weight, None):
        return CodesProduct(by_kernel=True, quantizes=False)
    if _can_static_int_mm(x, weight, None):
        return CodesProduct(by_kernel=False, quantizes=False)
    return None


# ---- ternary weights ---------------------------------------------------------------------------------------


def _is_ternary(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    fits = weight.stored_as == "ternary" and not weight.transposed
    return fits and x.numel() > 0 and weight.numel() > 0


def ternary_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """int8 tokens by ternary codes, as in training (`lowbit.tensor.bitnet`)."""
    codes, scale = quantize_tokens(x.reshape(-1, x.shape[-1]))
    out = torch.float32 if x.dtype is torch.float64 else x.dtype
    bias = None if bias is None else bias.to(out)
    tracer.multiplies_in("int8")
    y = kernels.ternary_mm.ternary_mm(codes, weight.codes, scale, weight.scale.view(1), bias, out)
    return unflattened(y.to(x.dtype), x)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes [M, K16] and scale [M] of x [M, K], K16 being K rounded up to a multiple of 16."""
    x = x.float() if x.dtype is torch.float64 else x
    codes, scale, _, _ = kernels.quantize_rowcol.quantize_rowcol(x, "int8", columns=False)
    return codes, scale


class _RoundedTokens(torch.autograd.Function):
    """x [M, K] rounded as the input of an int8 product; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        codes, scale = quantize_tokens(x)
        return (codes[:, : x.shape[1]] * scale[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def rounded_tokens(x: Tensor) -> Tensor:
    """x [..., K] as `quantize_tokens` rounds it, with the gradient of the identity."""
    return _RoundedTokens.apply(x.reshape(-1, x.shape[-1])).view(x.shape)


# ---- weights with sorted inputs ------------------------------------------------------------------------------


def _is_ordered(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return weight.stored_as == "ordered" and not weight.transposed


def ordered_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The inputs in the order of the stored columns, by whatever multiplies the sorted matrix."""
    sorted_x, matrix = weight.in_order(x), weight.sorted_matrix
    return choose_linear(sorted_x, matrix, bias).implementation(sorted_x, matrix, bias)


# ---- dequantized weights -----------------------------------------------------------------------------------


def _is_float32_on_cpu(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    is_eager = not _is_compiling()  # while compiling, nothing is remembered
    both = x.dtype is weight.dtype is torch.float32
    return is_eager and x.is_cpu and both and not weight.transposed


def cpu_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`plain_linear` to the bit. One kernel dequantizes into memory that this thread's next product overwrites."""
    values_t = weight.values_for_product()
    if values_t is None:  # no compiler, or something traces the operations
        return plain_linear(x, weight, bias)
    if weight.activation is not None:
        x = weight.rounded_input(x)
    return x @ values_t if bias is None else F.linear(x, values_t.t(), bias)


def _is_any(x: Tensor, weight: Weight, bias: Tensor | None) -> bool:
    return True


def plain_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Quantize and dequantize the activation if the scheme says so, dequantize the weight, multiply.

    This is the reference of every other implementation. A QAT-prepared layer computes the same, to the bit, unless it
    multiplies codes, as the converted one then does (`codes_product`).
    """
    if weight.activation is not None:
        x = weight.rounded_input(x)
    with _PlainAttributes():
        return F.linear(x, weight.dequantize().to(x.dtype), bias)


# ---- experts -----------------------------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Any, offsets: Tensor) -> Tensor:
    """Each row of x times the weight of its expert, transposed; the rows are sorted by expert. [M, N] in x's dtype.

    Args:
        x: [M, K].
        weight: [E, N, K], quantized or plain.
        offsets: int32 [E], on x's device: expert e takes the rows from offsets[e − 1] (0 for the first) to offsets[e],
            as in `torch._grouped_mm`. Rows after the last offset are zero in the result.

    int4 and int8 weights on a GPU have a kernel, which reads the offsets on the device: it works in a CUDA graph.
    Elsewhere, and where a gradient of x is asked for, experts run one by one, and the host reads the offsets.
    Differentiable in x.

    Raises:
        ValueError: shapes or dtypes that do not fit; offsets that fall, or exceed M (where the host reads them).
    """
    _check_grouped(x, weight, offsets)
    if _has_grouped_kernel(x, weight):
        codes, group_size = weight.codes, _group_size(x, weight)
        tensors = (x, codes, weight.scale, weight.zero_point, offsets)
        with tracer.running(x, weight, "grouped_linear"):
            return kernels.grouped_linear.grouped_linear(*tensors, group_size=group_size)
    return _one_by_one(x, weight, offsets)


def _has_grouped_kernel(x: Tensor, weight: Any) -> bool:
    if not x.is_cuda or (torch.is_grad_enabled() and x.requires_grad):
        return False
    if getattr(weight, "stored_as", None) is None or weight.activation is not None:
        return False
    return _has_weight_kernel(x, weight, None)


def _one_by_one(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    bounds = list(zip([0, *ends], [*ends, x.shape[0]], strict=True))
    if any(not 0 <= start <= end <= x.shape[0] for start, end in bounds):
        raise ValueError(f"offsets {ends} must rise and end within the {x.shape[0]} rows of x")
    parts = [
        F.linear(x[start:end], weight[expert]) for expert, (start, end) in enumerate(bounds[:-1])
    ]
    rest = x.new_zeros(x.shape[0] - ends[-1] if ends else x.shape[0], weight.shape[1])
    return torch.cat([*parts, rest])


def _check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(
            f"grouped_linear takes x [M, K] and weight [E, N, K], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"grouped_linear of a {x.dtype} input with a weight of dtype {weight.dtype}: convert one"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (weight.shape[0],):
        raise ValueError(
            f"offsets must be int32 [{weight.shape[0]}], got {offsets.dtype} {tuple(offsets.shape)}"
        )


# ---- the built-in implementations, in the order in which they are tried ------------------------------------

BUILT_IN = (
    # int4 weights, and int8 weights without a quantized activation, in bfloat16 or float16: kernels for GPU and CPU
    Row("weight_linear", _has_weight_kernel, weight_linear, takes_residual=True),
    # int8 weights and activations in 16 bits on a GPU, and float8 ones in bfloat16 on a GPU that has float8 units
    Row("dynamic_linear", _has_dynamic_kernel, dynamic_linear, takes_residual=True),
    # float8 weights and activations in blocks of 128, on a GPU that multiplies them
    Row("block_linear", _has_block_kernel, block_linear),
    # int8 weights and activations elsewhere: torch._int_mm
    Row("int8_dynamic_linear", _can_int_mm, int8_dynamic_linear),
    # the same two for static activations
    Row("static_linear", _has_static_kernel, static_linear),
    Row("int8_static_linear", _can_static_int_mm, int8_static_linear),
    # ternary weights: int8 tokens by 2-bit codes
    Row("ternary_linear", _is_ternary, ternary_linear),
    # columns in the order of GPTQ's act-order: a gather of the input, then the row for a weight of such codes
    Row("ordered_linear", _is_ordered, ordered_linear),
    # any other weight in float32 on a CPU: codes read by one kernel, then PyTorch's product
    Row("cpu_linear", _is_float32_on_cpu, cpu_linear),
    # everything else: PyTorch operations
    Row("plain_linear", _is_any, plain_linear),
)

_registered: tuple[Row, ...] = ()
"""The registrations of users, the last first."""
