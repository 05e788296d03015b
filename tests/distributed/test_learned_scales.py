"""QAT with learned scales under FSDP2: two processes train what one does, and the whole converts to it."""

from __future__ import annotations

import copy
import itertools

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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit
from lowbit import qat
from lowbit.numerics.granularity import PerGroup, PerRow, PerTensor
from lowbit.numerics.number_format import Float8, Int
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.testing.launch import launch
from tests.distributed.test_bytes import device
from tests.distributed.test_train_fsdp import shard
from tests.train.problems import relative

SPECS = [
    Spec(Int(4), PerGroup(32)),
    Spec(Int(3), PerGroup(32), "asymmetric"),
    Spec(Int(2), PerGroup(32), "float_zero_point"),
    Spec(Int(8), PerRow()),
]


class Model(nn.Module):
    """Indices of 33 → 64 → rows → 33, an uneven number of rows; the head is tied to the embedding."""

    def __init__(self, rows=47):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(33, 64)
        self.first, self.second = nn.Linear(64, rows), nn.Linear(rows, 64)
        self.head = nn.Linear(64, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.second(nn.functional.silu(self.first(self.embedding(x)))))


def prepared(spec, dtype=torch.float32, rows=47, scales="learned"):
    def chosen(module, name):
        return isinstance(module, nn.Linear | nn.Embedding)

    model = Model(rows).to(dtype).to(device())
    qat.prepare_(model, Scheme(spec), chosen, scales=scales)
    return model


def tokens():
    return torch.randint(33, (4, 5), generator=torch.Generator().manual_seed(1)).to(device())


def step(model):
    model.zero_grad()
    y = model(tokens())
    y.float().square().mean().backward()
    return y.detach()


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def check_as_one_process(rank, world_size):
    for spec in SPECS:
        for dtype in (torch.float32, torch.bfloat16):
            alone = prepared(spec, dtype)
            model = shard(copy.deepcopy(alone))
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, model)]
            for _ in range(3):
                expected, found = step(alone), step(model)
                where = (spec, dtype)
                if dtype is torch.float32:
                    assert relative(found, expected) < 1e-3, where
                grads = {n: p.grad for n, p in alone.named_parameters()}
                for name, p in model.named_parameters():
                    bound = 2e-2 if dtype is torch.bfloat16 else 1e-2 if "_scale" in name else 1e-3
                    assert relative(whole(p.grad), grads[name]) < bound, (*where, name)
                for optimizer in optimizers:
                    optimizer.step()
                alone.load_state_dict({n: whole(p) for n, p in model.state_dict().items()})
    return True


def check_mixed_precision(rank, world_size):
    """Float32 weights and bfloat16 products: the weights seen are those that the conversion stores."""
    for spec in SPECS:
        model = shard(prepared(spec), torch.bfloat16)
        y = step(model)
        alone = prepared(spec)
        qat.convert_(alone)
        lowbit.dequantize_(alone)  # in float32, as its scales are
        assert torch.equal(y, alone.to(torch.bfloat16)(tokens())), spec
        assert all(whole(p.grad).isfinite().all() for p in model.parameters())
    model = shard(prepared(Spec(Int(4), PerTensor())), torch.bfloat16)
    with pytest.raises(NotImplementedError, match="which would round its scales"):
        step(model)
    return True


def check_exact(rank, world_size):
    """After a step on shards, the whole model converts to exactly the weights that training saw, in each dtype.

    They are compared by their outputs in plain products. The kernels for 16-bit inputs sum in another order.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = [(dtype, "learned") for dtype in dtypes] + [(torch.bfloat16, "present")]
    if world_size == 4:  # smaller shards, in which a dtype changes nothing
        cases = cases[1:2]
    for spec, (dtype, scales) in itertools.product(SPECS, cases):
        alone = prepared(spec, dtype, scales=scales)
        model = shard(copy.deepcopy(alone))  # a copy: the search of the scales takes long
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        step(model)
        optimizer.step()
        y = step(model)
        alone.load_state_dict({n: whole(p) for n, p in model.state_dict().items()})
        where = (spec, dtype, scales)
        assert torch.equal(alone(tokens()), y), where
        qat.convert_(alone)
        lowbit.dequantize_(alone)
        assert torch.equal(alone(tokens()), y), where
    return True


def check_checkpoints(rank, world_size, folder):
    """The whole state dict loads into a model on one process, which converts; DCP's files load on other shards."""
    for spec in SPECS:
        model = shard(prepared(spec))
        optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)
        for _ in range(2):
            step(model)
            optimizer.step()
        y = step(model)
        whole_state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        path = f"{folder}/{spec.mapping}{spec.format.bits}"
        dcp.save(get_model_state_dict(model), checkpoint_id=path)
        if rank == 0:
            alone = prepared(spec)
            alone.load_state_dict(whole_state)
            expected = alone(tokens())
            assert relative(y, expected) < 1e-6, spec
            qat.convert_(alone)
            assert torch.equal(alone(tokens()), expected), spec
        other = shard(prepared(spec))
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(other, state)
        assert torch.equal(step(other), y), spec
    return True


def check_weights_that_come_later(rank, world_size):
    """Scales of shards are those of the whole: the starting ones of plain state dicts, and the searched ones of weights
    that are written in place."""
    for spec in (*SPECS, Spec(Int(4), PerTensor())):
        expected = prepared(spec)
        plain = {n: v for n, v in expected.state_dict().items() if "_scale" not in n}
        plain = {n: 2 * v for n, v in plain.items() if "_zero" not in n}
        expected.load_state_dict(plain)
        loaded, written = shard(prepared(spec)), shard(prepared(spec))
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(loaded, dict(plain), options=options)
        state = written.state_dict()
        with torch.no_grad():
            for name in plain.keys() - {"head.weight"}:  # the embedding's
                state[name].mul_(2)
        found = [(loaded.state_dict(), copy.deepcopy(expected.state_dict()))]
        qat.search_scales_(written)
        qat.search_scales_(expected)
        found.append((written.state_dict(), expected.state_dict()))
        for own, wanted in found:
            for name, value in wanted.items():
                assert torch.equal(whole(own[name]), value), (spec, name)
    return True


def check_weights_that_travel_in_float32(rank, world_size):
    """Float8 weights: no codes of theirs travel. The scales have moved before."""
    for spec in (Spec(Float8(), PerRow()), Spec(Float8(), PerGroup(32))):
        alone = prepared(spec)
        with torch.no_grad():
            for name, p in alone.named_parameters():
                p.mul_(1.05 if "_scale" in name else 1.0)
        model = shard(copy.deepcopy(alone))
        assert relative(step(model), step(alone)) < 1e-5, spec
        grads = {n: p.grad for n, p in alone.named_parameters() if p.requires_grad}
        found = {n: whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        assert grads.keys() == found.keys()
        for name, grad in found.items():
            assert relative(grad, grads[name]) < 1e-4, (spec, name)
    return True


def check_tensor_parallel(rank, world_size):
    """Columns, then rows; outputs and gradients are those of one process."""
    mesh = init_device_mesh(device(), (world_size,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    rows = 32 * world_size  # a group of each rank's columns
    for spec in (*SPECS, Spec(Int(4), PerRow(), "asymmetric")):  # of rows whose extremes are apart
        alone = prepared(spec, rows=rows)
        model = copy.deepcopy(alone)
        parallelize_module(model, mesh, plan)
        assert model.first.weight.placements == (Shard(0),)
        expected, found = step(alone), step(model)
        assert relative(found, expected) < 1e-5, spec
        grads = {n: p.grad for n, p in alone.named_parameters()}
        for name, p in model.named_parameters():
            assert relative(whole(p.grad), grads[name]) < 1e-4, (spec, name)
    tensorwise = prepared(Spec(Int(4), PerTensor()), rows=rows)
    with pytest.raises(NotImplementedError, match="cut through blocks"):
        parallelize_module(tensorwise, mesh, plan)
    return True


CHECKS = [
    *(check_as_one_process, check_mixed_precision, check_checkpoints, check_tensor_parallel),
    *(check_weights_that_travel_in_float32, check_weights_that_come_later),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check, tmp_path):
    arguments = (str(tmp_path),) if check is check_checkpoints else ()
    assert launch(check, 2, *arguments) == [True, True]


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_what_was_trained_is_what_is_converted(processes):
    assert launch(check_exact, processes) == [True] * processes
