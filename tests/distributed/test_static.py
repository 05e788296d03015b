"""Static scales of activations on two processes: FSDP2 and DDP calibrate, train and convert as one process does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import lowbit
from lowbit import qat
from lowbit.numerics.learned_scales import RATE
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.testing.launch import launch

SCHEME = Scheme(
    lowbit.Int4WeightOnly(32).weight,
    Spec(Int(8), lowbit.PerTensor(), "asymmetric", static=True),
)
INT8 = lowbit.Int8StaticActivationInt8Weight()
METHODS = ("minmax", "squared_error")


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 47), nn.SiLU(), nn.Linear(47, 33)).to(dtype)


def prepared(scales="learned", scheme=SCHEME):
    found = model()
    qat.prepare_(found, scheme, scales=scales)
    return found


def shard(found, world_size, dtype=None):
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for module in (found[0], found[2], found):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for module in found.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return found


def batches(rank=None):
    """Batches of unequal ranges; of one rank, or of all."""
    every = [
        (seed + 1) * torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
        for seed in range(6)
    ]
    return every if rank is None else every[rank::2]


def calibrate(found, given, **options):
    with lowbit.calibrate(found, **options) as ranges:
        for x in given:
            found(x)
    return ranges


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def step(found, x):
    found.zero_grad()
    y = found(x)
    y.float().square().mean().backward()
    return y.detach()


def same_on_all_ranks(ranges):
    every = [None, None]
    dist.all_gather_object(every, ranges)
    return every[0] == every[1]


def check_calibrations(rank, world_size):
    found = {}
    for method in METHODS:
        for kind in ("fsdp", "ddp", "plain"):
            own = prepared("present")
            if kind == "fsdp":
                own = shard(own, world_size)
            elif kind == "ddp":
                own = DistributedDataParallel(own)
            ranges = calibrate(own, batches(rank), method=method)
            assert same_on_all_ranks(ranges), (method, kind)
            prefix = "module." if kind == "ddp" else ""
            found[method, kind] = [ranges[f"{prefix}{name}"] for name in ("0", "2")]
    return found


def expected_ranges(rank, world_size):
    return {method: [*calibrate(prepared("present"), batches(), method=method).values()]
            for method in METHODS}  # fmt: skip


def test_observers_are_equal_on_all_ranks():
    """And those of one process that sees all batches."""
    first, second = launch(check_calibrations, 2)
    assert first == second
    expected = expected_ranges(0, 1)
    for (method, kind), ranges in first.items():
        assert ranges[0] == expected[method][0], (method, kind)
        assert ranges[1] == pytest.approx(expected[method][1], rel=1e-5), (method, kind)


def check_a_rank_without_batches(rank, world_size):
    found = prepared()
    ranges = calibrate(found, batches() if rank else [])
    assert same_on_all_ranks(ranges)
    with pytest.raises(ValueError, match=r"inputs of 0, 2 \(2 of 2 layers\) .* saw no batch"):
        calibrate(prepared(), [])
    bad = torch.full((3, 64), torch.nan) if rank else torch.ones(3, 64)
    with pytest.raises(ValueError, match="saw NaN or infinite values"):
        calibrate(prepared(), [bad])
    return True


def check_training(rank, world_size):
    """Losses, gradients and the converted model of one process, with frozen and learned scales."""
    x = batches()[1]
    for scales in ("present", "learned"):
        for scheme in (SCHEME, INT8):
            alone = prepared(scales, scheme)
            found = shard(prepared(scales, scheme), world_size)
            calibrate(found, batches(), method="minmax")
            calibrate(alone, batches(), method="minmax")
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (alone, found)]
            for _ in range(3):
                expected, y = step(alone, x), step(found, x)
                torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
                grads = {n: p.grad for n, p in alone.named_parameters()}
                for name, p in found.named_parameters():
                    error = (whole(p.grad) - grads[name]).norm() / grads[name].norm().clamp(1e-6)
                    assert error < 2e-2, (scales, name)
                for optimizer in optimizers:
                    optimizer.step()
                state = {n: whole(p) for n, p in found.state_dict().items()}
                alone.load_state_dict(state)
            again = prepared(scales, scheme)
            again.load_state_dict(state)
            expected = again(x)
            torch.testing.assert_close(found(x), expected, rtol=1e-3, atol=1e-3)
            qat.convert_(again)
            torch.testing.assert_close(again(x), expected, rtol=1e-4, atol=1e-4)
            fresh = shard(prepared(scales, scheme), world_size)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(fresh, state if rank == 0 else {}, options=options)
            torch.testing.assert_close(fresh(x), expected, rtol=1e-3, atol=1e-3)
    return True


def check_mixed_precision(rank, world_size):
    """Frozen scales are buffers, which the policy does not round. A learned one would be."""
    found = shard(prepared("present"), world_size, torch.bfloat16)
    calibrate(found, batches())
    y = step(found, batches()[0])
    alone = prepared("present")
    alone.load_state_dict({n: whole(p) for n, p in found.state_dict().items()})
    qat.convert_(alone)
    lowbit_inputs = alone[0].weight.input_scale
    assert y.dtype is torch.bfloat16 and lowbit_inputs.dtype is torch.float32
    expected = copy.deepcopy(alone).to(torch.bfloat16)(batches()[0].bfloat16())
    assert (y - expected).float().norm() / expected.float().norm() < 2e-2
    learned = shard(prepared("learned"), world_size, torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"a learned scale of the input, gathered as"):
        calibrate(learned, batches())
    return True


def check_checkpoints(rank, world_size, path):
    """torch.distributed.checkpoint, into a model that is not calibrated."""
    for scales in ("present", "learned"):
        found = shard(prepared(scales), world_size)
        calibrate(found, batches())
        dcp.save(found.state_dict(), checkpoint_id=f"{path}/{scales}")
        other = shard(prepared(scales), world_size)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{path}/{scales}")
        other.load_state_dict(state)
        x = batches()[0]
        assert torch.equal(other(x), found(x))
        alone = prepared(scales)  # on one rank, from the same file
        state = alone.state_dict()
        dcp.load(state, checkpoint_id=f"{path}/{scales}", no_dist=True)
        alone.load_state_dict(state)
        torch.testing.assert_close(alone(x), found(x), rtol=1e-3, atol=1e-3)
    return True


def check_ddp(rank, world_size):
    found = DistributedDataParallel(prepared("learned"))
    calibrate(found, batches(rank))
    step(found, batches()[rank])
    optimizer = torch.optim.SGD(found.parameters(), lr=0.02)
    optimizer.step()
    every = [None, None]
    dist.all_gather_object(every, {n: p.tolist() for n, p in found.module.state_dict().items()})
    assert every[0] == every[1]
    assert found.module[0].input_scale.grad.any()
    plain = DistributedDataParallel(model())
    with lowbit.calibrate(plain, INT8) as ranges:
        for x in batches(rank):
            plain(x)
    assert same_on_all_ranks(ranges)
    lowbit.quantize_(plain.module, INT8)
    assert plain.module(batches()[0]).isfinite().all()
    return True


def check_a_schedule(rank, world_size):
    """Observers of a schedule see the batches of all ranks, though DDP broadcasts buffers, and end before FSDP2's."""
    expected = torch.cat(batches()).abs().max()
    for scales, sharded in (("present", False), ("learned", False), ("learned", True)):
        found = prepared(scales, INT8)
        schedule = qat.Schedule(found, start=1, freeze_observers=3, method="minmax")
        unused = {"find_unused_parameters": scales == "learned"}
        runs = shard(found, world_size) if sharded else DistributedDataParallel(found, **unused)
        optimizer = torch.optim.SGD(found.parameters(), lr=0.02)
        for x in 2 * batches(rank):
            step(runs, x)
            optimizer.step()
            schedule.step()
            if schedule.steps == 3:
                scale = whole(found[0].input_scale.detach())
                assert abs(scale * RATE * 127.5 / expected - 1) < 0.01, (scales, sharded)
        values = [whole(found[i].input_scale.detach()).item() for i in (0, 2)]
        every = [None] * world_size
        dist.all_gather_object(every, values)
        assert every == [values] * world_size
        assert not hasattr(found, "_ddp_params_and_buffers_to_ignore")
    return True


def check_sharded_inference(rank, world_size):
    """FSDP2 of a converted model: the scale goes along with the rows of each rank, also of one without rows."""
    alone = model()
    with lowbit.calibrate(alone, INT8):
        alone(batches()[0])
    lowbit.quantize_(alone, INT8)
    found = shard(copy.deepcopy(alone), world_size)
    x = batches()[0]
    assert torch.equal(found(x), alone(x))
    names = {n for n in found.state_dict() if "input_scale" in n}
    assert names == {"0.weight.input_scale", "2.weight.input_scale"}
    other = shard(copy.deepcopy(alone), world_size)
    other.load_state_dict(found.state_dict())
    assert torch.equal(other(x), alone(x))
    mesh = init_device_mesh("cpu", (world_size,))
    for dim in (0, 1):
        weight = distribute_tensor(alone[0].weight.detach(), mesh, [Shard(dim)])
        assert torch.equal(weight.to_local().input_scale, alone[0].weight.input_scale)
    return True


@pytest.mark.parametrize(
    "check",
    [
        check_a_rank_without_batches,
        check_training,
        check_mixed_precision,
        check_ddp,
        check_a_schedule,
        check_sharded_inference,
    ],
)
def test_two_processes(check):
    assert launch(check, 2) == [True, True]


def test_distributed_checkpoints(tmp_path):
    assert launch(check_checkpoints, 2, str(tmp_path)) == [True, True]
