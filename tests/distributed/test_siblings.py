"""Siblings that share a part of their scales, under FSDP2: gathered together, two processes train what one does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from lowbit import qat
from lowbit.testing.launch import launch
from tests.qat.test_siblings import SCALED, model


def check(rank, world_size):
    x = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    for name, (scheme, _) in SCALED.items():
        alone = model()
        qat.prepare_(alone, scheme)
        shared, apart = copy.deepcopy(alone), copy.deepcopy(alone)
        fully_shard(shared)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, shared)]
        for _ in range(2):
            expected, found = alone(x), shared(x)
            assert torch.equal(found, expected), name
            expected.square().mean().backward()
            found.square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = {n: t.full_tensor() for n, t in shared.state_dict().items()}
        assert all(torch.equal(t, state[n]) for n, t in alone.state_dict().items()), name
        for layer in apart.names:
            fully_shard(apart.get_submodule(layer))
        fully_shard(apart)
        with pytest.raises(NotImplementedError, match="siblings in one fully_shard unit"):
            apart(x)
    return True


def test_two_processes():
    assert launch(check, 2) == [True, True]
