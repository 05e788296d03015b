"""QAT of experts with learned scales under FSDP2 and DDP: two processes train what one does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lowbit
from lowbit import qat
from lowbit.numerics.granularity import PerGroup
from lowbit.numerics.number_format import Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.testing.launch import launch
from tests.covering import pairs
from tests.distributed.test_train_fsdp import shard
from tests.train.problems import relative, values
from tests.train.test_grouped import offsets_of

SCHEMES = [
    lowbit.Int4WeightOnly(16),
    Scheme(Spec(Int(3), PerGroup(16), "asymmetric")),
    lowbit.Int8DynamicActivationInt4Weight(16),
]
TOKENS = {3: (5, 0, 27), 4: (5, 0, 20, 7), 1: (32,)}
SIZES = [4, 3, 1]
"""Experts: as many on each rank, more on the first, and none on the second."""


class Experts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.up = nn.Parameter(values(experts, 48, 64, seed=1) / 8)
        self.down = nn.Parameter(values(experts, 64, 48, seed=2) / 7)

    def forward(self, x, ends):
        up, down = self.up, self.down
        if isinstance(up, DTensor):  # as expert parallelism reads them
            up, down = up.to_local(), down.to_local()
        hidden = F.silu(F.grouped_mm(x, up.transpose(-2, -1), offs=ends))
        return F.grouped_mm(hidden, down.transpose(-2, -1), offs=ends)


class Model(nn.Module):
    def __init__(self, experts):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.second = Experts(experts)

    def forward(self, x, ends):
        return self.second(self.first(x), ends)


def prepared(scheme, experts, scales="learned", dtype=torch.float32):
    model = Model(experts).to(dtype)
    qat.prepare_(model, scheme, lambda m, n: isinstance(m, nn.Linear | Experts), scales=scales)
    return model


def step(model, experts, seeds=(0,), share=1):
    model.zero_grad()
    for seed in seeds:
        dtype = next(model.parameters()).dtype
        y = model(values(32, 64, dtype=dtype, seed=seed), offsets_of(TOKENS[experts]))
        (y.float().square().mean() / share).backward()
    return y.detach()


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def check_as_one_process(rank, world_size):
    """Outputs and gradients by name, after a step too; shards of as many experts, of more, and of none."""
    dtypes, kinds = (torch.float32, torch.bfloat16), ("present", "learned")
    for where in pairs(SCHEMES, SIZES, dtypes, kinds):
        scheme, experts, dtype, scales = where
        alone = prepared(scheme, experts, scales, dtype)
        model = shard(copy.deepcopy(alone))
        narrow = dtype is torch.bfloat16
        for _ in range(2):
            expected, found = step(alone, experts), step(model, experts)
            assert relative(found, expected) < (2e-2 if narrow else 1e-3), where
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                # the gradient of a scale travels with a residual of one byte
                coarse = name.endswith(("_scale", "_zero"))
                bound = 3e-2 if narrow else 1e-2 if coarse else 1e-3
                if q.grad.norm() > 0:
                    assert relative(whole(p.grad), q.grad) < bound, (*where, name)
            with torch.no_grad():
                for p in alone.parameters():
                    p.sub_(p.grad, alpha=0.05)
            state = {n: p.detach() for n, p in alone.state_dict().items()}
            set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    return True


def check_mixed_precision(rank, world_size):
    """Float32 weights and bfloat16 products: the weights seen are those that the conversion stores."""
    for scheme in SCHEMES[:2]:
        for experts in SIZES:
            model = shard(prepared(scheme, experts), torch.bfloat16)
            y = step(model, experts)
            alone = prepared(scheme, experts)
            qat.convert_(alone)
            lowbit.dequantize_(alone)
            x = values(32, 64).to(torch.bfloat16)
            assert torch.equal(y, alone.to(torch.bfloat16)(x, offsets_of(TOKENS[experts])))
            assert all(whole(p.grad).isfinite().all() for p in model.parameters())
    return True


def check_checkpoints(rank, world_size, folder):
    """The whole state dict loads into a model on one process, which converts; DCP's files load on other shards."""
    for i, (scheme, experts) in enumerate(zip(SCHEMES, SIZES, strict=True)):
        model = shard(prepared(scheme, experts))
        optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)
        for _ in range(2):
            step(model, experts)
            optimizer.step()
        y = step(model, experts)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        path = f"{folder}/{i}"
        dcp.save(get_model_state_dict(model), checkpoint_id=path)
        if rank == 0:
            assert {"second.up_scale", "second.down_scale"} <= state.keys()
            alone = prepared(scheme, experts)
            alone.load_state_dict(state)
            x, ends = values(32, 64), offsets_of(TOKENS[experts])
            expected = alone(x, ends)
            assert relative(y, expected.detach()) < 1e-6, scheme
            qat.convert_(alone)
            assert torch.equal(alone(x, ends), expected)
        other = shard(prepared(scheme, experts))
        own = get_model_state_dict(other)
        dcp.load(own, checkpoint_id=path)
        set_model_state_dict(other, own)
        assert torch.equal(step(other, experts), y), scheme
    return True


def check_data_parallel(rank, world_size):
    """Each rank has its own tokens; gradients are those of one process with the tokens of both."""
    for scheme in SCHEMES:
        for scales in ("present", "learned"):
            alone = prepared(scheme, 4, scales)
            model = DistributedDataParallel(copy.deepcopy(alone))
            step(model, 4, [rank])
            step(alone, 4, range(world_size), world_size)
            for (name, p), q in zip(alone.named_parameters(), model.parameters(), strict=True):
                assert relative(q.grad, p.grad) < 1e-5, (scheme, scales, name)
    return True


def check_expert_parallel(rank, world_size):
    """Parameters split over ranks by expert, as torchtitan splits them; each rank multiplies by its own."""
    mesh = init_device_mesh("cpu", (world_size,))
    x, grad = values(32, 64), values(32, 64, seed=5)
    counts, ends = (5, 11, 9, 7), offsets_of((5, 11, 9, 7))
    mine = slice(0, 16) if rank == 0 else slice(16, 32)
    own_ends = offsets_of(counts[2 * rank : 2 * rank + 2])
    for scheme in SCHEMES:
        alone = prepared(scheme, 4).second
        model = copy.deepcopy(alone)
        for name, p in list(model.named_parameters()):
            model.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))
        y, expected = model(x[mine], own_ends), alone(x, ends)
        assert torch.equal(y, expected[mine])
        y.backward(grad[mine])
        expected.backward(grad)
        for name, p in alone.named_parameters():
            found = model.get_parameter(name).grad.full_tensor()
            assert relative(found, p.grad) < 1e-5, (scheme, name)
    columns = prepared(SCHEMES[0], 4).second
    columns.up = nn.Parameter(distribute_tensor(columns.up, mesh, [Shard(1)]))
    with pytest.raises(NotImplementedError, match="whole experts on each rank"):
        columns(x, ends)
    return True


CHECKS = [
    check_as_one_process,
    check_mixed_precision,
    check_checkpoints,
    check_data_parallel,
    check_expert_parallel,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check, tmp_path):
    arguments = (str(tmp_path),) if check is check_checkpoints else ()
    assert launch(check, 2, *arguments) == [True, True]
