"""GaLore, APOLLO and BAdam, as baselines: each against its formula."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recipes.memory_savers import BlockAdamW, LowRank
from tests.optim.problems import rand, relative

OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}


def stepped(optimizer, params, steps=3):
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = rand(*p.shape, seed=10 * step + i)
        optimizer.step()


def parameters():
    return [
        nn.Parameter(rand(*shape, seed=i)) for i, shape in enumerate([(24, 40), (40, 24), (9,)])
    ]


def test_all_directions_of_galore_are_adam_in_another_basis():
    """With the gradient's own singular vectors the projected gradient is diag(s) V^T."""
    (p,) = [nn.Parameter(torch.zeros(4, 6))]
    p.grad = rand(4, 6)
    LowRank([p], **{**OPTIONS, "weight_decay": 0.0}, rank=4, scale=1.0).step()
    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
    assert relative(p.detach(), -0.01 * u @ v.sign()) < 1e-4  # Adam's first update is a sign


@pytest.mark.parametrize("random", [False, True], ids=["GaLore", "APOLLO"])
def test_moments_have_the_rank(random):
    params = parameters()
    optimizer = LowRank(params, **OPTIONS, rank=5, random=random)
    stepped(optimizer, params)
    assert [tuple(optimizer.state[p]["mean"].shape) for p in params] == [(5, 40), (5, 40), (9,)]
    before = params[1].detach().clone()
    stepped(optimizer, params, 1)
    moved = before - params[1].detach() - OPTIONS["lr"] * 0.1 * before
    if random:  # along the gradient, a factor a channel
        factors = moved / params[1].grad
        assert relative(factors, factors[:, :1].expand_as(factors)) < 1e-3
    else:
        assert torch.linalg.matrix_rank(moved, rtol=1e-3) == 5


def test_a_period_of_one_chooses_directions_each_step():
    (p,) = [nn.Parameter(torch.zeros(4, 6))]
    optimizer = LowRank([p], **OPTIONS, rank=2, period=1)
    for step in range(2):
        p.grad = rand(4, 6, seed=step)
        optimizer.step()
        u = torch.linalg.svd(p.grad, full_matrices=False)[0]
        assert relative(optimizer.state[p]["directions"], u[:, :2].t()) < 1e-5


def test_one_block_moves_at_a_time_and_as_adamw_does():
    params = parameters()
    twins = copy.deepcopy(params)
    stepped(BlockAdamW(params, **OPTIONS, blocks=2, period=3), params)
    stepped(torch.optim.AdamW(twins[1:], **OPTIONS), twins)  # the first is half of all
    for p, twin in zip(params, twins, strict=True):
        assert relative(p.detach(), twin.detach()) < 1e-6
    assert torch.equal(params[0], rand(24, 40, seed=0))
