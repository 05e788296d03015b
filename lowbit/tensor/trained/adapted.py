"""The base weight W of a LoRA layer (`role="base"`), which QAT rounds with its adapters merged into it.

    merged = W + sum over adapters of s · B · A        in float32, rounded once to the dtype of W
    y = F.linear(x, fake_quantize(merged), bias)

`merged_weight` computes `merged` for training and for conversion, by one op that no compiler takes apart, so both have
the same bits. The gradient G of `merged` passes straight through the rounding: dA = s · Bᵀ · G, dB = s · G · Aᵀ.

Backward computes the merged weight and its rounded form again, so that between forward and backward a layer keeps its
input, W, A and B alone, as LoRA without rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit_kernels as kernels
from lowbit.linear.frozen.checks import check_first_derivative
from lowbit.linear.operands import Values
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.quantizers import Scales
from lowbit.tracing import tracer


class Adapters(NamedTuple):
    """Adapters of one weight [N, K], in the order in which they are added: A [R, K], B [N, R] and the factor s."""

    a: list[Tensor]
    b: list[Tensor]
    scales: list[float]


class _AddLowRank(torch.autograd.Function):
    """`kernels.add_low_rank` of a weight and the factors a, b of `scales` adapters, one list after the other."""

    @staticmethod
    def forward(ctx: Any, scales: tuple[float, ...], weight: Tensor, *factors: Tensor) -> Tensor:
        ctx.scales = scales
        ctx.save_for_backward(*factors)
        a, b = factors[: len(scales)], factors[len(scales) :]
        return kernels.add_low_rank.add_low_rank(weight, a, b, scales)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        scales, factors = ctx.scales, ctx.saved_tensors
        check_first_derivative(factors[0] if factors else grads[0])
        grads_a, grads_b = [], []
        for a, b, s in zip(factors[: len(scales)], factors[len(scales) :], scales, strict=True):
            grad_a, grad_b = kernels.add_low_rank.low_rank_gradients(grads[0], a, b, s)
            grads_a.append(grad_a)
            grads_b.append(grad_b)
        return None, grads[0], *grads_a, *grads_b


def merged_weight(weight: Tensor, adapters: Adapters) -> Tensor:
    """The plain `weight` [N, K] with the adapters added, differentiable in all of them."""
    return _AddLowRank.apply(tuple(adapters.scales), weight, *adapters.a, *adapters.b)


def is_merged(weight: Any) -> bool:
    """True for a fake-quantized weight whose layer rounds it with adapters merged. A product with the weight alone
    rounds W, without adapters."""
    return isinstance(weight, FakeQuantizedTensor) and weight.role == "base"


def frozen_with(weight: FakeQuantizedTensor, adapters: Adapters, scales: Scales) -> LowbitTensor:
    """The merged weight for inference. `scales`: what the quantizer gives."""
    with torch.no_grad():
        merged = merged_weight(weight.weight, adapters)
    whole = weight._with({**weight.inner_tensors(), "weight": merged})
    return whole.frozen_by(scales)


def product_with(
    weight: FakeQuantizedTensor, adapters: Adapters, x: Tensor, bias: Tensor | None, scales: Scales
) -> Tensor:
    """x [..., K] times the rounded merged weight [N, K], transposed, plus bias [N].

    Args:
        weight: W.
        adapters: what is added to it.
        x: [..., K].
        bias: [N].
        scales: what the quantizer gives.
    """

    def product(x: Tensor, bias: Tensor | None, merged: Tensor, scales: Scales) -> Tensor:
        return FakeQuantizedTensor.product(x, weight, bias, scales, values=merged)

    return _computed_again(product, weight, adapters, x, bias, scales)


def rows_with(
    weight: FakeQuantizedTensor, adapters: Adapters, indices: Tensor, scales: Scales, *options: Any
) -> Tensor:
    """The rows at `indices` of the rounded merged weight [V, D].

    Args:
        weight: W.
        adapters: what is added to it.
        indices: which rows.
        scales: what the quantizer gives.
        options: as `F.embedding` takes them.
    """

    def look_up(indices: Tensor, _: None, merged: Tensor, scales: Scales) -> Tensor:
        if weight.rounds_weight and scales[0] is None:
            return weight.rows_of(merged, indices, scales, *options)
        values = merged
        if weight.rounds_weight:
            values = weight.rounded(merged, *scales)
            tracer.rounded(values, weight)
        return F.embedding(indices, values, *options).to(weight.dtype)

    return _computed_again(look_up, weight, adapters, indices, None, scales)


def _computed_again(
    use: Callable[..., Tensor],
    weight: FakeQuantizedTensor,
    adapters: Adapters,
    x: Tensor,
    bias: Tensor | None,
    scales: Scales,
) -> Tensor:
    """`use` of x, the bias, the merged weight and its scales, which backward computes again instead of keeping
    them."""
    factors, count = adapters.scales, len(adapters.scales)

    def run(
        x: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        zero: Tensor | None,
        joint: Tensor | None,
        weight: Tensor,
        *parts: Tensor,
    ) -> Tensor:
        own = Adapters([*parts[:count]], [*parts[count:]], factors)
        return use(x, bias, merged_weight(weight, own), (scale, zero, joint))

    operands = (x, bias, *scales, Values.apply(weight), *adapters.a, *adapters.b)
    if not torch.is_grad_enabled():
        return run(*operands)
    return checkpoint(run, *operands, use_reentrant=False, preserve_rng_state=False)
