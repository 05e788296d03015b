"""Second moments in 4 bits over many steps: the mean of what is stored is the moment, on every kind of device."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.codebook import SQUARES
from lowbit.optim import LowbitOptimizer
from lowbit.tensor import CodebookTensor
from lowbit_kernels.fused_step import Rule
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.conftest import needs_compiler
from tests.optim.counted import emulate, launched
from tests.optim.problems import is_beside, rand


class Stored(LowbitOptimizer):
    """Stores its gradient as a second moment."""

    moments: ClassVar = {"square": False}
    default_state = "4bit"

    def __init__(self, params, lr=0.0, **common):
        super().__init__(params, {"lr": lr}, common)

    @staticmethod
    def reference(param, grad, square):
        square.copy_(grad)

    def rule(self, group):
        return Rule((), "", "s[0] = g;")


class ToNearest(optim.AdamW):
    """AdamW whose second moments are rounded to nearest, as first moments are."""

    def stochastic(self, group):
        return dict.fromkeys(super().stochastic(group), False)


def stored(optimizer, values):
    """The codes of `values` after one more step."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = values.clone()
    optimizer.step()
    return optimizer.state[param]["square"].clone()


def on(device, shape, cls=Stored, **options):
    return cls([nn.Parameter(torch.zeros(shape, device=device))], **options)


def test_the_mean_of_many_steps_is_the_moment(device):
    values = rand(8, 600).square().to(device)
    optimizer = on(device, values.shape)
    total, steps = torch.zeros_like(values, dtype=torch.float64), 50
    for _ in range(steps):
        now = stored(optimizer, values)
        total += now.dequantize()
    assert launched() == steps and is_beside(now.to("cpu"), values.cpu()).all()
    scale = now.scale.repeat_interleave(128, 1)[:, :600].double()
    root = (256 * values / scale).sqrt()
    deviation = scale / 256 * (2 * root.floor() + 1) / 2 / steps**0.5  # at most, of a mean
    error = (total / steps - values) / deviation
    assert (error.abs() < 6)[root >= 1].all() and error[root >= 1].mean().abs() < 0.1
    # below the smallest value there is nothing to choose from
    least = (scale / 256)[root < 1]
    assert torch.allclose((total / steps)[root < 1], least, rtol=1e-6)


def test_equal_draws_everywhere(device):
    """Kernels store what PyTorch operations store, bit for bit where no division rounds."""
    for shape in ((64, 128), (33, 129), (31, 300), (7, 5, 130)):
        values = rand(*shape).square().to(device)
        flat = values.view(-1, values.shape[-1])
        flat[:, ::128] = 4.0
        values = values.clamp(max=4.0)
        fused, eager = on(device, shape), on(device, shape, fused=False)
        for _ in range(2):
            mine, theirs = stored(fused, values), stored(eager, values)
            assert (mine.scale == 4).all() and (theirs.scale == 4).all()
            assert torch.equal(mine.codes, theirs.codes), shape
    assert launched() == 8


@pytest.mark.skipif(not COMPILER, reason="no g++")
@pytest.mark.parametrize("error", [-2, 2])
def test_an_approximate_root_changes_no_code(error, monkeypatch, tmp_path):
    """A GPU's square root may be some units in the last place off: numbers next to squares, with many draws."""
    header = tmp_path / "with_error.h"
    header.write_text(f"#define ROOT_ERROR {error}\n{emulator.HEADER.read_text()}")
    monkeypatch.setattr(emulator, "HEADER", header)
    emulate(monkeypatch)
    table = SQUARES.table()
    steps = torch.arange(-3, 4, dtype=torch.int32)
    near = (table.view(torch.int32)[:, None] + steps).flatten().view(torch.float32).clamp(max=1)
    values = torch.cat([near, table]).repeat(64, 1)  # 128 numbers, the last of them 1
    fused, eager = on("cpu", values.shape), on("cpu", values.shape, fused=False)
    for _ in range(20):
        assert torch.equal(stored(fused, values).codes, stored(eager, values).codes)


class Chosen(Stored):
    """`Stored` whose rounding is an option of the group."""

    def __init__(self, params, lr=0.0, by_chance=True, **common):
        LowbitOptimizer.__init__(self, params, {"lr": lr, "by_chance": by_chance}, common)

    def stochastic(self, group):
        return {"square": group["by_chance"]}


def test_a_step_follows_an_option_that_chooses_the_rounding(device):
    values = rand(40, 128).square().to(device)
    for fused in (None, False):
        optimizer = on(device, values.shape, Chosen, fused=fused)
        stored(optimizer, values)
        optimizer.param_groups[0]["by_chance"] = False
        expected = CodebookTensor.from_float(values, "4bit", signed=False)
        found = stored(optimizer, values)
        assert (found.codes != expected.codes).float().mean() < 1e-2, fused


@needs_compiler
@pytest.mark.parametrize("fused", [True, False], ids=["kernel", "eager"])
def test_second_moments_decay_as_in_exact_arithmetic(fused):
    """With beta2 = 0.999 and without gradients. To nearest nothing would ever change."""
    start = 8 + 8 * torch.rand(64, 128, generator=torch.Generator().manual_seed(0))
    start[:, 0] = 16.0
    for cls in (optim.AdamW, ToNearest):
        param = nn.Parameter(torch.zeros(64, 128))
        optimizer = cls([param], lr=0.0, betas=(0.9, 0.999), state="4bit", fused=fused, seed=4)
        param.grad = torch.zeros_like(param)
        param.grad[:, 0] = 4.0  # keeps the scales of the blocks, which would shrink exactly
        optimizer.step()
        moment = optimizer.state[param]["exp_avg_sq"]
        moment.copy_(start)
        before = moment.dequantize()[:, 1:]
        for step in range(1, 1001):
            optimizer.step()
            if step % 250 == 0:
                left = moment.dequantize()[:, 1:].mean() / before.mean()
                expected = 0.999**step if cls is optim.AdamW else 1.0
                assert left.item() == pytest.approx(expected, rel=0.03), (cls, step)
        if cls is ToNearest:
            assert torch.equal(moment.dequantize()[:, 1:], before)
