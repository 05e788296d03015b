"""Checks and casts of the operands of a linear, of frozen and of trained weights.

The ops of lowbit_kernels check the tensors that they get, when the layouts are new. These checks come first, because
PyTorch's products would broadcast a bias or a residual of another shape, and because only they can name the weight.
They run once for each decision that a frozen weight remembers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.linear.frozen.row import Weight
from lowbit.linear.operands import known
from lowbit.tracing import tracer

_is_compiling = torch.compiler.is_dynamo_compiling
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_has_transforms = torch._C._are_functorch_transforms_active


TRANSFORMS = (
    "torch.func's transforms, such as grad and vmap (accepted: backward() and torch.autograd.grad)"
)
"""Features that no product of a low-bit weight supports, for messages."""


def in_transform() -> bool:
    """True if a transform of torch.func runs, as seen above autograd."""
    return not _is_compiling() and _has_transforms() and not torch.compiler.is_compiling()


def refuse_transforms(weight: Any) -> None:
    """Raise NotImplementedError inside of a transform of torch.func."""
    if in_transform():
        raise weight._unsupported(TRANSFORMS)


def check_linear(x: Any, weight: Weight, bias: Tensor | None) -> None:
    """Raise ValueError unless x [..., K], a weight [N, K] and a bias [N] fit and are on one device, and
    NotImplementedError for an x in low bits and inside of torch.func."""
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
    check_addend("bias", bias, (weight.shape[0],), x, weight)
    refuse_transforms(weight)


def check_addend(
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
    # AOTAutograd needs no second derivative, but traces with gradients enabled.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise weight._unsupported(f"second derivatives ({_FIRST_ONLY})")


def refuse_second_derivative(what: str, kind: str = "") -> None:
    """`check_first_derivative` where no weight is at hand, for an error that names `what`, with `kind` in braces."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what.format(kind)} does not support second derivatives ({_FIRST_ONLY})"
        )


_FIRST_ONLY = "accepted: backward() and autograd.grad without create_graph=True"


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype of autocast on devices of this kind, such as "cuda"; None where it is not enabled."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_inputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: str = "linear"
) -> tuple[Tensor, Tensor | None]:
    """Cast x and bias as `F.linear` does under autocast; the weight's values are cast once dequantized.

    Raises ValueError where, without autocast, x and the weight or the bias differ in dtype. `product`: how the message
    names it.
    """
    takes_part = not x.is_meta and x.dtype is not torch.float64
    kind = "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type  # the last takes longer
    if takes_part and (dtype := autocast_dtype(kind)) is not None:
        x = x.to(dtype)
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


def remembered(
    x: Tensor, weight: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, tuple[Any, ...] | None, Any]:
    """What a trained weight [N, K] remembers for a linear of x [..., K] and a bias [N].

    Returns x and the bias as autocast casts them, the arguments of `known`, and what was found for them. The arguments
    are all that the checks and the choice of a product depend on and that can change during the life of a weight
    object. Nothing found is None. In graphs, and in a trace, which notes each call, the arguments are None too.
    """
    if _is_compiling() or tracer.active is not None:
        return x, bias, None, None
    is_autocast = _is_any_autocast_enabled()
    if is_autocast:
        x, bias = autocast_inputs(x, weight, bias)
    of_bias = None if bias is None else (bias.shape, bias.dtype)
    arguments = x.shape, x.dtype, x.device, weight.scheme, of_bias, is_autocast
    return x, bias, arguments, known(weight, x, arguments)


def flattened(x: Tensor) -> Tensor:
    """x [..., K] as [M, K]; -1 would not do for K = 0."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def in_rows(grad: Tensor) -> Tensor:
    """The gradient [M, N] of a grouped product, with dense rows, as torch's grouped products take it. In the gradient
    of a sum, rows share their memory."""
    if grad.stride() == (grad.shape[1], 1):
        return grad
    return grad.clone(memory_format=torch.contiguous_format)


def unflattened(y: Tensor, x: Tensor) -> Tensor:
    """The product y [M, N] of a flattened input as [..., N], where x is [..., K]; no view, of which FSDP2 warns."""
    return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, [*x.shape[:-1], y.shape[1]])
