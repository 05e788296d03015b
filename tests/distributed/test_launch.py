"""The launcher itself: results, errors, dead and hanging processes."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lowbit.testing.launch import ChildError, launch


def sum_of_ranks(rank, world_size, offset):
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, value


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("a broken rank")
    dist.barrier()


def die(rank, world_size):
    os._exit(3)


def process_id(rank, world_size):
    return os.getpid()


def hang(rank, world_size):
    time.sleep(60)


def test_returns_every_ranks_result_in_order():
    assert launch(sum_of_ranks, 2, 10) == [(0, torch.tensor([21.0])), (1, torch.tensor([21.0]))]
    assert [r for r, _ in launch(sum_of_ranks, 2, 0)] == [0, 1]


def test_failures_name_the_rank_and_the_next_call_works():
    with pytest.raises(ChildError, match=r"(?s)rank 1 raised.*a broken rank"):
        launch(fail_on_one, 2)
    with pytest.raises(ChildError, match="rank 0 died with exit code 3"):
        launch(die, 1)
    with pytest.raises(ChildError, match="gave no answer"):
        launch(hang, 1, timeout=1.0)
    assert launch(sum_of_ranks, 1, 5) == [(0, torch.tensor([5.0]))]


def test_a_longer_limit_starts_new_processes():
    """A process group keeps the limit of its collectives, so running processes cannot take a longer one."""
    (first,) = launch(process_id, 1, timeout=50.0, fresh=True)
    assert launch(process_id, 1, timeout=40.0) == [first]
    (second,) = launch(process_id, 1, timeout=60.0)
    assert second != first and launch(process_id, 1, timeout=50.0) == [second]
