"""Orthogonalization, in the ordinary form and in batches of products: against float64, whatever the spectrum."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import _muon as torchs

from lowbit.optim import muon
from lowbit.optim.step import orthogonalize
from lowbit_kernels.runtime.launches import counted
from tests.optim.problems import rand, relative

A, B, C = muon.COEFFICIENTS
OPTIONS = {"steps": 5, "eps": 1e-7}
SHAPES = [(40, 96), (96, 40), (33, 33), (64, 64), (1, 9), (7, 1000)]
SPECTRA = {
    "gaussian": None,
    "from 1 to 1e-5": lambda n: torch.logspace(0, -5, n),
    "of low rank": lambda n: torch.linspace(1, 0.1, n) * (torch.arange(n) < max(1, n // 6)),
    "of rank 1": lambda n: 1.0 * (torch.arange(n) == 0),
    "one large": lambda n: torch.where(torch.arange(n) == 0, 1.0, 1e-3),
    "all equal": torch.ones,
}
by_spectrum = pytest.mark.parametrize("spectrum", SPECTRA)


def matrix(shape, spectrum, device="cpu"):
    """A bfloat16 matrix with these singular values, far from 1 in size."""
    made = SPECTRA[spectrum]
    x = rand(*shape, seed=sum(shape)).to(device)
    if made is not None:
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = (u * made(min(shape)).to(x)) @ v
    return (1e-4 * x).bfloat16()


def exact(x, steps=5, coefficients=muon.COEFFICIENTS):
    """The ordinary form in float64."""
    a, b, c = coefficients
    x = x.double() / x.double().norm()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def in_bfloat16(x):
    return orthogonalize._one(x, muon.COEFFICIENTS, 5, 1e-7, "norm")


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (33, 33), (1, 9)], ids=str)
def test_the_ordinary_form(shape):
    def ordinary(x):
        return orthogonalize.orthogonalize(x, muon.COEFFICIENTS, **OPTIONS)

    matrices = rand(3, *shape)
    result = ordinary(matrices)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3 and values.max() < 1.3
    polar = [u @ v for u, _, v in (torch.linalg.svd(m, full_matrices=False) for m in matrices)]
    assert relative(result, torch.stack(polar)) < 0.35
    low = ordinary(matrices.bfloat16())
    for one, theirs in zip(low, matrices, strict=True):
        expected = torchs._zeropower_via_newtonschulz(theirs, muon.COEFFICIENTS, 5, 1e-7)
        assert one.dtype == expected.dtype
        assert relative(one, expected) < 0.03
    assert torch.equal(ordinary(torch.zeros(2, *shape)), torch.zeros(2, *shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_spectrum
def test_batches_are_more_exact_than_bfloat16(shape, spectrum):
    x = matrix(shape, spectrum)
    expected = exact(x)
    batch = torch.stack([torch.zeros_like(x), x, torch.full_like(x, math.nan), -x])
    with counted() as calls:
        result = orthogonalize.by_batch(batch, muon.COEFFICIENTS, **OPTIONS)
    is_gram = 2 * max(shape) >= 3 * min(shape)
    products = sum(n for (op, _), n in calls.items() if op == "batched_mm")
    assert products == (18 if is_gram else 15)
    assert result.dtype == torch.bfloat16
    assert relative(result[1], expected) < 0.5 * relative(in_bfloat16(x), expected) + 2.5e-3
    assert torch.linalg.matrix_norm(result[1].double(), 2) < 1.25
    assert not result[0].any() and result[2].isnan().all()
    assert torch.equal(result[3], -result[1])
    alone = orthogonalize.by_batch(batch[1:2], muon.COEFFICIENTS, **OPTIONS)
    assert torch.equal(result[1:2], alone)


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("coefficients", [muon.COEFFICIENTS, (2.0, -1.5, 0.5)], ids=str)
def test_steps_and_coefficients(steps, coefficients):
    for shape in ((40, 96), (96, 40), (50, 50)):
        x = matrix(shape, "gaussian")
        result = orthogonalize.by_batch(x[None], coefficients, steps=steps, eps=1e-7)
        assert relative(result[0], exact(x, steps, coefficients)) < 0.01, shape


def test_segments():
    assert [*orthogonalize._segments(5)] == [(3, False), (2, True)]
    assert [*orthogonalize._segments(3)] == [(3, True)]
    assert [*orthogonalize._segments(7)] == [(3, False), (3, False), (1, True)]


def test_range_of_coefficients():
    assert orthogonalize.stays_in_range(muon.COEFFICIENTS, 5)
    assert orthogonalize.stays_in_range(muon.COEFFICIENTS, 20)
    assert orthogonalize.stays_in_range((2.0, -1.5, 0.5), 5)
    assert not orthogonalize.stays_in_range((20.0, 0.0, 0.0), 1)
    assert not orthogonalize.stays_in_range((3.0, 1.0, 0.0), 5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 2048), (2048, 512), (768, 768), (333, 1000)], ids=str)
@by_spectrum
def test_on_a_gpu(shape, spectrum):
    x = matrix(shape, spectrum, "cuda")
    expected = exact(x)
    batch = torch.stack([torch.zeros_like(x), x, torch.randn_like(x)])
    with counted() as calls:
        result = orthogonalize.orthogonalize(batch, muon.COEFFICIENTS, **OPTIONS)
    assert sum(calls.values()) > 15 and not any(name == "torch" for _, name in calls)
    assert relative(result[1], expected) < 0.5 * relative(in_bfloat16(x), expected) + 2.5e-3
    assert not result[0].any()
    alone = orthogonalize.orthogonalize(batch[1:2], muon.COEFFICIENTS, **OPTIONS)
    assert torch.equal(result[1:2], alone)


@pytest.mark.gpu
def test_coefficients_out_of_range_on_a_gpu():
    x = matrix((64, 128), "gaussian", "cuda")
    with counted() as calls:
        options = {"steps": 1, "eps": 1e-7}
        result = orthogonalize.orthogonalize(x[None], (20.0, 0.0, 0.0), **options)
    assert not calls and relative(result[0], exact(x, 1, (20.0, 0.0, 0.0))) < 0.01
