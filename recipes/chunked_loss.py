"""The cross entropy of a language model without the logits of all entries of its vocabulary."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import lowbit


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of the logits x·wᵀ against `targets`, `rows` entries of the vocabulary at a time.

    The forward pass keeps the log of the sum of exponentials of each token. Backward computes the logits again, one
    product more than with all logits in memory. A row of the weight's gradient is one product over all tokens, so it is
    rounded once. Low-bit weights are dequantized `rows` rows at a time.

    Args: x [M, D]; weight [V, D], plain or low-bit; targets [M], int64 in [0, V); rows: at least 1; compiled:
        torch.compile fuses what is done to logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, compiled: bool = False
    ) -> Tensor:
        log_sum = torch.full(targets.shape, -math.inf, device=x.device)
        chosen = torch.zeros_like(log_sum)
        add = _fused(_add_logits) if compiled else _add_logits
        for start, w in _chunks(weight, rows, x.dtype):
            log_sum, chosen = add(x @ w.t(), targets - start, log_sum, chosen)
        ctx.save_for_backward(x, weight.detach(), targets, log_sum)
        ctx.rows, ctx.compiled = rows, compiled
        return (log_sum - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, targets, log_sum = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
        share = grads[0].float() / len(x)
        gradient = _fused(_gradient) if ctx.compiled else _gradient
        for start, w in _chunks(weight, ctx.rows, x.dtype):
            grad = gradient(x @ w.t(), targets - start, log_sum, share)
            grad_x += grad @ w
            grad_weight[start : start + len(w)] = grad.t() @ x
        return grad_x.to(x.dtype), grad_weight, None, None, None


def _chunks(weight: Tensor, rows: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(weight), rows):
        part = weight.detach()[start : start + rows]
        yield (
            start,
            (part.dequantize() if isinstance(part, lowbit.LowbitTensor) else part).to(dtype),
        )


def _add_logits(
    logits: Tensor, targets: Tensor, log_sum: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor]:
    """Count logits [M, rows]: the log of the sum of exponentials and the target's logit so far, float32 [M]. `targets`:
    the target's number among these rows; others are outside."""
    logits, rows = logits.float(), logits.shape[1]
    own = logits.gather(1, targets.clamp(0, rows - 1)[:, None])[:, 0]
    chosen = torch.where((targets >= 0) & (targets < rows), own, chosen)
    return torch.logaddexp(log_sum, logits.logsumexp(1)), chosen


def _gradient(logits: Tensor, targets: Tensor, log_sum: Tensor, share: Tensor) -> Tensor:
    """The gradient of the loss to logits [M, rows], in their dtype. Args: as for `_add_logits`."""
    chances = (logits.float() - log_sum[:, None]).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((chances - is_target.float()) * share).to(logits.dtype)


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
