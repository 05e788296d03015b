"""AdaptedTensor: the base weight W of a LoRA layer, which QAT rounds with its adapters merged into it.

    merged = W + sum over adapters of s · B · A        in float32, rounded once to the dtype of W
    y = F.linear(x, fake_quantize(merged), bias)

`merged_weight` computes `merged` for training and for conversion, by one op that no compiler takes apart, so both have
the same bits. The gradient G of `merged` passes straight through the rounding: dA = s · Bᵀ · G, dB = s · G · Aᵀ.

Backward computes the merged weight and its rounded form again, so that between forward and backward a layer keeps its
input, W, A and B alone, as LoRA without rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowbit_kernels as kernels
from lowbit.linear.coded_linear import CodedWeight, coded_weight
from lowbit.linear.dequantized import Values
from lowbit.linear.frozen.checks import check_first_derivative
from lowbit.linear.fused_rounding import learned_fake_quantize
from lowbit.tensor.core import LowbitTensor
from lowbit.tensor.trained.fake_quantized import FakeQuantizedTensor
from lowbit.tensor.trained.learned_scales import LearnedScalesTensor
from lowbit.tracing import tracer


class Adapters(NamedTuple):
    """Adapters of one weight [N, K], in the order in which they are added: A [R, K], B [N, R] and the factor s."""

    a: list[Tensor]
    b: list[Tensor]
    scales: list[float]


Learned = tuple[Tensor | None, Tensor | None]
"""The parameters of the learned scales and zero points of a weight, as far as it has them."""
NONE: Learned = (None, None)


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


class AdaptedTensor(FakeQuantizedTensor, codec=None):
    """See the module. A product with the weight alone rounds W, without adapters. FSDP2 gathers W unrounded, since the
    adapters are added before the rounding."""

    is_described: ClassVar[bool] = False  # read from a file, it would be without its layer

    def frozen_with(self, adapters: Adapters, learned: Learned = NONE) -> LowbitTensor:
        """The merged weight for inference."""
        with torch.no_grad():
            merged = merged_weight(self.weight, adapters)
        whole: Any = self._with({**self.inner_tensors(), "weight": merged})
        found: LowbitTensor = whole.frozen() if learned[0] is None else whole.frozen_by(*learned)
        return found

    def product_with(
        self, adapters: Adapters, x: Tensor, bias: Tensor | None, learned: Learned = NONE
    ) -> Tensor:
        """x [..., K] times the rounded merged weight [N, K], transposed, plus bias [N]."""

        def product(x: Tensor, bias: Tensor | None, merged: Tensor, learned: Learned) -> Tensor:
            seen = partial(self._seen, merged, learned)
            coded = partial(self._coded, merged, learned)
            return FakeQuantizedTensor.product(x, self, seen, coded, bias)

        return self._computed_again(product, adapters, x, bias, learned)

    def rows_with(
        self, adapters: Adapters, indices: Tensor, *options: Any, learned: Learned = NONE
    ) -> Tensor:
        """The rows at `indices` of the rounded merged weight [V, D]; `options` as `F.embedding` takes them."""

        def look_up(indices: Tensor, _: None, merged: Tensor, learned: Learned) -> Tensor:
            if self.rounds_weight and learned[0] is None:
                return self.rows_of(merged, indices, *options)
            values = self._seen(merged, learned)
            return F.embedding(indices, values, *options).to(self.dtype)

        return self._computed_again(look_up, adapters, indices, None, learned)

    def _seen(self, merged: Tensor, learned: Learned) -> Tensor:
        """The merged weight as products see it now."""
        scale, zero = learned
        if not self.rounds_weight:
            return merged
        if scale is None:
            values = self.rounded(merged)
        else:
            values = learned_fake_quantize(merged, scale, zero, self.scheme.weight)
        tracer.rounded(values, self)
        return values

    def _coded(self, merged: Tensor, learned: Learned) -> CodedWeight:
        """The same for a product of codes."""
        return coded_weight(merged, self.scheme.weight)

    def _computed_again(
        self,
        use: Callable[..., Tensor],
        adapters: Adapters,
        x: Tensor,
        bias: Tensor | None,
        learned: Learned,
    ) -> Tensor:
        """`use` of x, the bias, the merged weight and its scales, which backward computes again instead of keeping
        them."""
        scales, count = adapters.scales, len(adapters.scales)

        def run(
            x: Tensor,
            bias: Tensor | None,
            scale: Tensor | None,
            zero: Tensor | None,
            weight: Tensor,
            *factors: Tensor,
        ) -> Tensor:
            own = Adapters([*factors[:count]], [*factors[count:]], scales)
            return use(x, bias, merged_weight(weight, own), (scale, zero))

        operands = (x, bias, *learned, Values.apply(self), *adapters.a, *adapters.b)
        if not torch.is_grad_enabled():
            return run(*operands)
        return checkpoint(run, *operands, use_reentrant=False, preserve_rng_state=False)


class LearnedAdaptedTensor(AdaptedTensor, LearnedScalesTensor):
    """An AdaptedTensor whose scales are parameters of the base layer."""

    def _coded(self, merged: Tensor, learned: Learned) -> CodedWeight:
        scale, zero = learned
        return (
            super()._coded(merged, learned)
            if scale is None
            else self.coded_values(merged, scale, zero)
        )
