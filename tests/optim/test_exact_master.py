"""`weight_correction="16bit"`: bfloat16 weights with the 16 bits below them are float32 weights, bit for bit."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowbit import optim
from lowbit.numerics.rounding import join_bf16, split_bf16
from lowbit.optim.state.state import correction_units
from tests.optim.algorithms import STATEFUL
from tests.optim.counted import launched
from tests.optim.problems import FORMATS, rand, run, saved, set_grads
from tests.optim.test_bf16_weights import EDGES, bf16, float_of, wide

SHAPES = [(33, 300), (13,), (5, 7, 137), (0, 3), (40, 512)]


def bits(x):
    return x.detach().contiguous().view(torch.int32)


def master(optimizer, param):
    return join_bf16(param.detach(), correction_units(optimizer.state[param]["weight_correction"]))


def same_bits(a, b):
    """Equal to the bit, except that any NaN equals any other."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        bits(a)[~a.isnan()], bits(b)[~b.isnan()]
    )


def step_both(narrow, full, params, twins, steps, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.float()
        narrow.step()
        full.step()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_split_and_join_keep_all_bits(some):
    x = float_of(EDGES + some)
    weight, below = split_bf16(x, torch.int16)
    assert weight.dtype == torch.bfloat16 and below.dtype == torch.int16
    assert same_bits(join_bf16(weight, below), x)
    # by exact arithmetic: no bfloat16 is nearer, and a tie goes away from zero
    for value, w in zip(x.double().tolist(), weight.double().tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(w)
        elif math.isfinite(w):
            raw = int(np.float32(w).view(np.uint32))
            for other in (raw - 0x10000, raw + 0x10000):
                neighbour = float(np.uint32(other % 2**32).view(np.float32))
                if not math.isfinite(neighbour) or neighbour * w < 0:
                    continue
                assert abs(value - w) <= abs(value - neighbour)
                if abs(value - w) == abs(value - neighbour):
                    assert abs(w) > abs(neighbour)


def test_the_weight_is_what_a_cast_gives_except_at_ties():
    x = float_of([0x3F800000 + i for i in range(2**17)])
    weight, _ = split_bf16(x, torch.int16)
    differ = (weight != x.bfloat16()).nonzero().flatten().tolist()
    assert differ == [0x8000], "one number in 2**17: the even one of two neighbours"


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("cls", STATEFUL, ids=lambda c: c.__name__)
def test_every_step_is_that_of_float32(cls, state):
    params = bf16(*SHAPES[:4])
    twins = wide(params)
    options = {"lr": 1e-4, "state": state, "fused": False, "weight_decay": 0.1, **STATEFUL[cls]}
    narrow = cls(params, weight_correction="16bit", **options)
    full = cls(twins, **options)
    step_both(narrow, full, params, twins, 12)
    for p, q in zip(params, twins, strict=True):
        assert torch.equal(bits(master(narrow, p)), bits(q))
        assert torch.equal(p, split_bf16(q.detach(), torch.int16)[0])
        for name, value in full.state[q].items():
            value, own = (getattr(v, "codes", v) for v in (value, narrow.state[p][name]))
            assert torch.equal(own, value), name


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", ["4bit", "8bit", "fp32"])
def test_kernels_too(device, state):
    params = bf16(*SHAPES)
    params = [nn.Parameter(p.detach().to(device)) for p in params]
    twins = wide(params)
    options = {"lr": 1e-4, "state": state, "fused": True, "max_grad_norm": 3.0}
    narrow = optim.AdamW(params, weight_correction="16bit", **options)
    full = optim.AdamW(twins, **options)
    for step in range(3):
        for i, (p, q) in enumerate(zip(params, twins, strict=True)):
            p.grad = rand(*p.shape, seed=100 * step + i).to(p)
            q.grad = p.grad.float()
        narrow.step()
        full.step()
    assert launched() >= 6
    assert all(
        torch.equal(bits(master(narrow, p)), bits(q)) for p, q in zip(params, twins, strict=True)
    )
    # the kernel splits as PyTorch operations do
    assert all(
        torch.equal(p, split_bf16(q.detach(), torch.int16)[0])
        for p, q in zip(params, twins, strict=True)
    )


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_special_values(device, fused):
    """Ties and their carries, denormals, the largest numbers, infinities and NaN: SGD adds chosen numbers."""
    start = [0x3F800000, 0x3F810000, 0x3F800000, 0xBF800000, 0x00000000, 0x80000000, 0x7F7F0000, 0xFF7F0000,
             0x3F800000, 0x3F800000, 0x7F800000, 0x00010000]  # fmt: skip
    target = [0x3F808000, 0x3F818000, 0x3F807FFF, 0xBF808000, 0x00000001, 0x80008000, 0x7F7F8000, 0xFF7FFFFF,
              0x3FFFFFFF, 0x7FC00000, 0x7F800000, 0x0000FFFF]  # fmt: skip
    begin, end = float_of(start).to(device), float_of(target).to(device)
    p = nn.Parameter(begin.bfloat16())
    q = nn.Parameter(begin.clone())
    options = {"lr": 1.0, "fused": fused}
    narrow, full = optim.SGD([p], weight_correction="16bit", **options), optim.SGD([q], **options)
    for goal in (end, begin, end):
        q.grad = q.detach() - goal
        q.grad[10] = 0.0  # infinity less infinity
        exact = q.grad.clone()
        # gradients in float32: bfloat16 ones could not reach these numbers
        p.grad, p32 = exact.bfloat16(), exact.bfloat16().float()
        q.grad = p32
        narrow.step()
        full.step()
        assert same_bits(master(narrow, p), q.detach())
    with torch.no_grad():  # and the numbers themselves, as a step leaves them
        weight, below = split_bf16(end, torch.int16)
        p.copy_(weight)
        correction_units(narrow.state[p]["weight_correction"]).copy_(below)
        q.copy_(end)
    p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
    narrow.step()
    full.step()
    assert same_bits(master(narrow, p), q.detach())
    assert torch.equal(p.isnan(), q.isnan()) and p[6].isinf() and q[6].isfinite()


@pytest.mark.parametrize("correction", ["8bit", "16bit"])
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_a_gradient_that_is_not_a_number_shows_in_the_weight(device, fused, correction):
    """A GPU's own NaN has all bits of the mantissa: to round it may carry into the sign."""
    weight = nn.Parameter(torch.ones(2, 8, dtype=torch.bfloat16, device=device))
    optimizer = optim.AdamW([weight], lr=1e-3, weight_correction=correction, fused=fused)
    weight.grad = torch.ones_like(weight)
    weight.grad[1, 3], weight.grad[0, 5] = torch.nan, torch.inf
    optimizer.step()
    assert weight.isnan().nonzero().tolist() == [[0, 5], [1, 3]]


def test_two_bytes_of_state_that_travel_in_checkpoints():
    params = bf16((64, 128))
    optimizer = optim.AdamW4bit(params, weight_correction="16bit", lr=1e-3)
    run(optimizer, params, 3)
    assert optimizer.state[params[0]]["weight_correction"].dtype == torch.uint8
    assert optimizer.state_bytes() == 64 * 128 * (1.0625 + 2) + 8
    copies = [nn.Parameter(params[0].detach().clone())]
    other = optim.AdamW4bit(copies)  # options come from the checkpoint
    other.load_state_dict(saved(copy.deepcopy(optimizer.state_dict())))
    run(optimizer, params, 3, first=3)
    run(other, copies, 3, first=3)
    assert torch.equal(bits(master(optimizer, params[0])), bits(master(other, copies[0])))
    plain = optim.dequantize_state_dict(optimizer.state_dict())
    assert set(plain["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("before", "after"), [("8bit", "16bit"), ("16bit", "8bit")])
@pytest.mark.parametrize("how", ["checkpoint", "option"])
@pytest.mark.usefixtures("steps")
def test_from_8_bits_to_16_and_back(before, after, how):
    params = bf16((64, 128))
    optimizer = optim.AdamW8bit(params, weight_correction=before, lr=1e-3)
    run(optimizer, params, 3)
    exact = master(optimizer, params[0])
    if how == "checkpoint":
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][0]["weight_correction"] = after
        optimizer = optim.AdamW8bit(params)
        optimizer.load_state_dict(state_dict)
    optimizer.param_groups[0]["weight_correction"] = after
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, params, 1, first=3)
    error = (bits(master(optimizer, params[0])) - bits(exact)).abs().max()
    assert error < (1 if after == "16bit" else 256), "a unit of the 24th bit"


@pytest.mark.usefixtures("steps")
def test_other_dtypes_have_none():
    params = [*bf16((64, 100)), nn.Parameter(rand(64, 100)), nn.Parameter(rand(64, 100).half())]
    optimizer = optim.AdamW8bit(params, weight_correction="16bit")
    run(optimizer, params, 1)
    assert ["weight_correction" in optimizer.state[p] for p in params] == [True, False, False]
