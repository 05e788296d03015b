"""Baselines of `recipes.convergence`: other ways to fit full fine-tuning on one card, which change AdamW's algorithm.

    GaLore  (arXiv 2403.03507)    moments of r directions of the gradient, singular vectors renewed every `period` steps
    APOLLO  (arXiv 2412.05270)    moments of r random directions; they give one factor a channel of the gradient
    BAdam   (arXiv 2404.02827)    AdamW of one block of the parameters at a time, `period` steps from fresh moments

GaLore and APOLLO work on the shorter side of a matrix: G [m, n] with m <= n, P [r, m], R = P G::

    N = Adam's update of R
    GaLore   W -= lr * scale * P^T N
    APOLLO   W -= lr * sqrt(m / r) * G diag(norm(N_j) / norm(R_j)),  norms of columns j

Vectors and matrices above four times as long as wide (embeddings, heads) have AdamW. Q-GaLore (arXiv 2407.08296) is
GaLore with int8 weights, which are rounded stochastically, and projections in 4 bits. All here is float32: a loss is
that of the algorithm alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GROWTH = 1.01
"""APOLLO: an update's norm is at most so many times that of the step before."""


class LowRank(torch.optim.Optimizer):
    """GaLore, or APOLLO with `random`; see the module.

    Args:
        params: parameters, or groups of them.
        lr, betas, weight_decay: AdamW's.
        rank: directions r of a matrix, at most its shorter side.
        period: steps between two choices of directions.
        scale: GaLore's factor.
        random: APOLLO.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        rank: int = 16,
        period: int = 50,
        scale: float = 0.25,
        random: bool = False,
    ) -> None:
        self.rank, self.period, self.scale, self.random = rank, period, scale, random
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                self._step_of(param, group)

    def _step_of(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        grad, turned = param.grad, param.ndim == 2 and param.shape[0] > param.shape[1]
        assert grad is not None
        grad = grad.t() if turned else grad
        if param.ndim == 2 and grad.shape[1] <= 4 * grad.shape[0]:
            if state.get("step", 0) % self.period == 0:
                state["directions"] = self._directions(grad)
            seen = state["directions"] @ grad
            update = self._update(state, grad, seen, adam_update(state, seen, group["betas"]))
        else:
            update = adam_update(state, grad, group["betas"])
        move(param, update.t() if turned else update, group)

    def _directions(self, grad: Tensor) -> Tensor:
        """P [r, m]: orthonormal rows, or independent normal numbers of variance 1 / r."""
        rank = min(self.rank, len(grad))
        if self.random:
            return torch.randn(rank, len(grad), device=grad.device) / math.sqrt(rank)
        return torch.linalg.svd(grad, full_matrices=False)[0][:, :rank].t().contiguous()

    def _update(self, state: dict[str, Any], grad: Tensor, seen: Tensor, normed: Tensor) -> Tensor:
        if not self.random:
            return self.scale * (state["directions"].t() @ normed)
        factors = normed.norm(dim=0) / seen.norm(dim=0).clamp_min(1e-30)
        update = grad * factors * math.sqrt(len(grad) / len(seen))
        norm = update.norm()
        if "norm" in state:
            limited = torch.minimum(norm, GROWTH * state["norm"])
            update, norm = update * (limited / norm.clamp_min(1e-30)), limited
        state["norm"] = norm
        return update


class BlockAdamW(torch.optim.Optimizer):
    """BAdam: parameters in `blocks` parts of their order, of which one moves for `period` steps, the last one first.

    Args:
        params: parameters, or groups of them.
        lr, betas, weight_decay: AdamW's.
        blocks: parts, each of about as many parameters.
        period: steps of a part before the next one's turn.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        blocks: int = 4,
        period: int = 25,
    ) -> None:
        self.blocks, self.period, self.steps = blocks, period, 0
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        if self.steps % self.period == 0:
            self.state.clear()
        block = self.steps // self.period % self.blocks
        self.steps += 1
        owned = [(p, group) for group in self.param_groups for p in group["params"]][::-1]
        total = sum(p.numel() for p, _ in owned)
        before = 0
        for param, group in owned:
            own = (2 * before + param.numel()) * self.blocks // (2 * total)  # by its middle
            before += param.numel()
            if own != block:
                continue
            assert param.grad is not None
            move(param, adam_update(self.state[param], param.grad, group["betas"]), group)


def adam_update(state: dict[str, Any], grad: Tensor, betas: tuple[float, float]) -> Tensor:
    """Adam's update of `grad`, one step after those that `state` has seen."""
    state["step"] = state.get("step", 0) + 1
    if "mean" not in state:
        state["mean"], state["square"] = torch.zeros_like(grad), torch.zeros_like(grad)
    mean = state["mean"].lerp_(grad, 1 - betas[0])
    square = state["square"].lerp_(grad.square(), 1 - betas[1])
    corrected = square / (1 - betas[1] ** state["step"])
    return mean / (1 - betas[0] ** state["step"]) / (corrected.sqrt() + 1e-8)


def move(param: Tensor, update: Tensor, group: dict[str, Any]) -> None:
    """The step of a parameter by AdamW's decay and an update."""
    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
