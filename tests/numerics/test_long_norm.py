"""Norms of millions of elements on a CPU, where float32 sums lose small squares, and who computes them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.numerics.long_norm import BLOCK, long_norm
from lowbit.numerics.snr import snr
from lowbit.optim.step.orthogonalize import orthogonalize

COUNT = 2000 * 2048
SMALL = torch.full((2000, 2048), 1e-3)
"""torch.linalg.vector_norm is off by 0.3% here."""
EXACT = SMALL.double().square().sum().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (BLOCK + 3,), (37, 1000), (3, 5, 7, 101)])
def test_the_norm_of_any_shape(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for own in (x, x.mT if x.ndim > 1 else x):
        found = long_norm(own)
        assert found.dtype == torch.float64 and found.shape == ()
        assert found.item() == pytest.approx(x.double().square().sum().sqrt().item(), rel=1e-6)


def test_many_elements():
    assert abs(torch.linalg.vector_norm(SMALL).item() / EXACT - 1) > 1e-3  # what it is for
    for x in (SMALL, SMALL.flatten(), SMALL.view(2, -1), SMALL.view(-1, 2), SMALL.view(4, -1).mT):
        assert long_norm(x).item() == pytest.approx(EXACT, rel=1e-6)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_squares_beyond_float32(size):
    x = torch.full((2 * BLOCK,), size)
    assert long_norm(x).item() == pytest.approx(size * math.sqrt(2 * BLOCK), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_not_finite_exactly_if_an_element_is(value):
    for place in (0, BLOCK, 2 * BLOCK + 1):
        x = torch.ones(2 * BLOCK + 2)
        x[place] = value
        assert not long_norm(x).isfinite()


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_gradients_on_the_host_are_clipped_by_their_true_norm(offload_gradients):
    p = nn.Parameter(torch.zeros_like(SMALL))
    optimizer = optim.CPUOffloadOptimizer(
        [p], torch.optim.SGD, lr=1.0, offload_gradients=offload_gradients
    )
    (p * SMALL).sum().backward()
    assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(EXACT, rel=1e-6)
    optimizer.step()
    assert p.detach().double().square().sum().sqrt().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("fused", [None, False])
def test_gradients_are_clipped_by_their_true_norm_in_a_step(fused):
    p = nn.Parameter(torch.zeros_like(SMALL))
    optimizer = optim.SGD([p], lr=1.0, max_grad_norm=1.0, state="fp32", fused=fused)
    (p * SMALL).sum().backward()
    optimizer.step()
    assert p.detach().double().square().sum().sqrt().item() == pytest.approx(1.0, rel=1e-5)


def test_reported_signal_to_noise():
    """Of tensors whose first rows take more than the elements of one chunk."""
    noisy = SMALL.view(2, -1) * (1 + 1e-2)
    exact = 20 * math.log10(EXACT / (noisy - SMALL.view(2, -1)).double().norm().item())
    assert snr(SMALL.view(2, -1), noisy) == pytest.approx(exact, abs=1e-4)


def test_matrices_are_orthogonalized_by_their_true_norm():
    """Without iterations that hide it: the coefficients leave X as it is."""
    found = orthogonalize(SMALL[None], (1.0, 0.0, 0.0), steps=1, eps=1e-7)
    assert found.double().square().sum().sqrt().item() == pytest.approx(1.0, rel=1e-6)
