"""`reference`, the one formula of an optimizer: against the textbook's, and against the kernel's rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim.step.eager import bound
from tests.optim.algorithms import CASES
from tests.optim.conftest import needs_compiler
from tests.optim.problems import parameters, rand, relative, set_grads

# ---- the textbook -------------------------------------------------------------------------------------------


def textbook_lion(p, g, states, t, lr, betas, weight_decay, maximize):
    g = -g if maximize else g
    m = states["exp_avg"]
    direction = (betas[0] * m + (1 - betas[0]) * g).sign()
    states["exp_avg"] = betas[1] * m + (1 - betas[1]) * g
    return p - lr * weight_decay * p - lr * direction


def textbook_ademamix(
    p, g, states, t, lr, betas, alpha, t_alpha_beta3, eps, weight_decay, maximize
):
    beta1, beta2, beta3 = betas
    if t_alpha_beta3 is not None and t < t_alpha_beta3:
        done = t / t_alpha_beta3
        alpha = alpha * done
        if beta1 > 0:
            slow, fast = math.log(beta3), math.log(beta1)
            beta3 = min(beta3, math.exp(fast * slow / ((1 - done) * slow + done * fast)))
        else:  # the limit
            beta3 = beta3 ** (1 / done)
    g = -g if maximize else g
    m, n, v = (states[name] for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"))
    m, n = beta1 * m + (1 - beta1) * g, beta3 * n + (1 - beta3) * g
    v = beta2 * v + (1 - beta2) * g**2
    states.update(exp_avg=m, exp_avg_slow=n, exp_avg_sq=v)
    update = (m / (1 - beta1**t) + alpha * n) / ((v / (1 - beta2**t)).sqrt() + eps)
    return p - lr * (update + weight_decay * p)


TEXTBOOK = {optim.Lion: textbook_lion, optim.AdEMAMix: textbook_ademamix}
UNLIKE_TORCH = {name: case for name, case in CASES.items() if case[0] in TEXTBOOK}


@pytest.mark.parametrize("cls,options", UNLIKE_TORCH.values(), ids=UNLIKE_TORCH)
def test_the_reference_is_the_textbooks(cls, options):
    """The other optimizers have a namesake in torch.optim: `test_against_torch`, `test_algorithms`, `test_muon`."""
    optimizer = cls(parameters((40, 30)), lr=0.01, **options)
    (group,) = optimizer.param_groups
    p, states = rand(40, 30).double(), {}
    for name in optimizer.state_names(group):
        states[name] = torch.zeros_like(p)
    q, others = p.clone(), {name: state.clone() for name, state in states.items()}
    own = {k: v for k, v in group.items() if k in ("lr", "betas", "weight_decay", "maximize")}
    if cls is optim.AdEMAMix:
        own |= {k: group[k] for k in ("alpha", "t_alpha_beta3", "eps")}
    for t in range(1, 11):
        g = rand(40, 30, seed=t).double()
        q = TEXTBOOK[cls](q, g, others, t, **own)
        step = torch.tensor(t, dtype=torch.float64)
        bound(cls.reference, group)(p, g, step=step, **states)
        assert relative(p, q) < 1e-13
        for name, state in states.items():
            # Two forms of exp may differ in the last bit of beta3, which is 1e-12 of 1 - beta3.
            assert relative(state, others[name]) < (1e-11 if name == "exp_avg_slow" else 1e-13)


# ---- the kernel's rule --------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_rule_is_the_reference(name):
    """Float32 states hold what the kernel computed, so both forms start every step from the same numbers."""
    cls, options = CASES[name]
    params = parameters((97, 131), (13,))
    optimizer = cls(params, lr=0.01, state="fp32", fused=True, **options)
    (group,) = optimizer.param_groups
    for t in range(1, 21):
        set_grads(params, t)
        expected = []
        for p in params:
            old = optimizer.state[p]
            states = {name: torch.zeros_like(p) for name in optimizer.state_names(group)}
            states.update({name: old[name].clone() for name in states if old})
            expected.append((p.detach().clone(), states))
        optimizer.step()
        for p, (weight, states) in zip(params, expected, strict=True):
            step = torch.tensor(t, dtype=torch.float64)
            bound(cls.reference, group)(weight, p.grad, step=step, **states)
            assert relative(p, weight) < 2e-7
            for key, value in states.items():
                assert relative(optimizer.state[p][key], value) < 2e-7, key
            if cls is optim.SGD and not options.get("nesterov"):  # PyTorch fuses that multiply-add
                assert torch.equal(p, weight)
                assert all(torch.equal(optimizer.state[p][k], v) for k, v in states.items())


@pytest.mark.parametrize("name", CASES)
def test_the_reference_leaves_the_gradient_alone(name):
    cls, options = CASES[name]
    params = [nn.Parameter(rand(5, 7))]
    optimizer = cls(params, lr=0.01, state="fp32", fused=False, **options)
    set_grads(params, 0)
    before = params[0].grad.clone()
    optimizer.step()
    assert torch.equal(params[0].grad, before)
