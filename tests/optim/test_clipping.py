"""Gradient clipping, skipping and torch's GradScaler, inside the step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lowbit import optim
from tests.covering import usually
from tests.optim.problems import FORMATS, parameters, relative, run, set_grads

SHAPES = [(64, 100), (13,), (0, 3), (40, 130)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clips_as_torch_does_and_leaves_the_gradients(dtype, max_norm):
    a, b = parameters(*SHAPES, dtype=dtype), parameters(*SHAPES)
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    options = {
        "betas": (0.0, 0.0),
        "eps": 1.0,
        "lr": 0.1,
        "state": "fp32",
    }  # the update depends on the norm
    optimizer, theirs = optim.AdamW(a, max_grad_norm=max_norm, **options), optim.AdamW(b, **options)
    for step in range(3):
        set_grads(a, step)
        for p, q in zip(a, b, strict=True):
            q.grad = p.grad.float().clone()
        kept = [p.grad.clone() for p in a]
        torch.nn.utils.clip_grad_norm_(b, max_norm)
        optimizer.step()
        theirs.step()
        assert all(torch.equal(p.grad, k) for p, k in zip(a, kept, strict=True))
    for p, q in zip(a, b, strict=True):
        assert p.numel() == 0 or relative(p.float(), q) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_one_norm_over_all_groups_dtypes_and_states():
    params = [nn.Parameter(torch.zeros(64, 100)), nn.Parameter(torch.zeros(40, 130).bfloat16())]
    for p in params:
        p.grad = torch.ones_like(p)
    norm = math.sqrt(64 * 100 + 40 * 130)
    groups = [{"params": [params[0]], "state": "8bit"}, {"params": [params[1]], "state": "fp32"}]
    optim.Adam(groups, lr=1e3, betas=(0.0, 0.0), eps=1e3, max_grad_norm=norm / 4).step()
    for p in params:
        assert torch.allclose(p.float(), torch.tensor(-0.25), rtol=1e-2)


def snapshot(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def same(a, b):
    assert a.keys() == b.keys()
    for key, state in a.items():
        assert state.keys() == b[key].keys()
        assert all(torch.equal(v, b[key][name]) for name, v in state.items())


@pytest.mark.parametrize("state", usually(FORMATS, "fp32", "4bit"))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_a_bad_gradient_changes_nothing(state, bad):
    params = parameters(*SHAPES, dtype=torch.bfloat16)
    optimizer = optim.AdamW(params, state=state, skip_nonfinite=True, bf16_stochastic_round=True)
    set_grads(params, 0)
    params[3].grad[7, 9] = bad
    optimizer.step()
    assert not optimizer.state, "not even zeros are made"
    run(optimizer, params, 2)
    weights, states = [p.detach().clone() for p in params], snapshot(optimizer)
    set_grads(params, 2)
    params[1].grad[0] = bad
    optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(params, weights, strict=True))
    same(snapshot(optimizer), states)
    run(optimizer, params, 1, first=3)
    assert optimizer.state[params[0]]["step"].item() == 3
    assert not torch.equal(params[0], weights[0])


def test_gradients_whose_squares_overflow_are_not_bad():
    (p,) = parameters((64, 100))
    optimizer = optim.AdamW([p], skip_nonfinite=True, max_grad_norm=1.0, state="fp32")
    p.grad = torch.full_like(p, 1e30)
    before = p.detach().clone()
    optimizer.step()
    assert p.isfinite().all() and not torch.equal(p, before)


@pytest.mark.parametrize(("found_inf", "value"), [(1.0, 1.0), (0.0, math.inf)])
def test_a_step_is_skipped_where_the_scaler_or_the_optimizer_finds_a_bad_gradient(found_inf, value):
    (p,) = parameters((64, 100))
    optimizer = optim.AdamW([p], skip_nonfinite=True, state="fp32")
    p.grad, before = torch.full_like(p, value), p.detach().clone()
    optimizer.found_inf = torch.tensor(found_inf)  # as GradScaler sets it
    optimizer.step()
    assert torch.equal(p, before)


def scaled(model, optimizer, scaler, x, poison=False):
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    if poison:
        model.weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscaled before"])
def test_grad_scaler(max_norm, unscale):
    """Bit for bit the step without a scaler, because the scale is a power of two."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    plain = copy.deepcopy(model)
    optimizer, other = (
        optim.AdamW8bit(m.parameters(), lr=0.01, max_grad_norm=max_norm) for m in (model, plain)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        for m, o in ((model, optimizer), (plain, other)):
            o.zero_grad()
            loss = m(x).square().mean()
            (scaler.scale(loss) if m is model else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        other.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative(p, q) < 1e-6
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_grad_scaler_skips_and_halves():
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = optim.AdamW8bit(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(8, 64)
    scaled(model, optimizer, scaler, x)
    before, states = copy.deepcopy(model.state_dict()), snapshot(optimizer)
    scaled(model, optimizer, scaler, x, poison=True)
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    same(snapshot(optimizer), states)


def test_only_float16_parameters_are_unscaled_by_the_step():
    """Lightning refuses to clip the gradients of optimizers that unscale."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        optimizer = optim.AdamW8bit([nn.Parameter(torch.ones(2, dtype=dtype))])
        assert optimizer._step_supports_amp_scaling is (dtype is torch.float16)


def test_grad_scaler_leaves_float16_gradients_to_the_step(monkeypatch):
    """The scaler's own unscaling refuses float16 gradients. The host must not wait for the device."""
    param = nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
    optimizer = optim.AdamW8bit([param], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.float().sum()).backward()
    monkeypatch.setattr(
        torch.amp.GradScaler, "_maybe_opt_step", lambda *_, **__: pytest.fail("it was not asked")
    )
    scaler.step(optimizer)
    assert param.grad[0, 0] == 1024 and torch.allclose(param, torch.tensor(0.99).half(), atol=1e-3)
