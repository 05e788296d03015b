"""Steps during backward: the same bits as after it, and few gradients in memory."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowbit
from lowbit import optim
from lowbit.testing.launch import launch
from tests.tensor.cases import same_bits, values

WIDTH = 96
OPTIMIZERS = {
    "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=1e-2),
    "AdamW4bit, eager": lambda p: optim.AdamW4bit(p, lr=1e-2, fused=False),
    "AdamWFp8, rounded": lambda p: optim.AdamWFp8(p, lr=1e-2, bf16_stochastic_round=True),
    "AdamW8bit, corrected": lambda p: optim.AdamW8bit(p, lr=1e-2, weight_correction="8bit"),
    "Muon": lambda p: optim.Muon(p, lr=1e-2),
}


class Model(nn.Module):
    """Four layers, the first and the last of one weight, the second recomputed in backward."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        with torch.no_grad():
            for seed, p in enumerate(self.parameters()):
                p.copy_(values(p.shape, seed) / WIDTH**0.5)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        first, second, *others = self.layers
        x = checkpoint(second, first(x).tanh(), use_reentrant=False)
        for layer in others:
            x = layer(x.tanh())
        return x.float().square().sum()


def batch(step, dtype=torch.bfloat16):
    return values((8, WIDTH), 10 + step, dtype)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step, model.layers[0].weight.dtype)).backward()
        optimizer.step()


def check_same(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name


@pytest.mark.cover("values")
@pytest.mark.parametrize("bucket_mib", [1e-6, 0.02, 64.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_after_backward(name, bucket_mib):
    models = [Model(), Model()]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    optim.step_in_backward(optimizers[1], bucket_mib=bucket_mib)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 3)
    check_same(*models)
    assert all(p.grad is None for p in models[1].parameters())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, state in states[0].items():
        assert state["step"] == states[1][index]["step"] == 3


def test_weights_without_a_high_precision_copy():
    models = [Model(), Model()]
    for model in models:
        lowbit.train.prepare_(model, lowbit.Int8Weight())
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1], bucket_mib=0.01)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert (
            same_bits(p.detach().dequantize(), q.detach().dequantize())
            if name.endswith("weight")
            else same_bits(p.detach(), q.detach())
        )


def test_gradients_in_memory_are_those_of_a_bucket():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    optim.step_in_backward(optimizer, bucket_mib=3 * 64 * 64 * 4 / 2**20)
    most = 0

    def count(param):
        nonlocal most
        most = max(most, sum(p.grad is not None for p in model.parameters()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 64)).square().sum().backward()
    assert 1 <= most <= 3
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_compiled_steps_are_kept_for_each_bucket():
    model = Model()
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-3)
    handle = optim.step_in_backward(optimizer, bucket_mib=0.03)
    train(model, optimizer, 2)
    steps = dict(handle._steps)
    train(model, optimizer, 3)
    assert len(steps) > 1 and handle._steps == steps


def test_a_run_goes_on_from_a_checkpoint():
    whole, part = Model(), Model()
    optimizer = optim.AdamW4bit(whole.parameters(), lr=1e-2)
    optim.step_in_backward(optimizer)
    train(whole, optimizer, 4)
    optimizer = optim.AdamW4bit(part.parameters(), lr=1e-2)
    train(part, optimizer, 2)
    resumed = Model()
    resumed.load_state_dict(part.state_dict())
    other = optim.AdamW4bit(resumed.parameters(), lr=1e-2)
    optim.step_in_backward(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed, other, 2, first=2)
    check_same(whole, resumed)


def test_removed_it_steps_after_backward():
    models = [Model(), Model()]
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    handle = optim.step_in_backward(optimizers[1])
    train(models[0], optimizers[0], 3)
    train(models[1], optimizers[1], 1)
    handle.remove()
    models[1](batch(1)).backward()
    assert all(p.grad is not None for p in models[1].parameters())
    optimizers[1].step()
    optim.step_in_backward(optimizers[1])
    optimizers[1].zero_grad()
    train(models[1], optimizers[1], 1, first=2)
    check_same(*models)


def test_after_a_backward_that_failed():
    models = [Model(), Model()]
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1])

    def fail(grad):
        raise RuntimeError("interrupted")

    hook = models[1].layers[0].bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        models[1](batch(7)).backward()
    hook.remove()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 2)
    check_same(*models)


def test_a_parameter_without_a_hook_is_stepped_once():
    models = [Model(torch.float32), Model(torch.float32)]
    for model in models:
        model.layers[1].requires_grad_(False)
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1], bucket_mib=1e-6)
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 1)
        model.layers[1].requires_grad_(True)
        train(model, optimizer, 2, first=1)
    check_same(*models)


class Recurrent(nn.Module):
    """A block that runs `uses` times in checkpoints, and `after` times outside of them, before an own last layer."""

    def __init__(self, uses, after=0, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.uses, self.reentrant, self.after = uses, reentrant, after

    def forward(self, x):
        for _ in range(self.uses):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant).tanh()
        for _ in range(self.after):
            x = self.block(x).tanh()
        return self.last(x).square().mean()


def input_with_gradient(step=0):
    return values((4, 64), 5 + step).requires_grad_()


@pytest.mark.cover("values")
@pytest.mark.parametrize("uses, after", [(2, 0), (2, 1)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_checkpoints_that_give_whole_gradients(name, uses, after):
    models = [Recurrent(uses, after) for _ in range(2)]
    optimizers = [OPTIMIZERS[name](model.named_parameters()) for model in models]
    optim.step_in_backward(optimizers[1], bucket_mib=0.01)
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            model(input_with_gradient(step)).backward()
            if optimizer is optimizers[0]:
                optimizer.step()
                optimizer.zero_grad()
    check_same(*models)
    assert all(p.grad is None for p in models[1].parameters())


@pytest.mark.parametrize("outer", [False, True], ids=["alone", "in a checkpoint"])
def test_reentrant_checkpoints_are_refused_before_their_weights_change(outer):
    """The next backward without one starts anew."""
    models = [Recurrent(1, after=1, reentrant=again) for again in (False, True)]
    optimizers = [optim.AdamW8bit(model.named_parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1])
    before = copy.deepcopy(models[1].state_dict())
    x = input_with_gradient()
    y = checkpoint(models[1], x, use_reentrant=True) if outer else models[1](x)
    with pytest.raises(RuntimeError, match=r"gradient of \w+\.\w+ of shape .*use_reentrant=False"):
        y.backward()
    assert all(torch.equal(p, before[name]) for name, p in models[1].named_parameters())
    models[1].reentrant = False
    optimizers[1].zero_grad()
    for model, optimizer in zip(models, optimizers, strict=True):
        model(input_with_gradient()).backward()
        optimizer.step()
    check_same(*models)


def test_accumulated_gradients_are_refused():
    """Each backward is a step. A loop that calls `step` after several of them means their sum."""
    model = Recurrent(1)
    optimizer = optim.AdamW8bit(model.named_parameters(), lr=1e-2)
    handle = optim.step_in_backward(optimizer, bucket_mib=1e-6)
    for _ in range(2):  # without a call of step
        model(input_with_gradient()).backward()
    with pytest.raises(
        RuntimeError, match=r"several backwards came before this optimizer\.step\(\)"
    ):
        optimizer.step()
    optimizer.step()
    model.block(
        input_with_gradient()
    ).sum().backward()  # losses of different parameters are one step
    model.last(input_with_gradient()).sum().backward()
    optimizer.step()
    optimizer.step(lambda: model(input_with_gradient()).backward())
    handle.remove()
    for _ in range(2):
        model(input_with_gradient()).backward()
    optimizer.step()


def test_with_a_learning_rate_schedule():
    models = [Model(), Model()]
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, optimizer in zip(models, optimizers, strict=True):
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
            for step in range(3):
                train(model, optimizer, 1, first=step)
                schedule.step()
    check_same(*models)


def test_a_compiled_model():
    models = [Model(torch.float32), Model(torch.float32)]
    optimizers = [optim.AdamW8bit(model.parameters(), lr=1e-2) for model in models]
    optim.step_in_backward(optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(2):
            optimizer.zero_grad()
            compiled(batch(step, torch.float32)).backward()
            optimizer.step()
    check_same(*models)


def test_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"lowbit\.optim, got AdamW"):
        optim.step_in_backward(torch.optim.AdamW(model.parameters()))
    wrapped = SimpleNamespace(optimizer=optim.AdamW(model.parameters()))  # as accelerate's
    with pytest.raises(TypeError, match=r"this SimpleNamespace wraps one: give it its \.optimizer"):
        optim.step_in_backward(wrapped)
    optimizer = optim.AdamW(model.parameters(), max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 needs the gradients of all"):
        optim.step_in_backward(optimizer)
    optimizer = optim.AdamW(model.parameters(), skip_nonfinite=True)
    with pytest.raises(ValueError, match="skip_nonfinite=True needs"):
        optim.step_in_backward(optimizer)
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="bucket_mib must be above 0, got 0"):
        optim.step_in_backward(optimizer, bucket_mib=0)
    assert not model.weight._post_accumulate_grad_hooks
    optim.step_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="steps in backward already"):
        optim.step_in_backward(optimizer)
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0 needs"):
        model(torch.randn(2, 4)).sum().backward()
    assert torch.equal(model.weight, before) and model.weight.grad is not None


def test_a_grad_scaler_is_refused():
    model = nn.Linear(4, 4, dtype=torch.float16)
    optimizer = optim.AdamW(model.parameters())
    optim.step_in_backward(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4, dtype=torch.float16)).sum()).backward()
    with pytest.raises((RuntimeError, AssertionError), match=r"GradScaler|inf checks"):
        scaler.step(optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu(name):
    models = [Model().cuda(), Model().cuda()]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    optim.step_in_backward(optimizers[1], bucket_mib=0.02)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(step).cuda()).backward()
            optimizer.step()
    check_same(*models)


def check_sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for name in ("AdamW8bit", "AdamWFp8, rounded", "AdamW8bit, corrected"):
        models = [Model(), Model()]
        optimizers = []
        for model in models:
            for layer in model.layers[1:3]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for module in (*model.layers[1:3], model):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
            optimizers.append(OPTIMIZERS[name](model.parameters()))
        optim.step_in_backward(optimizers[1], bucket_mib=0.01)
        for step in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(2 * step + rank)).backward()
                if optimizer is optimizers[1]:
                    assert all(p.grad is None for p in model.parameters())
                optimizer.step()
        for (key, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert same_bits(p.to_local().detach(), q.to_local().detach()), (name, key)
    plain = nn.Linear(4, 4)
    for model in (plain, DistributedDataParallel(plain)):
        with pytest.raises(ValueError, match="not sharded over the 2 processes"):
            optim.step_in_backward(optim.AdamW(model.parameters()))
    sharded = fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ValueError, match="Muon exchanges sharded matrices"):
        optim.step_in_backward(optim.Muon(sharded.parameters()))
    return dist.get_rank() == rank


def test_sharded():
    assert launch(check_sharded, 2) == [True, True]


def test_a_conversion_afterwards_is_refused() -> None:
    """The new parameters have the hooks of the old ones; the optimizer holds the old ones."""
    model = nn.Sequential(nn.Linear(32, 32))
    optim.step_in_backward(optim.AdamW8bit(model.parameters()))
    lowbit.train.prepare_(model, lowbit.Int8MixedPrecision(always=True))
    with pytest.raises(RuntimeError, match="is not the optimizer's: a conversion"):
        model(torch.randn(16, 32)).sum().backward()
