"""The linear of a quantized weight: an ordered table of (condition, implementation), the last registered first.

A kernel or backend is one registration:

    @register_linear(lambda x, w, bias: x.is_cuda and isinstance(w, AffineTensor) and w.spec.format == Int(4))
    def my_linear(x, w, bias):
        return ...

`condition(x, w, bias) -> bool` sees the activation [..., K], the quantized weight [N, K] and the bias [N] or None;
it must decide from shapes, dtypes, devices and metadata alone, never from values. `implementation(x, w, bias)`
returns [..., N] in x's dtype; registered with `takes_residual=True` it gets a fourth argument, a tensor [..., N] of
x's dtype, or None, to add to the product. Gradients are not its concern: `quantized_linear` gives the input's, by one
dequantize, the bias's and the residual's, whatever the implementation.

Decoding calls a linear for every layer and token, so what runs for each is kept short, and conditions should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit import tracer
from lowbit.tensor.base import LowbitTensor

Condition = Callable[[Tensor, LowbitTensor, Tensor | None], bool]
Implementation = Callable[..., Tensor]
"""(x, weight, bias) -> product, or (x, weight, bias, residual) -> product + residual."""

_table: list[tuple[Condition, Implementation, bool]] = []
version = 0
"""Differs from what it was once another implementation may be chosen for like operands."""


def _changed() -> None:
    global version
    version += 1


def register_linear(
    condition: Condition, impl: Implementation | None = None, *, takes_residual: bool = False
) -> Callable[[Implementation], Implementation]:
    """Put `impl` first in the table; as `@register_linear(condition)`, a decorator. Returns the decorator.

    `takes_residual`: it may be called with a fourth argument, the residual or None.
    """

    def register(fn: Implementation) -> Implementation:
        _table.insert(0, (condition, fn, takes_residual))
        _changed()
        return fn

    if impl is not None:
        register(impl)
    return register


def unregister_linear(impl: Implementation) -> None:
    """Take every registration of `impl` out of the table again.

    Raises ValueError if there is none.
    """
    kept = [entry for entry in _table if entry[1] is not impl]
    if len(kept) == len(_table):
        raise ValueError(
            f"{impl!r} is not registered; registered: {[fn.__name__ for _, fn, _ in _table]}"
        )
    _table[:] = kept
    _changed()


def _find(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> tuple[Implementation, bool]:
    for condition, impl, takes_residual in _table:
        if condition(x, weight, bias):
            return impl, takes_residual
    raise NotImplementedError(f"no linear is registered for {weight!r}; see lowbit.register_linear")


def choose_linear(x: Tensor, weight: LowbitTensor, bias: Tensor | None = None) -> Implementation:
    """The implementation that serves this product."""
    return _find(x, weight, bias)[0]


def _multiply(
    x: Tensor, weight: LowbitTensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    impl, takes_residual = _find(x, weight, bias)
    if tracer.active is not None:
        with tracer.running(x, weight, getattr(impl, "__name__", type(impl).__name__)):
            return _call(impl, takes_residual, x, weight, bias, residual)
    if impl is plain_linear and bias is residual is None:
        weight._expect(x.shape, version)
    return _call(impl, takes_residual, x, weight, bias, residual)


def _call(
    impl: Implementation,
    takes_residual: bool,
    x: Tensor,
    weight: LowbitTensor,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    if not takes_residual:
        y = impl(x, weight, bias)
        return y if residual is None else y + residual
    if residual is None or residual.dtype is x.dtype:
        return impl(x, weight, bias, residual)
    return impl(x, weight, bias, None) + residual


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> Tensor:
        # an alias: a weight that a graph holds could not be moved or cast, which swaps the tensors of a subclass
        ctx.save_for_backward(weight.detach())
        return _multiply(x, weight, bias, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.dequantize().to(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad
        return grad_x, None, grad_bias


def quantized_linear(
    input: Tensor,
    weight: LowbitTensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """input [..., K] times weight [N, K] transposed, plus bias [N], plus residual [..., N]: [..., N].

    Differentiable in input, bias and residual.

    Raises:
        RuntimeError: the weight requires a gradient; it is quantized for inference and has none.
        ValueError: shapes that do not fit, or tensors on several devices.
    """
    with_grad = torch.is_grad_enabled()
    if with_grad and weight.requires_grad:
        raise RuntimeError(
            f"{weight!r} is quantized and cannot be trained: call .requires_grad_(False) on it, or train with "
            "lowbit.qat.prepare_ and convert afterwards"
        )
    check_linear(input, weight)
    check_bias(weight, bias)
    check_residual(input, weight, residual)
    x, bias = autocast_inputs(input, weight, bias)
    if with_grad and any(t is not None and t.requires_grad for t in (x, bias, residual)):
        y = _Linear.apply(x, weight, bias)
        return y if residual is None else y + residual
    return _multiply(x, weight, bias, residual)


def check_linear(x: Tensor, weight: LowbitTensor) -> None:
    """Raise ValueError where x [..., K] and a weight [N, K] do not fit or are on two devices, and NotImplementedError
    for an x in low bits and inside of torch.func."""
    if weight.ndim != 2:
        raise ValueError(
            f"linear takes a weight [N, K], got {weight!r}; index one expert of a 3-D weight first"
        )
    if isinstance(x, LowbitTensor):
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
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise weight._unsupported(
            "torch.func's transforms, such as grad and vmap (accepted: backward() and torch.autograd.grad)"
        )


def check_bias(weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError where the bias isn't [N], or on another device than the weight: kernels take its address."""
    if bias is None:
        return
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear with weight {tuple(weight.shape)} takes a bias of shape {tuple(weight.shape[:1])}, got "
            f"{tuple(bias.shape)}"
        )
    if bias.device != weight.device:
        raise ValueError(
            f"linear of a bias on {bias.device} with a weight on {weight.device}; accepted: both on one device, by "
            "model.to(device)"
        )


def check_residual(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raise ValueError where the residual isn't of the product's shape, or on another device."""
    if residual is None:
        return
    if residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(
            f"linear of input {tuple(x.shape)} with weight {tuple(weight.shape)} takes a residual of shape "
            f"{(*x.shape[:-1], weight.shape[0])}, got {tuple(residual.shape)}"
        )
    if residual.device != x.device:
        raise ValueError(
            f"linear of an input on {x.device} with a residual on {residual.device}; accepted: both on one device, by "
            "residual.to(device)"
        )


def check_first_derivative(weight: LowbitTensor) -> None:
    """In a backward pass that has no derivative itself: raise NotImplementedError where one is asked for."""
    # AOTAutograd, which asks for none, traces with gradients on
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise weight._unsupported(
            "second derivatives (accepted: backward() and autograd.grad without create_graph=True)"
        )


def autocast_inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What `F.linear` under autocast does to its inputs; the weight's values are cast once dequantized.

    Raises ValueError where, without autocast, x and the weight or the bias differ in dtype.
    """
    takes_part = not x.is_meta and x.dtype is not torch.float64
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # the last takes longer
    if takes_part and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
        return x, None if bias is None else bias.to(x.dtype)
    if x.dtype != weight.dtype:
        raise ValueError(
            f"linear of a {x.dtype} input with a weight of dtype {weight.dtype}: convert one "
            "(model.to(dtype) keeps the codes) or use torch.autocast"
        )
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(
            f"linear of a {x.dtype} input with a bias of dtype {bias.dtype}: convert it (bias.to(x.dtype)) or use "
            "torch.autocast"
        )
    return x, bias


def unflattened(y: Tensor, x: Tensor) -> Tensor:
    """The product y [M, N] of the flattened input as [..., N], x being [..., K]. FSDP2 warns of modules that return a
    view, so this is none."""
    return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], y.shape[1]])


def plain_linear(x: Tensor, weight: LowbitTensor, bias: Tensor | None) -> Tensor:
    """Quantize and dequantize the activation if the scheme says so, dequantize the weight, multiply.

    The reference of every other implementation, and what a QAT-prepared layer computes, to the bit.
    """
    spec = getattr(weight, "activation", None)
    if spec is not None:
        x = spec.fake_quantize(x)
    return F.linear(x, weight._operand(x), bias)


register_linear(lambda x, weight, bias: True, plain_linear)
