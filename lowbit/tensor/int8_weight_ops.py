"""What an Int8WeightTensor does beyond AffineTensor: products with a gradient of the weight, and in-place updates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from lowbit import tracer
from lowbit.products import (
    autocast_inputs,
    check_first_derivative,
    check_linear,
    unflattened,
)
from lowbit.tensor.base import LowbitTensor, aten
from lowbit.tensor.base_ops import copy_
from lowbit.tensor.int8_weight import Int8WeightTensor
from lowbit.tensor.mixed_precision import mixed_linear

_ops = Int8WeightTensor.implements

# ---- products ------------------------------------------------------------------------------------------------


class _WeightOnly(torch.autograd.Function):
    """x [M, K] times the dequantized weight [N, K], transposed, plus bias [N]. Backward dequantizes anew: what is kept
    is the byte an element that there is anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Int8WeightTensor, bias: Tensor | None) -> Tensor:
        # an alias: a weight that a graph holds could not be moved or cast, which swaps the tensors of a subclass
        ctx.save_for_backward(x, weight.detach())
        return F.linear(x, weight.dequantize().to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.values_again(grad.dtype)
        if ctx.needs_input_grad[1]:
            check_first_derivative(weight)  # the weight's term would be missing
            grad_weight = (grad.t() @ x).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


class _Rows(torch.autograd.Function):
    """The rows of a table [V, D] at `indices`: only those are dequantized."""

    @staticmethod
    def forward(
        ctx: Any, table: Int8WeightTensor, indices: Tensor, padding_idx: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.how = (table.shape[0], padding_idx, by_frequency)
        return aten.embedding(table.detach(), indices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return aten.embedding_dense_backward(grads[0], indices, *ctx.how), None, None, None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, Int8WeightTensor) or isinstance(input, LowbitTensor):
        raise NotImplementedError(
            f"linear of {input!r} with {weight!r}: only the weight may be an Int8WeightTensor"
        )
    check_linear(input, weight)
    x, bias = autocast_inputs(input, weight, bias)
    n, k = weight.shape
    m = math.prod(x.shape[:-1])  # Size.numel() would make a symbol of torch.compile a number
    why = weight.scheme.plain_because(x.device, m, n, k)
    if weight.transposed and why is None:
        why = "its scales belong to columns"
    if why is None:
        return mixed_linear(x, weight, bias)  # type: ignore[arg-type]  # it has what that reads
    tracer.note(m, n, k, f"int8 weight, dequantized: {why}", weight)
    return unflattened(_WeightOnly.apply(x.reshape(m, k), weight, bias), x)


def _embedding(
    input: Tensor,
    weight: Int8WeightTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if max_norm is not None or sparse:
        raise weight._unsupported(
            f"an embedding with max_norm={max_norm}, sparse={sparse} (accepted: neither)"
        )
    padding = -1 if padding_idx is None else padding_idx % max(weight.shape[0], 1)
    return _Rows.apply(weight, input, padding, scale_grad_by_freq)


Int8WeightTensor.products.update({F.linear: _linear, F.embedding: _embedding})


@_ops(aten.mm.default, aten.addmm.default, aten.linear.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Products that arrive below autograd, as DTensor's do."""
    if func is aten.addmm.default:
        bias, x, weight = args
        if kwargs:
            raise weight._unsupported(f"addmm with {kwargs}")
    else:
        x, weight, bias = (*args, None)[:3]
    if not isinstance(weight, Int8WeightTensor) or isinstance(x, LowbitTensor):
        quantized = x if isinstance(x, LowbitTensor) else weight
        raise quantized._unsupported(f"{func} in that position (accepted: input @ weight)")
    if func is aten.linear.default:
        return _linear(x, weight, bias)
    if weight.transposed:
        return _linear(x, weight._untransposed(), bias)
    product = x @ weight.dequantize().to(x.dtype)
    return product if bias is None else product + bias


# ---- in place ------------------------------------------------------------------------------------------------


@_ops(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """With its places, so that training goes on as it would have; a weight on its way without them leaves them."""
    dst, src = args[0], args[1]
    if isinstance(dst, Int8WeightTensor) and isinstance(src, Int8WeightTensor):
        if src.place is not None and dst.place is None and dst.shape == src.shape:
            dst.place = src.place.to(dst.device, copy=True)
        elif src.place is None and dst.place is not None:
            src = src._with({**src.inner_tensors(), "place": dst.place})
    return copy_(func, (dst, src), kwargs)


@_ops(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def _like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Optimizer states and gradients of a trainable weight are plain tensors."""
    self = args[0]
    options = {"dtype": self.dtype, "device": self.device, **kwargs}
    return func(torch.empty(self.shape, device="meta"), *args[1:], **options)


@_ops(
    *(aten.zero_.default, aten.fill_.Scalar, aten.normal_.default, aten.uniform_.default),
    *(aten.clamp_.default, aten.erfinv_.default),
)
def _initialise(func: Any, args: Any, kwargs: Any) -> Tensor:
    """To nearest."""
    self = args[0]
    self.copy_(func(self.master(), *args[1:], **kwargs))
    return self


@_ops(
    *(aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.mul_.Tensor, aten.mul_.Scalar),
    *(aten.div_.Tensor, aten.div_.Scalar, aten.addcmul_.default, aten.addcdiv_.default),
    *(aten.lerp_.Scalar, aten.lerp_.Tensor),
)
def _update(func: Any, args: Any, kwargs: Any) -> Tensor:
    """In float32, then rounded stochastically; a multiplication by a positive number is one of the scales."""
    if func.__name__.startswith("mul_") and _only_scales(args[0], args[1]):
        args[0].scale_(args[1])
        return args[0]
    _run(func, args, kwargs)
    return args[0]


@_ops(
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor),
    *(aten.neg.default, aten.abs.default, aten.sgn.default, aten.pow.Tensor_Scalar),
    aten.where.self,
    *(aten.isfinite.default, aten.isnan.default),
    *(aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.sum.default, aten.mean.default, aten.amax.default, aten.std.correction),
    aten.linalg_vector_norm.default,
)
def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """What a norm or a check reads are the values."""

    def values(x: Any) -> Any:
        return x.dequantize() if isinstance(x, Int8WeightTensor) else x

    return func(*tree_map(values, args), **tree_map(values, kwargs))


def on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A `_foreach_` or `_fused_` operation, one tensor after the other, so that one at a time is dequantized."""
    if func.__name__.startswith("_foreach_copy_"):
        for target, source in zip(args[0], args[1], strict=True):
            target.copy_(source)
        return None
    count = next(len(a) for a in args if isinstance(a, list | tuple))

    def of(i: int) -> Any:
        return lambda a: [a[i]] if isinstance(a, list | tuple) and len(a) == count else a

    results = []
    for i in range(count):
        own_args, own_kwargs = tuple(map(of(i), args)), {k: of(i)(v) for k, v in kwargs.items()}
        own = own_args[0][0]
        factor = own_args[1] if len(own_args) > 1 else None
        factor = factor[0] if isinstance(factor, list) else factor
        if func.__name__.startswith("_foreach_mul_") and _only_scales(own, factor):
            own.scale_(factor)
        else:
            results.append(_run(func, own_args, own_kwargs))
    return None if func._schema.is_mutable else [r[0] for r in results]


def is_weight(x: Any) -> bool:
    return isinstance(x, Int8WeightTensor)


def _only_scales(target: Any, factor: Any) -> bool:
    """Whether a multiplication of `target` by `factor` is one of its scales, and exact."""
    return is_weight(target) and isinstance(factor, int | float) and 0 < factor < math.inf


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` on float32 values, and put back what it has written."""
    work: dict[int, tuple[Any, Tensor]] = {}

    def widened(x: Any) -> Any:
        if is_weight(x):
            work[id(x)] = (x, x.master())
        elif isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
            work[id(x)] = (x, x.float())
        return work[id(x)][1] if id(x) in work else x

    result = func(*tree_map(widened, args), **tree_map(widened, kwargs))
    written: list[Tensor] = []
    for declared, value in zip(func._schema.arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += value if isinstance(value, list | tuple) else [value]
    for tensor in written:
        if id(tensor) in work:
            target, values = work[id(tensor)]
            target.update_(values) if is_weight(target) else target.copy_(values)
    return result


Int8WeightTensor.on_lists = staticmethod(on_lists)
