"""Two processes under FSDP2: fake quantization on and off, and what travels in each state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import lowbit
from lowbit import qat
from lowbit.testing.launch import launch
from tests.covering import pairs
from tests.distributed import test_train_tensor_parallel as tensor_parallel
from tests.distributed.test_tensor_fsdp import recorded_gathers
from tests.train.problems import linear, relative, values

INT4 = lowbit.Int4WeightOnly(group_size=16)


class Model(nn.Module):
    """64 → rows → 64, and a head that stays with the root."""

    def __init__(self, rows):
        super().__init__()
        self.first, self.second = linear(rows, 64), linear(64, rows, bias=False)
        self.head = linear(24, 64, bias=False)

    def forward(self, x):
        return self.head(self.second(torch.nn.functional.silu(self.first(x))))


def shard(model, dtype=None, reshard=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
    for module in (model.first, model.second, model):
        fully_shard(module, reshard_after_forward=reshard, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def models(rows, dtype=None, weights=torch.float32, reshard=None):
    """Sharded alike: plain, prepared."""
    plain = Model(rows).to(weights)
    prepared = copy.deepcopy(plain)
    qat.prepare_(prepared, INT4)
    return shard(plain, dtype, reshard), shard(prepared, dtype, reshard)


def step(model, x):
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    return [y.detach(), x.grad, *grads]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def check_off_is_the_plain_model(rank, world_size):
    dtypes = (None, torch.float32), (torch.bfloat16, torch.float32), (None, torch.bfloat16)
    for where in pairs((64, 33), dtypes, (None, False)):
        rows, (dtype, weights), reshard = where
        plain, prepared = models(rows, dtype, weights, reshard)
        x = values(4, 64, seed=rank, dtype=weights)
        on, expected = step(prepared, x), step(plain, x)
        assert not same(on, expected)
        for _ in range(2):
            with qat.high_precision(prepared):
                assert same(step(prepared, x), expected), where
            assert same(step(prepared, x), on), where
        qat.disable_(prepared)
        assert same(step(prepared, x), expected)
    return True


def check_what_travels(rank, world_size):
    _, prepared = models(64)
    x = values(4, 64, seed=rank)

    def gathered():
        """Bytes of each gather, and the classes of the whole weights in products."""
        kinds = []
        hook = lambda module, args: kinds.append(type(module.weight))  # noqa: E731
        handles = [m.register_forward_pre_hook(hook) for m in (prepared.first, prepared.head)]
        with recorded_gathers() as seen, torch.no_grad():
            prepared(x)
        for handle in handles:
            handle.remove()
        prepared.reshard()
        return sum(t.nbytes for _, inputs in seen for t in inputs), kinds

    low, kinds = gathered()
    assert kinds == [lowbit.FakeQuantizedTensor.gathered] * 2
    with qat.high_precision(prepared):
        high, kinds = gathered()
        assert kinds == [lowbit.FakeQuantizedTensor] * 2
        assert high > 2.5 * low
    assert gathered() == (low, [lowbit.FakeQuantizedTensor.gathered] * 2)
    return True


def check_a_teacher_between_micro_batches(rank, world_size):
    """Gradients that wait for synchronization survive the switch."""
    plain = Model(64)
    qat.prepare_(plain, INT4)
    for dtype in (None, torch.bfloat16):
        results = []
        for teacher in (False, True):
            model = shard(copy.deepcopy(plain), dtype)
            for last in (False, False, True):
                model.set_requires_gradient_sync(last)
                x = values(4, 64, seed=rank + 10 * last)
                if teacher:
                    with qat.high_precision(model), torch.no_grad():
                        model(x)
                model(x).float().square().sum().backward()
            results.append([p.grad.full_tensor() for p in model.parameters()])
        pairs = zip(*results, strict=True)
        assert all(relative(a, b) < 1e-6 for a, b in pairs), dtype
    return True


def check_compiled(rank, world_size):
    torch._dynamo.reset()
    plain, prepared = Model(64), Model(64)
    qat.prepare_(prepared, INT4)
    for model in (plain, prepared):
        for layer in (model.first, model.second):
            layer.compile(backend="aot_eager")
        shard(model)
    x = values(4, 64, seed=rank)
    on, expected = step(prepared, x), step(plain, x)
    for _ in range(2):
        with qat.high_precision(prepared):
            assert same(step(prepared, x), expected)
        assert same(step(prepared, x), on)
    return True


def trained(model, ranks, start, steps=7):
    """Train with a schedule on the data of these ranks, and say in which steps the learned scale moved."""
    schedule = qat.Schedule(model, start=start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    moved = []
    for n in range(steps):
        before = whole_of(getattr(model.first, "weight_scale", model.first.bias)).clone()
        for rank in ranks:
            (model(values(4, 64, seed=10 * n + rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        schedule.step()
        after = whole_of(getattr(model.first, "weight_scale", model.first.bias))
        moved.append(not torch.equal(before, after))
    return moved


def check_a_schedule(rank, world_size):
    """A late start gives the weights of one process."""
    for scales in ("present", "learned"):
        whole = Model(64)
        qat.prepare_(whole, INT4, scales=scales)
        model = shard(copy.deepcopy(whole))
        moved = trained(model, [rank], start=2)
        assert moved == trained(whole, range(world_size), start=2)
        first = 2 if scales == "learned" else 0
        assert moved == [n >= first for n in range(7)]
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            error = relative(whole_of(p), whole_of(q))
            # the gradient of a scale travels with a residual of one byte
            assert error < (1e-3 if scales == "learned" else 1e-5), (scales, error)
    return True


def whole_of(p):
    p = p.full_tensor() if hasattr(p, "full_tensor") else p
    return p.master() if isinstance(p, lowbit.FakeQuantizedTensor) else p.detach()


def check_distillation(rank, world_size):
    """Loss and gradients are those of one process."""
    whole = Model(64)
    qat.prepare_(whole, INT4)
    model = shard(copy.deepcopy(whole))
    distill = qat.Distillation(model)
    for _ in range(2):
        model.zero_grad()
        loss = distill(values(4, 64, seed=rank))
        loss.backward()
    alone = qat.Distillation(whole)
    losses = [alone(values(4, 64, seed=r)) for r in range(world_size)]
    sum(losses).div(world_size).backward()
    assert relative(loss.detach(), losses[rank].detach()) < 1e-6
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert relative(p.grad.full_tensor(), q.grad) < 1e-5
    return True


def check_tensor_parallel(rank, world_size):
    """Off, the split model gives what the plain model split alike gives; also sharded by FSDP2 along another mesh."""
    plain = tensor_parallel.Block()
    prepared = copy.deepcopy(plain)
    qat.prepare_(prepared, lowbit.Int8DynamicActivationInt4Weight(group_size=16))
    x = values(2, 10, 64)
    expected = tensor_parallel.outcome(copy.deepcopy(plain), x)
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("data", "tensor"))
    for sharded in (False, True):
        model = copy.deepcopy(prepared)
        parallelize_module(model, mesh["tensor"], tensor_parallel.PLAN)
        if sharded:
            fully_shard(model, mesh=mesh["data"])
            model.set_force_sum_reduction_for_comms(True)
        on = tensor_parallel.outcome(model, x)
        with qat.high_precision(model):
            off = tensor_parallel.outcome(model, x)
        again = tensor_parallel.outcome(model, x)
        for name, value in expected.items():
            assert relative(off[name], value) < 1e-5, (sharded, name)
            assert relative(on[name], value) > 1e-3, (sharded, name)
            assert torch.equal(again[name], on[name]), (sharded, name)
    return True


def check_data_parallel(rank, world_size):
    """DistributedDataParallel sums the gradients of distillation; its teacher runs inside of the wrapper too."""
    whole = Model(64)
    qat.prepare_(whole, INT4)
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    distill, alone = qat.Distillation(replica), qat.Distillation(whole)
    for n in range(2):
        replica.zero_grad()
        whole.zero_grad()
        loss = distill(values(4, 64, seed=10 * n + rank))
        loss.backward()
        losses = [alone(values(4, 64, seed=10 * n + r)) for r in range(world_size)]
        sum(losses).div(world_size).backward()
        assert torch.equal(loss, losses[rank])
        for p, q in zip(replica.parameters(), whole.parameters(), strict=True):
            assert relative(p.grad, q.grad) < 1e-5
    return True


def check_refused(rank, world_size):
    _, prepared = models(64)
    with pytest.raises(ValueError, match=r"first.weight is sharded: gather the state dict"):
        qat.undo_(prepared)
    with qat.high_precision(prepared):
        y = prepared(values(4, 64, seed=rank))
    with pytest.raises(RuntimeError, match="under FSDP2 call backward inside of it"):
        y.sum().backward()
    return True


CHECKS = [
    check_off_is_the_plain_model,
    check_what_travels,
    check_a_teacher_between_micro_batches,
    check_compiled,
    check_a_schedule,
    check_distillation,
    check_tensor_parallel,
    check_data_parallel,
    check_refused,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check):
    assert launch(check, 2) == [True, True]
