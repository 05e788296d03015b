"""QK-clip against the logits that it is to lower."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowbit
from lowbit.optim import qk_clip_
from lowbit.testing.launch import launch
from tests.optim.problems import rand, relative

SIZE = 16


def largest_logits(query, key, x):
    heads = [layer(x).double().unflatten(-1, (-1, SIZE)).transpose(0, 1) for layer in (query, key)]
    keys = heads[1].repeat_interleave(len(heads[0]) // len(heads[1]), 0)
    return (heads[0] @ keys.mT / SIZE**0.5).amax((1, 2))


def layers(heads, key_heads, bias=True):
    made = [nn.Linear(32, n * SIZE, bias=bias) for n in (heads, key_heads)]
    for i, p in enumerate(p for layer in made for p in layer.parameters()):
        p.data = rand(*p.shape, seed=i)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_heads_above_the_threshold_reach_it(key_heads, bias):
    query, key = layers(4, key_heads, bias)
    query.weight.data[:SIZE] *= 0.1  # far below
    x = rand(20, 32, seed=9)
    before = largest_logits(query, key, x)
    threshold = before.sort().values[2].item() * 0.9
    old = copy.deepcopy((query, key))
    qk_clip_(query, key, before.float(), threshold=threshold)
    assert relative(largest_logits(query, key, x), before.clamp_max(threshold)) < 1e-5
    if key_heads == 4:  # both by the same factor, the others to the bit
        left = before <= threshold
        for new, was in zip((query, key), old, strict=True):
            rows = left.repeat_interleave(SIZE)
            assert torch.equal(new.weight[rows], was.weight[rows])
        ratios = [
            new.weight[-1, 0] / was.weight[-1, 0]
            for new, was in zip((query, key), old, strict=True)
        ]
        assert relative(*ratios) < 1e-6


def test_numbers_without_a_factor_leave_heads_alone():
    query, key = layers(4, 2)
    old = copy.deepcopy((query, key))
    qk_clip_(query, key, torch.tensor([torch.nan, 0.0, torch.inf, 100.0]))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip((query, key), old, strict=True))


LARGEST = torch.tensor([50.0, 300.0, 120.0])


def check_sharded(rank, world_size):
    """48 rows of queries and 16 of keys: with two processes a shard ends inside of a head, with three at its end."""
    model = nn.Sequential(*layers(3, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    qk_clip_(*model, LARGEST)
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_fsdp2_equals_one_process(world_size):
    query, key = layers(3, 1)
    before = query.weight.detach().clone()
    qk_clip_(query, key, LARGEST)
    assert not torch.equal(query.weight, before)
    for found in launch(check_sharded, world_size):
        for whole, p in zip(found, (*query.parameters(), *key.parameters()), strict=True):
            assert torch.equal(whole, p)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 1), (9,)], ids=str)
def test_shapes_that_do_not_fit(shape):
    query, key = layers(4, 4)
    with pytest.raises(ValueError, match="query 64 rows and key 64"):
        qk_clip_(query, key, torch.ones(shape))
    with pytest.raises(ValueError, match="query 64 rows and key 48"):
        qk_clip_(query, layers(4, 3)[1], torch.ones(4))
    with pytest.raises(ValueError, match="threshold must be above 0"):
        qk_clip_(query, key, torch.ones(4), threshold=0)


def test_low_bit_weights_are_refused():
    model = nn.Sequential(*layers(4, 4, False))
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    with pytest.raises(TypeError, match="cannot be scaled in place"):
        qk_clip_(model[0], model[1], torch.ones(4))


def test_layers_whose_weight_is_not_all_are_refused():
    """PEFT's layers have the `weight` of the layer below, and add an adapter to its outputs."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.weight, self.bias = base.weight, base.bias

    query, key = layers(4, 4)
    before = query.weight.detach().clone()
    with pytest.raises(TypeError, match=r"got Adapted and Linear.*merge adapters"):
        qk_clip_(Adapted(query), key, torch.full((4,), 400.0))
    with pytest.raises(TypeError, match=r"largest must be a tensor, got \[400.0\]"):
        qk_clip_(query, key, [400.0])
    assert torch.equal(query.weight, before)
