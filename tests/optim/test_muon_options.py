"""Muon's options: the scaling of Turbo-Muon and the rows of NorMuon, against float64, in batches and on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowbit import optim
from lowbit.optim import Muon, muon
from lowbit.optim.step import matrix_step
from lowbit.optim.step.muon_formula import even_rows
from lowbit.optim.step.orthogonalize import by_batch, orthogonalize
from lowbit.testing.launch import launch
from tests.optim.problems import parameters, rand, relative, run, saved, set_grads

BOTH = {"ns_scaling": "gram", "ns_steps": 4, "row_beta2": 0.9}
SHAPES = [(65, 96), (96, 65), (70, 70), (1, 500), (500, 1)]


def scaled_iteration(x, steps):
    """The formula of lowbit.optim.step.orthogonalize with the scaling, in float64."""
    x = x.double()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = (x @ x.T).abs().sum(1).clamp_min(1e-14).rsqrt().diag() @ x
    a, b, c = muon.COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scaled_iteration_is_the_formula(shape):
    """Whatever the sizes of rows: their squares would leave float16."""
    x = 1e-4 * rand(2, *shape) * (3 * rand(shape[0], 1, seed=1)).exp()
    options = {"steps": 4, "eps": 1e-7, "scaling": "gram"}
    found = orthogonalize(x.clone(), muon.COEFFICIENTS, **options)
    batched = by_batch(x.bfloat16(), muon.COEFFICIENTS, **options)
    for matrix, one, half in zip(x, found, batched, strict=True):
        expected = scaled_iteration(matrix, 4)
        assert relative(one, expected) < 1e-4
        assert relative(half, scaled_iteration(matrix.bfloat16(), 4)) < 0.004
        assert torch.linalg.matrix_norm(expected, 2) < 1.3


def test_four_scaled_steps_come_nearer_than_five():
    """Where rows differ in size, as those of gradients do."""
    x = rand(1, 64, 256) * (1.5 * rand(64, 1, seed=1)).exp()

    def distance(steps, scaling):
        options = {"steps": steps, "eps": 1e-7, "scaling": scaling}
        values = torch.linalg.svdvals(orthogonalize(x.clone(), muon.COEFFICIENTS, **options))
        return (values - 1).square().mean().sqrt()

    assert distance(4, "gram") < distance(5, "norm") < distance(4, "norm")


@pytest.mark.parametrize("eps", [1e-7, 1e-30])
@pytest.mark.parametrize("scaling", ["norm", "gram"])
def test_zeros_and_rows_of_zeros(scaling, eps):
    """Also where float32 rounds the square of eps to 0."""
    options = {"steps": 4, "eps": eps, "scaling": scaling}
    x = torch.stack([torch.zeros(8, 12), rand(8, 12)])
    x[1, 3] = 0
    for found in (
        orthogonalize(x.clone(), muon.COEFFICIENTS, **options),
        by_batch(x.bfloat16(), muon.COEFFICIENTS, **options),
    ):
        assert not found[0].any() and not found[1, 3].any() and found.isfinite().all()
    assert orthogonalize(x[:0], muon.COEFFICIENTS, **options).shape == (0, 8, 12)


def test_rows_are_evened_by_their_moments():
    """The algorithm of NorMuon in float64, over three steps."""
    moments, expected = torch.zeros(2, 20), torch.zeros(2, 20, dtype=torch.float64)
    for step in range(3):
        o = rand(2, 20, 33, seed=step) * rand(20, 1, seed=9).exp()
        wide = o.double()
        expected = 0.9 * expected + 0.1 * wide.square().mean(-1)
        rows = wide / expected.sqrt().unsqueeze(-1)
        rows *= 20**0.5 / rows.norm(dim=(1, 2), keepdim=True)
        assert relative(even_rows(o, moments, 0.9), rows) < 1e-6
        assert relative(moments, expected) < 1e-6
    assert not even_rows(torch.zeros(1, 4, 6), torch.zeros(1, 4), 0.9).any()


@pytest.mark.parametrize("options", [BOTH, {"row_beta2": 0.0}, {"ns_scaling": "gram"}], ids=str)
@pytest.mark.parametrize("fused", [None, False])
def test_equals_the_reference(options, fused):
    params = parameters(*SHAPES)
    optimizer = Muon(params, lr=0.1, state="fp32", fused=fused, **options)
    kept = [(p.detach().clone(), torch.zeros_like(p), torch.zeros(len(p))) for p in params]
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
        for p, (weight, momentum, row_moment) in zip(params, kept, strict=True):
            muon.reference(weight, p.grad, momentum, lr=0.1, row_moment=row_moment, **options)
            assert relative(p, weight) < 1e-5, p.shape
            assert ("row_moment" in optimizer.state[p]) == ("row_beta2" in options)
            if "row_beta2" in options:
                assert relative(optimizer.state[p]["row_moment"], row_moment) < 1e-5


def test_batches_change_no_bit(monkeypatch):
    results = []
    for batch in (1, 2**24):
        monkeypatch.setattr(matrix_step, "BATCH", batch)
        params = parameters(*[(30, 40)] * 5, (40, 30))
        run(Muon(params, lr=0.1, **BOTH), params, 2)
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert torch.equal(*results)


def test_checkpoints():
    params = parameters((65, 96), (9,))
    optimizer = optim.Muon8bit(params, **BOTH)
    run(optimizer, params, 2)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = optim.Muon8bit(others, **BOTH)
    again.load_state_dict(saved(optimizer.state_dict()))
    run(optimizer, params, 2, first=2)
    run(again, others, 2, first=2)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    bad = saved(optimizer.state_dict())
    bad["state"][0]["row_moment"][4] = -1
    with pytest.raises(ValueError, match="row_moment holds values below 0"):
        again.load_state_dict(bad)
    plain = optim.Muon8bit(parameters((65, 96)))
    run(plain, plain.param_groups[0]["params"], 1)
    old = plain.state_dict()
    for name in ("row_beta2", "ns_scaling"):
        del old["param_groups"][0][name]  # as an older version saved it
    with pytest.raises(ValueError, match=r"Muon8bit takes .*'row_moment'"):
        optim.Muon8bit(parameters((65, 96)), **BOTH).load_state_dict(old)
    optim.Muon8bit(parameters((65, 96))).load_state_dict(old)


def test_moments_of_rows_begin_where_torch_has_none():
    params = parameters((65, 96))
    theirs = torch.optim.Muon(params)
    run(theirs, params, 2)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = optim.Muon8bit(others, **BOTH)
    optimizer.load_state_dict(theirs.state_dict())
    moment = optimizer.state[others[0]]["row_moment"]
    assert moment.shape == (65,) and not moment.any()
    run(optimizer, others, 1, first=2)
    assert moment.all() and not torch.equal(*params, *others) and others[0].isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_scaling": "rows"}, "ns_scaling must be 'norm' or 'gram', got 'rows'"),
        ({"row_beta2": 1.0}, r"row_beta2 must be in \[0, 1\), got 1.0"),
        ({"ns_steps": 0}, "ns_steps must be a whole number from 1 to 99, got 0"),
        ({"adamw_betas": 0.9}, r"adamw_betas must be two numbers in \[0, 1\), got 0.9"),
    ],
    ids=str,
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters((8, 8)), **options)


# ---- ranks --------------------------------------------------------------------------------------------------


def check_ranks(rank, world_size):
    """Sharded by uneven rows, by columns, and stacks: weights and row moments are those of one process."""
    mesh = init_device_mesh("cpu", (world_size,))
    for dim, shape, stacked in (
        (0, (33, 130), False),
        (1, (20, 512), False),
        (0, (3, 20, 70), True),
    ):
        options = {**BOTH, "lr": 0.1, "stacked": stacked}
        whole = [nn.Parameter(rand(*shape, seed=i)) for i in range(3)]
        parts = [
            nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(dim)])) for p in whole
        ]
        reference, optimizer = Muon(whole, **options), Muon(parts, **options)
        for step in range(4):
            for i, (p, part) in enumerate(zip(whole, parts, strict=True)):
                p.grad = rand(*shape, seed=10 * step + i)
                part.grad = distribute_tensor(p.grad, mesh, [Shard(dim)])
            reference.step()
            optimizer.step()
            if step == 1:
                again = Muon(parts, **options)
                again.load_state_dict(optimizer.state_dict())
                optimizer = again
        for p, part in zip(whole, parts, strict=True):
            assert torch.equal(part.full_tensor(), p), dim
            moment = optimizer.state[part]["row_moment"]
            moment = moment.full_tensor() if hasattr(moment, "full_tensor") else moment
            assert torch.equal(moment, reference.state[p]["row_moment"])
    return True


def test_two_processes():
    assert launch(check_ranks, 2) == [True, True]
