"""The cross entropy of a language model without the logits of all entries of its vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import lowbit


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of the logits x·wᵀ against `targets`, `rows` entries of the vocabulary at a time.

    The forward pass keeps the log of the sum of exponentials of each token. Backward computes the logits again, one
    product more than with all logits in memory. A row of the weight's gradient is one product over all tokens, so it is
    rounded once. Low-bit weights are dequantized `rows` rows at a time.

    Args: x [M, D]; weight [V, D], plain or low-bit; targets [M], int64 in [0, V); rows: at least 1.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        log_sum = torch.full(targets.shape, -math.inf, device=x.device)
        chosen = torch.zeros_like(log_sum)
        for start, w in _chunks(weight, rows, x.dtype):
            logits = (x @ w.t()).float()
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
            here, column = _within(targets, start, len(w))
            chosen = torch.where(here, logits.gather(1, column)[:, 0], chosen)
        ctx.save_for_backward(x, weight.detach(), targets, log_sum)
        ctx.rows = rows
        return (log_sum - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, targets, log_sum = ctx.saved_tensors
        grad_x = torch.zeros_like(x, dtype=torch.float32)
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
        share = grads[0].float() / len(x)
        for start, w in _chunks(weight, ctx.rows, x.dtype):
            chances = (x @ w.t()).float().sub_(log_sum[:, None]).exp_()
            here, column = _within(targets, start, len(w))
            chances.scatter_add_(1, column, -here.float()[:, None])
            grad = chances.mul_(share).to(x.dtype)
            del chances
            grad_x += grad @ w
            grad_weight[start : start + len(w)] = grad.t() @ x
        return grad_x.to(x.dtype), grad_weight, None, None


def _chunks(weight: Tensor, rows: int, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(weight), rows):
        part = weight.detach()[start : start + rows]
        yield (
            start,
            (part.dequantize() if isinstance(part, lowbit.LowbitTensor) else part).to(dtype),
        )


def _within(targets: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """(bool [M]: the target is one of these rows; int64 [M, 1]: which one, 0 for others)."""
    here = (targets >= start) & (targets < start + rows)
    return here, torch.where(here, targets - start, 0)[:, None]
