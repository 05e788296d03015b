"""CPUOffloadOptimizer on a GPU, where copies run in the background: the weights are those of the base optimizer on the
CPU, bit for bit, and the device holds less."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.optim.offload import offload
from tests.optim.offloading import BASES
from tests.optim.problems import rand

pytestmark = pytest.mark.gpu
bases = pytest.mark.parametrize("base", BASES)
gradients = pytest.mark.parametrize("offload_gradients", [False, True], ids=["", "gradients"])
WIDTH, LAYERS = 1024, 6


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(offload, "BUCKET", WIDTH * WIDTH + 1)


def model_of(dtype=torch.float32, width=WIDTH, layers=LAYERS):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for i, p in enumerate(model.parameters()):
        p.data = rand(*p.shape, seed=i) / width**0.5
    return model.to("cuda", dtype)


def backward(model, seed):
    p = next(model.parameters())
    x = rand(64, p.shape[1], seed=seed).to("cuda", p.dtype)
    torch.cuda._sleep(20_000_000)  # lets the host run ahead of the device
    model(x).float().square().mean().backward()


class OnHost:
    """The base optimizer over CPU copies of a model's parameters, with blocking copies."""

    def __init__(self, model, base, **options):
        cls, defaults = BASES[base]
        self.model = model
        self.copies = [nn.Parameter(p.detach().cpu()) for p in model.parameters()]
        self.optimizer = cls(self.copies, **{**defaults, **options})

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        for p, host in zip(self.model.parameters(), self.copies, strict=True):
            host.grad = None if p.grad is None else p.grad.cpu()
        self.optimizer.step()
        with torch.no_grad():
            for p, host in zip(self.model.parameters(), self.copies, strict=True):
                p.copy_(host)


def pair(base, offload_gradients, dtype=torch.float32, **options):
    direct, model = model_of(dtype), model_of(dtype)
    cls, defaults = BASES[base]
    optimizer = CPUOffloadOptimizer(
        model.parameters(), cls, offload_gradients=offload_gradients, **{**defaults, **options}
    )
    return (direct, OnHost(direct, base, **options)), (model, optimizer)


def train(model, optimizer, steps, first=0, passes=2):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for i in range(passes):
            backward(model, 10 * step + i)
        optimizer.step()


def assert_same(one, other):
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@bases
@gradients
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_base_optimizer(base, offload_gradients, passes, dtype):
    (direct, reference), (model, optimizer) = pair(base, offload_gradients, dtype)
    train(direct, reference, 4, passes=passes)
    train(model, optimizer, 4, passes=passes)
    assert_same(direct, model)


def test_near_to_the_base_optimizer_on_the_gpu():
    direct, model = model_of(), model_of()
    reference = torch.optim.AdamW(direct.parameters(), lr=0.01, eps=1e-3)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3)
    train(direct, reference, 3)
    train(model, optimizer, 3)
    for p, q in zip(direct.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-4)


def test_clipping_by_torch_overtakes_the_copies():
    (direct, reference), (model, optimizer) = pair("torch-SGD", False)
    for step in range(3):
        for m, o in ((direct, reference), (model, optimizer)):
            o.zero_grad()
            backward(m, step)
            norm = nn.utils.clip_grad_norm_(m.parameters(), 1e-3)
            assert norm > 1e-3
            o.step()
    assert_same(direct, model)


@gradients
def test_clipping_by_the_optimizer(offload_gradients):
    (direct, reference), (model, optimizer) = pair("torch-SGD", offload_gradients)
    for step in range(3):
        reference.zero_grad()
        optimizer.zero_grad()
        backward(direct, step)
        backward(model, step)
        expected = nn.utils.clip_grad_norm_(direct.parameters(), 1e-3)
        norm = optimizer.clip_grad_norm_(1e-3)
        torch.testing.assert_close(
            norm, expected.cpu(), rtol=1e-4, atol=0
        )  # summed in another order
        reference.step()
        optimizer.step()
    for p, q in zip(direct.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@gradients
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_schedulers_with_a_learning_rate_in_a_tensor(offload_gradients, device):
    direct, model = model_of(), model_of()
    reference = OnHost(direct, "torch-AdamW")
    optimizer = CPUOffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=offload_gradients,
        lr=torch.tensor(0.01, device=device),
        fused=True,
    )
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5**step)
        for o in (reference.optimizer, optimizer)
    ]
    for step in range(3):
        train(direct, reference, 1, first=step)
        train(model, optimizer, 1, first=step)
        for scheduler in schedulers:
            scheduler.step()
    for p, q in zip(direct.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)


@bases
@gradients
def test_save_and_load_between_two_backward_passes(base, offload_gradients):
    (direct, reference), (model, optimizer) = pair(base, offload_gradients)
    train(direct, reference, 2)
    train(model, optimizer, 2)
    for m, o in ((direct, reference), (model, optimizer)):
        o.zero_grad()
        backward(m, 50)
    saved = copy.deepcopy(optimizer.state_dict())
    assert all(
        t.device.type == "cpu"
        for state in saved["state"].values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    )
    weights = copy.deepcopy(model.state_dict())
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)  # counts as a change of the weights
    for m, o in ((direct, reference), (model, optimizer)):
        backward(m, 51)
        o.step()
    assert_same(direct, model)
    cls, defaults = BASES[base]
    on_gpu = cls(model_of().parameters(), **defaults)
    on_gpu.load_state_dict(saved)
    again = CPUOffloadOptimizer(model_of().parameters(), cls, **defaults)
    again.load_state_dict(on_gpu.state_dict())


def test_the_next_forward_waits_for_the_weights():
    _, (model, optimizer) = pair("torch-SGD", False)
    train(model, optimizer, 1)
    x = rand(64, WIDTH).cuda()
    now = model(x)
    torch.cuda.synchronize()
    assert torch.equal(now, model(x))


@gradients
def test_on_another_stream(offload_gradients):
    (direct, reference), (model, optimizer) = pair("torch-AdamW", offload_gradients)
    train(direct, reference, 3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        train(model, optimizer, 3)
    torch.cuda.synchronize()
    assert_same(direct, model)


def peak(offload_gradients):
    """Additional peak bytes of a training step; None stands for the optimizer used directly."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = model_of(width=2048, layers=12)
    options = {"lr": 1e-3, "fused": True}
    if offload_gradients is None:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=offload_gradients, **options
        )
    train(model, optimizer, 3, passes=1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory():
    """16 bytes a parameter (weight, gradient, two moments) become 8; with the gradients freed early, fewer."""
    peak(False)  # cuBLAS and streams allocate once
    direct, states, both = peak(None), peak(False), peak(True)
    assert states < 0.6 * direct
    assert both < 1.02 * states


def test_gradients_are_freed_during_backward():
    _, (model, optimizer) = pair("torch-AdamW", True)
    backward(model, 0)
    assert all(p.grad is None for p in model.parameters())
    torch.cuda.synchronize()
    assert optimizer._slots[model[0].weight].grad.is_pinned()


def test_muon_on_a_gpu_orthogonalizes_in_bfloat16():
    weights, grads = rand(200, 300), rand(200, 300, seed=1)
    results = []
    for device in ("cpu", "cuda"):
        p = nn.Parameter(weights.to(device, copy=True))  # a copy, to keep the original
        p.grad = grads.to(device)
        optim.Muon8bit([p], lr=1.0, weight_decay=0.0).step()
        results.append(p.detach().cpu() - weights)
    error = (results[0] - results[1]).norm() / results[0].norm()
    assert 1e-5 < error < 0.05
