"""Shared by the tests of CPUOffloadOptimizer: base optimizers, a model, loops, and a device that copies late."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.optim.offload import transfers
from tests.optim.problems import rand
from tests.optim.test_sharded import same_state

BASES = {
    "torch-AdamW": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "torch-SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "foreach": True}),
    "torch-Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "AdamW8bit": (optim.AdamW8bit, {"lr": 0.01}),
    "AdamW4bit": (optim.AdamW4bit, {"lr": 0.01, "amsgrad": True}),
}


class Late(transfers.Transfers):
    """A device that copies as late as allowed, with NaN in the target until then."""

    def __init__(self):
        self.downloads, self.uploads, self.started = [], [], 0

    def download(self, target, source):
        self.started += 1
        target.fill_(float("nan"))
        return self._queue(self.downloads, target, source)

    def upload(self, target, source):
        target.fill_(
            float("nan")
        )  # increments the version counter, as the copy itself does on CUDA
        return self._queue(self.uploads, target, source)

    def _queue(self, queue, target, source):
        queue.append(lambda: target.data.copy_(source))
        last = len(queue)

        class Event:
            def synchronize(self):
                run(queue, last)

        return Event()

    def join(self):
        run(self.uploads, len(self.uploads))


def run(queue, last):
    for i in range(last):
        if queue[i] is not None:
            queue[i]()
            queue[i] = None


class Model(nn.Module):
    """With a frozen and an unused parameter, and one without dimensions."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(65, 96)
        self.second = nn.Linear(96, 65)
        self.scale = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(7, 3))
        self.frozen = nn.Parameter(torch.empty(65, 70), requires_grad=False)
        for i, p in enumerate(self.parameters()):
            p.data = 0.1 * rand(*p.shape, seed=i)
        self.to(dtype)

    def forward(self, x):
        return (
            (self.scale * self.second(self.first(x).relu()) @ self.frozen).float().square().mean()
        )


def pair(base, offload_gradients=False, dtype=torch.float32, **options):
    """(model, optimizer) without offload and with it."""
    cls, defaults = BASES[base]
    direct, offloaded = Model(dtype), Model(dtype)
    options = {**defaults, **options}
    other = copy.deepcopy(options)  # each optimizer has its own learning rate tensor
    return (
        (direct, cls(direct.parameters(), **options)),
        (
            offloaded,
            CPUOffloadOptimizer(
                offloaded.parameters(), cls, offload_gradients=offload_gradients, **other
            ),
        ),
    )


def backward(model, seed):
    dtype = next(model.parameters()).dtype
    loss = model(rand(6, 65, seed=seed).to(dtype))
    loss.backward()
    return loss


def train(model, optimizer, steps, first=0, passes=1):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for i in range(passes):
            backward(model, 10 * step + i)
        optimizer.step()


def assert_same(one, other):
    (model, optimizer), (again, offloaded) = one, other
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        own, theirs = optimizer.state[p], offloaded.state[q]
        assert own.keys() == theirs.keys(), name
        for key, value in own.items():
            assert same_state(value, theirs[key]), (name, key)
