"""bfloat16 weights without a float32 copy: stochastic rounding, and the correction of 8 bits."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowbit import optim
from lowbit.numerics.rounding import (
    bits_at,
    join_bf16,
    keys,
    round_bf16,
    split_bf16,
)
from tests.covering import usually
from tests.optim.problems import FORMATS, parameters, rand, relative, run, set_grads

some = pytest.mark.parametrize("state", usually(FORMATS, "fp32", "4bit"))
SHAPES = [(64, 100), (13,), (5, 7, 137), (0, 3)]


def bf16(*shapes):
    return parameters(*shapes, dtype=torch.bfloat16)


def wide(params):
    return [nn.Parameter(p.detach().float()) for p in params]


# ---- stochastic rounding ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps")
def test_the_random_bits_are_those_of_the_key():
    """(seed, step, 4 * index + slot, element): slot 0 for the weight, 2 for the second of the states."""
    first, p = bf16((4,), (70, 100))
    q = wide([p])[0]
    optimizer = optim.AdamW([first, p], state="bf16", bf16_stochastic_round=True, seed=7, lr=0.01)
    full = optim.AdamW([q], state="fp32", lr=0.01)
    for step in range(1, 3):
        before = {k: v.float() for k, v in optimizer.state[p].items()}
        full.state[q].update({**before, "step": torch.tensor(step - 1.0)} if step > 1 else {})
        with torch.no_grad():
            q.copy_(p)
        p.grad = rand(70, 100, seed=step).bfloat16()
        q.grad = p.grad.float()
        optimizer.step()
        full.step()
        for slot, new, exact in (
            (0, p, q),
            (2, optimizer.state[p]["exp_avg_sq"], full.state[q]["exp_avg_sq"]),
        ):
            key = map(torch.as_tensor, keys(7, step, 4 * 1 + slot))
            bits = bits_at(torch.arange(7000).view(70, 100), *key)
            assert torch.equal(new, round_bf16(exact.detach(), bits)), (step, slot)
        exact = full.state[q]["exp_avg"]
        assert torch.equal(optimizer.state[p]["exp_avg"], exact.bfloat16())


@some
@pytest.mark.usefixtures("steps")
def test_rounded_up_or_down_and_right_on_average(state):
    p = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], lr=2e-4, weight_decay=0.0, state=state, bf16_stochastic_round=True)
    for _ in range(20):  # each update is a fortieth of the distance between neighbours
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 - 20 * 2e-4, abs=5e-4)
    plain = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    plain.grad = torch.ones_like(plain)
    optim.AdamW([plain], lr=2e-4, weight_decay=0.0, state=state).step()
    assert torch.equal(plain, torch.ones_like(plain)), "lost without it"


@pytest.mark.usefixtures("steps")
def test_seeds_differ_and_other_dtypes_are_left_alone():
    results = []
    for seed in (0, 0, 1):
        params = bf16((64, 100))
        run(optim.AdamW8bit(params, bf16_stochastic_round=True, seed=seed), params, 2)
        results.append(params[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    for dtype in (torch.float32, torch.float16):
        a, b = parameters(*SHAPES, dtype=dtype), parameters(*SHAPES, dtype=dtype)
        run(optim.AdamW8bit(a), a, 2)
        run(optim.AdamW8bit(b, bf16_stochastic_round=True), b, 2)
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# ---- correction ------------------------------------------------------------------------------------------------

EDGES = [
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x3F800000, 0x3F807F80, 0x3F808000, 0x3F807F7F, 0x3F80FFFF,
    0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF,
]  # fmt: skip


def float_of(bits):
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def naive_24_bits(bits):
    """The value24 of the definition, in Python's integers."""
    return (bits + 0x80) & 0xFFFFFF00


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_split_and_join_keep_24_bits(some):
    bits = EDGES + some
    x = float_of(bits)
    weight, correction = split_bf16(x)
    assert weight.dtype == torch.bfloat16 and correction.dtype == torch.int8
    back = join_bf16(weight, correction).view(torch.int32).tolist()
    for u, value, w, c, b in zip(bits, x, weight, correction, back, strict=True):
        high = (naive_24_bits(u) + 0x8000) & 0xFFFF0000
        if not value.isfinite() or high & 0x7F800000 == 0x7F800000 or high >= 2**32:
            assert c == 0
            assert torch.equal(w, value.bfloat16()) or (w.isnan() and value.isnan())
        else:
            assert b & 0xFFFFFFFF == naive_24_bits(u)
            assert w.view(torch.int16).item() & 0xFFFF == high >> 16


@some
@pytest.mark.usefixtures("steps")
def test_a_corrected_weight_follows_a_float32_one(state):
    params = bf16(*SHAPES)
    full, plain = wide(params), bf16(*SHAPES)
    options = {"lr": 1e-4, "state": state, "weight_decay": 0.1}
    optimizer = optim.AdamW(params, weight_correction="8bit", **options)
    run(optimizer, params, 20)
    run(optim.AdamW(plain, **options), plain, 20)
    other = optim.AdamW(full, **options)
    for step in range(20):  # the same gradients, bfloat16 ones
        set_grads(params, step)
        for p, q in zip(params, full, strict=True):
            q.grad = p.grad.float()
        other.step()
    for p, q, lost, start in zip(params, full, plain, wide(bf16(*SHAPES)), strict=True):
        if not p.numel():
            continue
        exact = join_bf16(p.detach(), optimizer.state[p]["weight_correction"])
        error = relative(exact - start, q - start)
        assert error < 0.06, "an update of 1e-4 is a few units of the 24th bit of a weight near 1"
        assert relative(p.float(), exact) < 2**-8
        assert relative(lost.float() - start, q - start) > 10 * error


@pytest.mark.usefixtures("steps")
def test_the_correction_is_one_byte_travels_in_checkpoints_and_stays_out_of_torchs():
    params = bf16((64, 128))
    optimizer = optim.AdamW4bit(params, weight_correction="8bit", lr=1e-3)
    run(optimizer, params, 3)
    state = optimizer.state[params[0]]
    assert state["weight_correction"].dtype == torch.int8
    assert optimizer.state_bytes() == 64 * 128 * (1.0625 + 1) + 8
    copies = [nn.Parameter(params[0].detach().clone())]
    other = optim.AdamW4bit(copies, weight_correction="8bit")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 3, first=3)
    run(other, copies, 3, first=3)
    assert torch.equal(params[0], copies[0])
    plain = optim.dequantize_state_dict(optimizer.state_dict())
    assert set(plain["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    theirs = torch.optim.AdamW(copies)
    theirs.load_state_dict(plain)
    other.load_state_dict(theirs.state_dict())
    run(other, copies, 1, first=6)
    assert "weight_correction" in other.state[copies[0]], (
        "starts at zero where a checkpoint has none"
    )


@pytest.mark.usefixtures("steps")
def test_only_bfloat16_weights_have_a_correction():
    params = [*parameters((64, 100)), *bf16((64, 100))]
    optimizer = optim.AdamW8bit(params, weight_correction="8bit")
    run(optimizer, params, 1)
    assert ["weight_correction" in optimizer.state[p] for p in params] == [False, True]
