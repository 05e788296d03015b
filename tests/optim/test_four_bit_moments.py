"""Moments in 4 bits over many steps: the mean of what is stored is the moment, on every kind of device."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.numerics.codebook import Codebook, quantize_blockwise
from lowbit.numerics.packing import pack
from lowbit.numerics.rounding import bits_at, keys
from lowbit.optim import LowbitOptimizer
from lowbit.optim.state import state as states
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.conftest import needs_compiler
from tests.optim.counted import emulate, launched
from tests.optim.problems import is_beside, rand


class Stored(LowbitOptimizer):
    """Stores its gradient as a second moment."""

    moments: ClassVar = {"kept": False}
    default_state = "4bit"

    def __init__(self, params, lr=0.0, **common):
        super().__init__(params, {"lr": lr}, common)

    @staticmethod
    def reference(param, grad, kept):
        kept.copy_(grad)

    def rule(self, group):
        return "s[0] = g;"


class StoredSigned(Stored):
    """Stores its gradient as a first moment."""

    moments: ClassVar = {"kept": True}


kinds = pytest.mark.parametrize("cls", [StoredSigned, Stored], ids=["first", "second"])


def moments(cls, *shape, seed=0):
    """Values of many magnitudes."""
    x = rand(*shape, seed=seed) ** 3
    return x if cls is StoredSigned else x.abs()


def stored(optimizer, values):
    """The codes of `values` after one more step."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = values.clone()
    optimizer.step()
    return optimizer.state[param]["kept"].clone()


def on(device, shape, cls, **options):
    return cls([nn.Parameter(torch.zeros(shape, device=device))], **options)


@pytest.mark.cover("values")
@kinds
def test_the_mean_of_many_steps_is_the_moment(device, cls):
    values = moments(cls, 8, 600).to(device)
    optimizer = on(device, values.shape, cls)
    total, steps = torch.zeros_like(values, dtype=torch.float64), 50
    for _ in range(steps):
        now = stored(optimizer, values)
        total += now.dequantize()
    assert launched() == steps and is_beside(now.to("cpu"), values.cpu()).all()
    scale = now.scale.repeat_interleave(128, 1)[:, :600].double()
    y = values.abs() / scale
    squares, powers = (2 * (49 * y).sqrt().floor() + 1) / 49, 2.0 ** y.log2().floor()
    gap = squares if cls is StoredSigned else powers
    deviation = scale * gap / 2 / steps**0.5  # at most, of a mean
    error = (total / steps - values) / deviation
    inside = y >= 2.0**-15
    assert (error.abs() < 6)[inside].all() and error[inside].mean().abs() < 0.1
    if cls is Stored:  # below the smallest value there is nothing to choose from
        assert torch.allclose((total / steps)[~inside], (scale * 2.0**-15)[~inside], rtol=1e-6)


@kinds
def test_equal_draws_everywhere(device, cls):
    """Kernels store what PyTorch operations store, bit for bit where no division rounds."""
    for shape in ((64, 128), (33, 129), (31, 300), (7, 5, 130)):
        values = moments(cls, *shape).to(device)
        flat = values.view(-1, values.shape[-1])
        flat[:, ::128] = 4.0
        values = values.clamp(-4.0, 4.0)
        fused, eager = on(device, shape, cls), on(device, shape, cls, fused=False)
        for _ in range(2):
            mine, theirs = stored(fused, values), stored(eager, values)
            assert (mine.scale == 4).all() and (theirs.scale == 4).all()
            assert torch.equal(mine.codes, theirs.codes), shape
    assert launched() == 8


@kinds
@pytest.mark.parametrize("base", [0, 8, 5, 2**35 - 2048, 2**35 + 16, 3 * 2**36 + 1])
def test_draws_of_any_global_index(device, cls, base, monkeypatch):
    """A GPU's kernel has a short path for whole octets whose numbers have 32 bits."""
    monkeypatch.setattr(states, "global_index", lambda _: (base, ()))
    values = moments(cls, 16, 256).clamp(-4.0, 4.0)
    values.view(-1)[::128] = 4.0
    found = stored(on(device, values.shape, cls, seed=7), values.to(device))
    key = keys(7, torch.tensor(1), torch.tensor(1))  # of step 1, and of the first state
    random = bits_at(base + torch.arange(values.numel()), *key).view_as(values)
    codes, _ = quantize_blockwise(values, Codebook(4, cls is StoredSigned), 128, random)
    assert torch.equal(found.codes.cpu(), pack(codes, 4))
    assert launched() == 1


def test_scales_of_second_moments_are_powers_of_two(device):
    """So nothing rounds but the codes, and kernels store the bits of PyTorch operations for all values."""
    values = moments(Stored, 40, 300).to(device)
    fused, eager = on(device, values.shape, Stored), on(device, values.shape, Stored, fused=False)
    for factor in (1.0, 1e-9, 3e4):
        mine, theirs = stored(fused, values * factor), stored(eager, values * factor)
        assert (mine.scale.log2() % 1 == 0).all() and torch.equal(mine.scale, theirs.scale)
        assert torch.equal(mine.codes, theirs.codes)


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize("error", [-2, 2])
def test_an_approximate_root_changes_no_code(error, monkeypatch, tmp_path):
    """A GPU's square root may be some units in the last place off: numbers next to squares, with many draws."""
    header = tmp_path / "with_error.h"
    header.write_text(f"#define ROOT_ERROR {error}\n{emulator.HEADER.read_text()}")
    monkeypatch.setattr(emulator, "HEADER", header)
    emulate(monkeypatch)
    table = Codebook(4, True).table()[7:15]
    steps = torch.arange(-3, 4, dtype=torch.int32)
    near = (table[1:].view(torch.int32)[:, None] + steps).flatten().view(torch.float32).clamp(max=1)
    row = torch.cat(
        [near, -near, table, torch.zeros(128 - 2 * len(near) - len(table) - 1), table[-1:]]
    )
    values = row.repeat(32, 1)  # 128 numbers, the last of them 1
    fused, eager = (on("cpu", values.shape, StoredSigned, fused=f) for f in (None, False))
    for _ in range(20):
        assert torch.equal(stored(fused, values).codes, stored(eager, values).codes)


def test_a_momentum_follows_a_change_of_the_gradient(device):
    """To nearest, a momentum moves by less than half the way to the next of 16 values, and stays where it is."""
    grad = rand(8, 128).to(device)
    grad[:, 0] = 4.0  # keeps the scales of the blocks
    for fused in (None, False):
        param = nn.Parameter(torch.zeros_like(grad))
        optimizer = optim.SGD([param], lr=0.0, momentum=0.95, dampening=0.95, state="4bit", fused=fused)  # fmt: skip
        total = torch.zeros_like(grad)
        for step in range(120):
            param.grad = grad.clone() if step < 60 else torch.where(grad == 4.0, grad, -grad)
            optimizer.step()
            if step >= 100:
                total += optimizer.state[param]["momentum_buffer"].dequantize()
        found, wanted = (total / 20)[:, 1:], -grad[:, 1:]
        assert ((found * wanted).sum() / wanted.square().sum()).item() == pytest.approx(1, abs=0.3)


def test_muon_draws_by_step_with_and_without_a_kernel(device):
    """Its momentum has a kernel of its own, and another step in PyTorch operations."""
    codes = {}
    for fused in (None, False):
        param = nn.Parameter(torch.zeros(96, 128, device=device))
        optimizer = optim.Muon4bit([param], fused=fused)
        for _ in range(3):
            param.grad = torch.ones_like(param)
            param.grad[:, 1:] = rand(96, 127).abs().to(device) / 4
            optimizer.step()
            codes.setdefault(fused, []).append(
                optimizer.state[param]["momentum_buffer"].codes.clone()
            )
    for mine, theirs in zip(codes[None], codes[False], strict=True):
        assert (mine != theirs).float().mean() < 0.01
    assert (codes[None][1] != codes[None][2]).float().mean() > 0.05


@needs_compiler
@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "eager"])
def test_second_moments_decay_as_in_exact_arithmetic(fused):
    """With beta2 = 0.999 and without gradients. To nearest nothing would ever change."""
    start = 8 + 8 * torch.rand(64, 128, generator=torch.Generator().manual_seed(0))
    start[:, 0] = 16.0
    param = nn.Parameter(torch.zeros(64, 128))
    optimizer = optim.AdamW4bit([param], lr=0.0, betas=(0.9, 0.999), fused=fused, seed=4)
    param.grad = torch.zeros_like(param)
    param.grad[:, 0] = 4.0  # keeps the scales of the blocks, which would shrink exactly
    optimizer.step()
    moment = optimizer.state[param]["exp_avg_sq"]
    moment.copy_(start)
    before = moment.dequantize()[:, 1:].mean()
    for step in range(1, 401):
        optimizer.step()
        if step % 100 == 0:
            left = moment.dequantize()[:, 1:].mean() / before
            assert left.item() == pytest.approx(0.999**step, rel=0.03), step
