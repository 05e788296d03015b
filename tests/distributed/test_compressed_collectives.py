"""`compress_collectives_`: the reduce-scatter of int8 codes, packed gathers, and the bytes that both send."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import lowbit
from lowbit import train
from lowbit.testing.comparison import same_bits, values
from lowbit.testing.fsdp2 import TwoLinears, batch_of, gradients, shard
from lowbit.testing.launch import launch
from lowbit.train.collectives import BLOCK, Int8ReduceScatter
from tests.distributed.test_bytes import device
from tests.tensor.cases import CASES, named


def reduced(x, op=dist.ReduceOp.SUM, seed=0, name="", dtype=None):
    n = x.numel() // dist.get_world_size()
    out = torch.empty(n, dtype=dtype or x.dtype, device=x.device)
    Int8ReduceScatter(seed, name)(out, x, dist.group.WORLD, op)
    return out


def gradient_of(rank, world_size, n, dtype=torch.float32):
    """[W · n], whose blocks differ in size by powers of ten."""
    x = values((world_size * n,), 7 + rank, dtype=torch.float64)
    return (x * 10.0 ** (torch.arange(len(x)) // BLOCK % 7 - 3)).to(device(), dtype)


def exact(x, rank, world_size):
    """This rank's part of the sum in float64, and the bound of its error: the scales of all ranks. A scale is the
    block's largest magnitude / 127."""
    parts = x.double().view(world_size, -1).clone()
    padded = nn.functional.pad(parts.abs(), (0, -parts.shape[1] % BLOCK))
    steps = padded.unflatten(1, (-1, BLOCK)).amax(2, keepdim=True) / 127
    steps = steps.expand(-1, -1, BLOCK).flatten(1)[:, : parts.shape[1]].contiguous()
    dist.all_reduce(parts)
    dist.all_reduce(steps)
    return parts[rank], steps[rank]


def check_sum(rank, world_size):
    for n in (1, 255, 256, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            x = gradient_of(rank, world_size, n, dtype)
            expected, bound = exact(x, rank, world_size)
            found = reduced(x)
            assert found.dtype is dtype
            rounding = torch.finfo(dtype).eps * expected.abs() + 1e-5 * bound + 1e-7
            assert bool(((found - expected).abs() <= bound + rounding).all()), (n, dtype)
            for op, factor in (
                (dist.ReduceOp.AVG, 1 / world_size),
                (dist._make_nccl_premul_sum(0.125), 0.125),
            ):
                scaled = reduced(x, op, dtype=torch.float32)
                assert torch.equal(scaled, reduced(x, dtype=torch.float32) * factor), (n, dtype)
    return True


def check_unbiased(rank, world_size):
    """The mean over 64 seeds has an error 8 times as small as one result. Seeds, names and ranks draw other bits."""
    x, count = gradient_of(rank, world_size, 1000), 64
    expected, bound = exact(x, rank, world_size)
    errors = torch.stack([(reduced(x, seed=seed) - expected) / bound for seed in range(count)])
    one = errors.square().mean().sqrt()
    assert 0.1 < one * world_size**0.5 < 0.45  # at most 1/sqrt(6) of a step: uniform positions
    assert errors.mean(0).square().mean().sqrt() < 1.2 * one / count**0.5
    assert same_bits(reduced(x), reduced(x)) and not same_bits(reduced(x), reduced(x, seed=1))
    assert not same_bits(reduced(x), reduced(x, name="blocks.0"))
    same = gradient_of(0, world_size, 1000)  # the same on all ranks: their errors still differ
    expected, bound = exact(same, rank, world_size)
    error = ((reduced(same, seed=3) - expected) / bound).square().mean().sqrt()
    assert error < 1.1 * one
    return True


def check_special(rank, world_size):
    """NaN and infinities of any rank reach the result of their block, and no other. Zeros stay zeros."""
    n = 4 * BLOCK
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = gradient_of(rank, world_size, n)
        if rank == world_size - 1:
            x.view(world_size, -1)[:, BLOCK + 5] = bad
        found = reduced(x).view(4, BLOCK)
        assert bool(found[1].isnan().all()) and bool(found[[0, 2, 3]].isfinite().all()), bad
    zeros = torch.zeros(world_size * n, device=device())
    assert same_bits(reduced(zeros), zeros[:n])
    tiny = torch.full_like(zeros, 1e-42)
    assert bool((reduced(tiny).abs() <= world_size * 2.0**-126).all())
    assert reduced(zeros[:0]).shape == (0,)
    for options in ({"op": dist.ReduceOp.MAX}, {"op": dist.ReduceOp.SUM, "async_op": True}):
        with pytest.raises(NotImplementedError, match="accepted"):
            Int8ReduceScatter(0, "")(tiny[:n], tiny, dist.group.WORLD, **options)
    return True


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("check", [check_sum, check_unbiased, check_special])
def test_reduce_scatter(check, world_size):
    assert launch(check, world_size) == [True] * world_size


# ---- under FSDP2 -----------------------------------------------------------------------------------------------------


class Plain:
    trainable = True

    @staticmethod
    def make(shape, seed):
        return values(shape, seed)


def trained(model, rank, accumulated=1, dtype=torch.float32):
    """The gradients of a backward pass, or of several of which the last one reduces."""
    for i in range(accumulated):
        model.set_requires_gradient_sync(i == accumulated - 1)
        model(batch_of(rank + 10 * i, dtype).to(device())).float().square().mean().backward()
    return {name: g.full_tensor() for name, g in gradients(model).items()}


def check_gradients(rank, world_size):
    """Gradients beside torch's: even and uneven shards, bfloat16, HSDP, accumulation, a frozen weight."""
    cases = [(rows, dtype, None) for rows in (64, 33, 1) for dtype in (None, torch.bfloat16)]
    if world_size == 4:
        replicated = init_device_mesh(device(), (2, 2), mesh_dim_names=("replicate", "shard"))
        cases = [(33, None, None), (64, torch.bfloat16, replicated), (33, None, replicated)]
    for rows, dtype, mesh in cases:
        found = {}
        for compressed in (False, True, True):
            model = TwoLinears(Plain, rows).to(device())
            model.second.weight.requires_grad_(rows != 33)
            model = shard(model, dtype, mesh)
            if compressed:
                assert train.compress_collectives_(model) is None
            found.setdefault(compressed, []).append(trained(model, rank, 3))
        (torchs,), (ours, again) = found[False], found[True]
        assert ours.keys() == torchs.keys() and ("second.weight" in ours) == (rows != 33)
        for name, expected in torchs.items():
            where = (rows, dtype, mesh, name)
            assert ours[name].dtype is expected.dtype, where
            assert same_bits(ours[name], again[name]), where
            assert not (name == "first.weight" and same_bits(ours[name], expected)), where
            error = (ours[name] - expected).float().norm() / expected.float().norm()
            assert error < 0.03, (*where, error)
    return True


def check_average_and_factor(rank, world_size):
    """Without `set_force_sum_reduction_for_comms` torch asks for AVG and PREMUL_SUM, which gloo itself lacks."""
    found = []
    for factor in (None, float(world_size), 8.0):
        model = nn.Linear(100, 33, bias=False, device=device())
        with torch.no_grad():
            model.weight.copy_(values((33, 100), 1))
        fully_shard(model, mesh=init_device_mesh(device(), (world_size,)))
        train.compress_collectives_(model)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        found.append(trained(model, rank)["weight"])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0] * (world_size / 8), found[2])
    return True


def check_order(rank, world_size):
    """Before the last `fully_shard` it refuses, and compresses nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device())
    mesh = init_device_mesh(device(), (world_size,))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"but 1\.weight is in none of them \(2 parameters\)"):
        train.compress_collectives_(model)
    train.compress_collectives_(model[0])
    fully_shard(model, mesh=mesh)
    train.compress_collectives_(model)
    return True


def check_packed(rank, world_size):
    """Losses and gradients with packed gathers are those without, to the bit, after a step too. Uneven shards (33 rows)
    travel in whole bytes whichever codes they hold."""
    cases = [case for case in CASES if case.name.startswith("qat-")]
    assert len(cases) > 5
    for case in cases:
        for rows in (64, 33) if case.name in ("qat-int4-g32", "qat-mxfp4") else (64,):
            found = []
            for packs in (False, True):
                model = shard(TwoLinears(case, rows).to(device()))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                x = batch_of(rank).to(device())
                losses = [model(x).square().mean()]  # a gather before the call
                if packs:
                    train.compress_collectives_(model, gradients=False)
                for _ in range(2):
                    losses.append(model(x).square().mean())
                    losses[-1].backward()
                    optimizer.step()
                found.append((torch.stack(losses).detach(), *gradients(model).values()))
            for plain, packed in zip(*found, strict=True):
                assert torch.equal(*(getattr(t, "_local_tensor", t) for t in (plain, packed))), (
                    case.name,
                    rows,
                )
    return True


def check_resumed(rank, world_size):
    """Two steps, then two by another model from the states of the first: the bits of four steps at once. Also of int8
    weights that step in backward, with their errors in the momentum."""

    def build(in_backward):
        torch.manual_seed(0)
        case = "train-int8-weight" if in_backward else "qat-int4-g32"
        model = shard(TwoLinears(*named(case), 33).to(device()))
        train.compress_collectives_(model, seed=5)
        options = {"weight_correction": "momentum"} if in_backward else {}
        optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2, **options)
        if in_backward:
            lowbit.optim.step_in_backward(optimizer, bucket_mib=1e-6)
        return model, optimizer

    def steps(model, optimizer, numbers):
        for i in numbers:
            model(batch_of(100 * i + rank).to(device())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for in_backward in (False, True):
        straight, first, second = (build(in_backward) for _ in range(3))
        steps(*straight, range(4))
        steps(*first, range(2))
        for own, other in zip(second, first, strict=True):
            own.load_state_dict(copy.deepcopy(other.state_dict()))
        steps(*second, range(2, 4))
        for own, other in zip(straight[0].parameters(), second[0].parameters(), strict=True):
            part = "codes" if in_backward else "weight"
            assert same_bits(*(getattr(t.to_local(), part, t.to_local()) for t in (own, other)))
    return True


IN_TWO = [check_average_and_factor, check_order, check_packed, check_resumed]
CHECKS = [check_sum, check_unbiased, check_special, check_gradients, *IN_TWO]
"""Those that run over NCCL too, on two and four GPUs (test_multigpu.py)."""


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients(world_size):
    assert launch(check_gradients, world_size) == [True] * world_size


@pytest.mark.parametrize("check", IN_TWO)
def test_two_processes(check):
    assert launch(check, 2) == [True] * 2


# ---- bytes -----------------------------------------------------------------------------------------------------------

BYTES = {
    "bf16": (8.0, 5.02),
    "int8": (6.0, 3.02),
    "float8": (6.0, 3.02),
    "int8-weights": (6.0, 3.02),
    "qat-int4": (6.06, 2.15),
    "mxfp4": (12.0, 2.15),
}
"""Bytes a parameter and step without and with compression: two gathers and a float32 reduction. The weights are
float32, and those without a scheme are gathered in bfloat16."""


SCHEMES = {
    "int8": lowbit.Int8MixedPrecision(always=True),
    "float8": lowbit.Float8MixedPrecision(always=True),
    "int8-weights": lowbit.Int8Weight(),
}


@contextlib.contextmanager
def counted_bytes():
    """Bytes that collectives get of a rank, in a list, while the block runs."""
    sent, own = [], {}
    for name in dir(dist):
        if name.startswith(
            ("all_gather_into", "all_gather_single", "reduce_scatter", "all_to_all")
        ):
            own[name] = getattr(dist, name)

            def counting(*args, _own=own[name], _gathers="gather" in name, **kwargs):
                given = kwargs.get("input_tensor", kwargs.get("input"))
                given = args[1] if given is None else given
                sent.append(given.nbytes * (dist.get_world_size() if _gathers else 1))
                return _own(*args, **kwargs)

            setattr(dist, name, counting)
    try:
        yield sent
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def check_bytes(rank, world_size):
    found = {}
    for name in BYTES:
        for compressed in (False, True):
            model = nn.Sequential(nn.Linear(4096, 64, bias=False))
            if name in SCHEMES:
                train.prepare_(model, SCHEMES[name])
            elif name != "bf16":
                scheme = lowbit.Int4WeightOnly() if "int4" in name else lowbit.MXFP4WeightOnly()
                lowbit.qat.prepare_(model, scheme)
            policy = MixedPrecisionPolicy(
                None if "4" in name else torch.bfloat16, reduce_dtype=torch.float32
            )
            fully_shard(
                model[0],
                mesh=init_device_mesh("cpu", (world_size,)),
                mp_policy=policy,
                reshard_after_forward=True,
            )
            model[0].set_force_sum_reduction_for_comms(True)
            assert isinstance(model[0], FSDPModule)
            if compressed:
                train.compress_collectives_(model)
            with counted_bytes() as sent:
                model(values((4, 4096), 1)).float().sum().backward()
            assert len(sent) == 3
            found.setdefault(name, []).append(round(sum(sent) / (4096 * 64), 2))
    return found


def test_bytes_a_parameter_and_step():
    found, other = launch(check_bytes, 2)
    assert found == other == {name: list(pair) for name, pair in BYTES.items()}


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "call torch.distributed.fsdp.fully_shard first"),
        ({"seed": -1}, ValueError, "got -1"),
        ({"seed": 1.0}, TypeError, "got 1.0"),
        ({"gradients": False, "weights": False}, ValueError, "nothing to compress"),
    ],
)
def test_refusals(options, error, match):
    with pytest.raises(error, match=match):
        train.compress_collectives_(nn.Linear(4, 4), **options)
