"""Gathering many parameters into one piece, or cutting one into many, changes no bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim.state.checkpoint import converted
from tests.optim.problems import FORMATS, parameters, rand, run, set_grads

# equal and different rows, odd columns, a partly filled last byte, large beside small, several rows in a block
SHAPES = [
    (64, 64),
    (65, 64),
    (64, 64),
    (40, 131),
    (33, 131),
    (8, 600),
    (3, 40, 40),
    (13,),
    (4,),
    (),
    (0, 64),
]
ADAMW, ROUNDED = optim.AdamW, {"bf16_stochastic_round": True, "seed": 3}
OPTIONS = {
    "plain": (ADAMW, torch.float32, {}),
    "amsgrad, clipped": (ADAMW, torch.float32, {"amsgrad": True, "max_grad_norm": 0.5}),
    "rounded": (ADAMW, torch.bfloat16, ROUNDED),
    "corrected": (ADAMW, torch.bfloat16, {"weight_correction": "8bit"}),
    "float64": (ADAMW, torch.float64, {"maximize": True}),
    "Lion": (optim.Lion, torch.float32, {}),
    "SGD": (optim.SGD, torch.float32, {"momentum": 0.9, "dampening": 0.1}),
    "AdEMAMix": (optim.AdEMAMix, torch.float32, {}),
}


def trained(cls, state, dtype, options, piece, monkeypatch):
    monkeypatch.setattr("lowbit.optim.step.job.PIECE_CPU", piece)
    params = parameters(*SHAPES, dtype=dtype)
    optimizer = cls(params, lr=0.01, state=state, fused=False, **options)
    run(optimizer, params[::2], 2)  # so that steps differ from one parameter to the next
    run(optimizer, params, 2, first=2)
    params[4].grad = params[7].grad = None
    optimizer.step()
    return params, optimizer


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("cls,dtype,options", OPTIONS.values(), ids=OPTIONS)
def test_gathered_or_cut(state, cls, dtype, options, monkeypatch):
    together, first = trained(cls, state, dtype, options, 2**20, monkeypatch)
    for piece in (5000, 400):
        params, optimizer = trained(cls, state, dtype, options, piece, monkeypatch)
        for p, q in zip(together, params, strict=True):
            assert torch.equal(p, q)
            for name, value in first.state[p].items():
                assert torch.equal(value, optimizer.state[q][name]), name


def test_states_in_blocks_of_two_sizes_share_their_rows():
    """A shape whose rows are longer for the larger block: (8, 3, 200) has rows of 200 and of 600 elements."""
    params, alike = parameters((8, 3, 200)), parameters((8, 3, 200))
    options = {"state": "8bit", "fused": False}
    optimizer, other = optim.AdamW(params, **options), optim.AdamW(alike, **options)
    for o, (p,) in ((optimizer, params), (other, alike)):
        set_grads([p], 0)
        o.step()
    moment = converted(optimizer.state[params[0]]["exp_avg"], params[0], "4bit", True)
    optimizer.state[params[0]]["exp_avg"] = moment
    other.state[alike[0]]["exp_avg"] = converted(moment, alike[0], "fp32", True)
    set_grads(params + alike, 1)
    alike[0].grad = params[0].grad
    optimizer.step()
    other.step()
    assert optimizer.state[params[0]]["exp_avg"].format == "4bit"
    assert torch.equal(params[0], alike[0]), (
        "decoded before, encoded after: this step is that of float32"
    )


def test_two_groups_share_nothing_but_the_step():
    values, grad = rand(64, 64), rand(64, 64, seed=1)
    a, b = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    a.grad, b.grad = grad.clone(), grad.clone()
    optim.AdamW([{"params": [a], "lr": 0.5}, {"params": [b]}], lr=0.01).step()
    c = nn.Parameter(values.clone())
    c.grad = grad.clone()
    optim.AdamW([c], lr=0.01).step()
    assert torch.equal(b, c) and not torch.equal(a, b)
