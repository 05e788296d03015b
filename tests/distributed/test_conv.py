"""Convolutions under FSDP2: two processes compute and train what one does, in QAT and with frozen codes."""

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

import lowbit
from lowbit import Int8StaticActivationInt8Weight, IntxWeightOnly, qat
from lowbit.numerics.granularity import PerTensor
from lowbit.numerics.number_format import Int
from lowbit.numerics.packing import as_bytes
from lowbit.numerics.spec import Spec
from lowbit.schemes.scheme import Scheme
from lowbit.testing.launch import launch
from tests.distributed.test_learned_scales import whole
from tests.distributed.test_train_fsdp import shard
from tests.train.problems import relative

SCHEMES = [
    IntxWeightOnly(4, 16),
    IntxWeightOnly(3, 8, "asymmetric"),
    lowbit.Float8WeightOnly(),
    Scheme(Spec(Int(4), PerTensor())),
    Int8StaticActivationInt8Weight(),
]


class Model(nn.Module):
    """Uneven numbers of channels, so that the shards differ in size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 9, 3, padding="same")
        self.second = nn.Conv2d(9, 7, (1, 3), stride=2)
        self.head = nn.Conv1d(7, 5, 2)

    def forward(self, x):
        return self.head(self.second(nn.functional.silu(self.first(x))).flatten(2))


def is_conv(module, name):
    return isinstance(module, nn.Conv1d | nn.Conv2d)


def image():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def step(model):
    model.zero_grad()
    y = model(image())
    y.square().mean().backward()
    return y.detach()


def prepared(scheme, scales):
    model = Model()
    qat.prepare_(model, scheme, is_conv, scales=scales)
    if scheme.is_static:
        with lowbit.calibrate(model):
            model(image())
    return model


def check_qat(rank, world_size):
    for scheme, scales in itertools.product(SCHEMES, ("present", "learned")):
        where = (scheme, scales)
        alone = prepared(scheme, scales)
        model = shard(copy.deepcopy(alone))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, model)]
        for _ in range(2):
            assert relative(step(model), step(alone)) < 1e-5, where
            grads = {n: p.grad for n, p in alone.named_parameters()}
            for name, p in model.named_parameters():
                assert relative(whole(p.grad), grads[name]) < 1e-4, (*where, name)
            for optimizer in optimizers:
                optimizer.step()
            alone.load_state_dict({n: whole(t) for n, t in model.state_dict().items()})
        expected = step(model)
        qat.convert_(alone)
        assert relative(alone(image()), expected) < 1e-6, where
    return True


def check_gathered(rank, model, alone):
    options = StateDictOptions(full_state_dict=True)
    gathered, expected = get_model_state_dict(model, options=options), alone.state_dict()
    if rank == 0:
        assert gathered.keys() == expected.keys()
        for name, part in gathered.items():
            assert torch.equal(part, expected[name]), name


def check_frozen(rank, world_size, folder):
    for scheme in SCHEMES[:4]:
        alone = Model()
        lowbit.quantize_(alone, scheme, is_conv)
        model = shard(copy.deepcopy(alone))
        assert relative(model(image()).detach(), alone(image()).detach()) < 1e-6, scheme
        assert model.first.weight.to_local().shape[0] < 9
        if isinstance(scheme.weight.format, Int):  # gloo moves no float8
            check_gathered(rank, model, alone)
        path = f"{folder}/{SCHEMES.index(scheme)}"
        dcp.save(get_model_state_dict(model), checkpoint_id=path)
        other = Model()
        lowbit.quantize_(other, scheme, is_conv)
        with torch.no_grad():
            for part in other.state_dict().values():
                as_bytes(part).zero_()
        other = shard(other)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(other, state)
        assert torch.equal(other(image()), model(image())), scheme
    return True


@pytest.mark.parametrize("check", [check_qat, check_frozen], ids=lambda f: f.__name__[6:])
def test_two_processes(check, tmp_path):
    arguments = (str(tmp_path),) if check is check_frozen else ()
    assert launch(check, 2, *arguments) == [True, True]
