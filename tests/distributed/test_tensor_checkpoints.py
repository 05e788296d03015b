"""Distributed checkpoints of quantized weights, QAT weights and optimizer states: 2 → 1 → 2 processes, to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit.tensor import LowbitTensor
from lowbit.testing.fsdp2 import TwoLinears, shard
from lowbit.testing.launch import launch
from lowbit.testing.serialization import check_loaded
from tests.distributed.test_tensor_fsdp import ROWS, WEIGHTS
from tests.tensor.cases import CASES, named, one_of_each, same, same_bits, values

STATES = [case for case in CASES if not case.is_weight]


def sharded(tensor):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(tensor, mesh, [Shard(0)])


def check_save_states(rank, world_size, folder):
    for case in STATES:
        state = {str(rows): sharded(case.make((rows, 300))) for rows in ROWS}
        dcp.save({"state": state}, checkpoint_id=f"{folder}/{case.name}")
    return True


def check_load_states_and_save_again(rank, world_size, source, target):
    for case in STATES:
        state = {str(rows): sharded(case.make((rows, 300), seed=1)) for rows in ROWS}
        dcp.load({"state": state}, checkpoint_id=f"{source}/{case.name}")
        for rows in ROWS:
            expected, found = case.make((rows, 300)), state[str(rows)]
            chunks = list(expected.chunk(world_size))
            assert type(found.to_local()) is case.kind
            if rank < len(chunks):
                assert same(found.to_local(), chunks[rank]), (case.name, rows)
            assert same(found.full_tensor(), expected), (case.name, rows)
        dcp.save({"state": state}, checkpoint_id=f"{target}/{case.name}")
    return True


def test_states_from_two_processes_to_one_and_back(tmp_path):
    two, one, again = (str(tmp_path / name) for name in ("two", "one", "again"))
    assert launch(check_save_states, 2, two) == [True, True]
    assert launch(check_load_states_and_save_again, 1, two, one) == [True]
    assert launch(check_load_states_and_save_again, 2, one, again) == [True, True]


def check_full_state_dicts(rank, world_size):
    """A gathered state dict loads into an unsharded model, and every rank's full copy into a sharded one."""
    on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
    everywhere = StateDictOptions(full_state_dict=True)
    for at, case in enumerate(one_of_each(WEIGHTS)):
        for rows in ROWS[at % 3 : at % 3 + 1]:
            model, expected = (
                shard(TwoLinears(case, rows, seed=20)),
                TwoLinears(case, rows, seed=20),
            )
            if any(
                t.dtype.itemsize == 1 and t.is_floating_point() for t in model.state_dict().values()
            ):
                continue  # gloo gathers no float8
            state = get_model_state_dict(model, options=on_rank_0)
            assert bool(state) == (rank == 0)
            state = get_model_state_dict(model, options=everywhere)
            unsharded = get_model_state_dict(expected)
            assert list(state) == list(unsharded)
            for name, value in state.items():
                assert type(value) is type(unsharded[name]) is torch.Tensor
                assert same_bits(value, unsharded[name]), (case.name, rows, name)
            plain = TwoLinears(case, rows, seed=50)
            plain.load_state_dict(state)
            x = values((4, 100), 1)
            assert same_bits(plain(x), expected(x)), (case.name, rows)
            other = shard(TwoLinears(case, rows, seed=50))
            set_model_state_dict(other, state, options=everywhere)
            check_loaded(other, expected, (case.name, rows))
    return True


def test_full_state_dicts():
    assert launch(check_full_state_dicts, 2) == [True, True]


def check_every_representation_is_placed(rank, world_size):
    """distribute_tensor, full_tensor and redistribute, of even and uneven rows, on a mesh of two."""
    for case in one_of_each(CASES):
        wide = case.make((16, 768))
        columns = wide[:, 256:512] if 256 % case.column_step == 0 else wide
        for whole in (*(case.make((rows, 100)) for rows in (16, 33, 1)), columns):
            check_placed(case, whole, Replicate())
            if case.row_step == 1 or case.is_trainable:
                check_placed(case, whole, Shard(0))
    return True


def check_placed(case, whole, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected, where = case.values_of(whole).clone(), (case.name, tuple(whole.shape), placement)
    placed = distribute_tensor(whole, mesh, [placement])
    assert isinstance(placed.to_local(), LowbitTensor), where
    full = placed.full_tensor()
    assert type(full) is case.kind and same_bits(case.values_of(full), expected), where
    moved = placed.redistribute(placements=[Replicate()]).to_local()
    assert same_bits(case.values_of(moved), expected), where


def test_every_representation_is_placed():
    assert launch(check_every_representation_is_placed, 2) == [True, True]


def check_async_save(rank, world_size, folder):
    for case in named("int4-g32", "e4m3-row", "qat-int4-g32"):
        model = shard(TwoLinears(case, 33, seed=20))
        dcp.async_save({"m": model.state_dict()}, checkpoint_id=f"{folder}/{case.name}").result()
        other, expected = shard(TwoLinears(case, 33, seed=50)), TwoLinears(case, 33, seed=20)
        state = other.state_dict()
        dcp.load({"m": state}, checkpoint_id=f"{folder}/{case.name}")
        other.load_state_dict(state)
        check_loaded(other, expected, (case.name, 33))
    return True


def test_asynchronous_checkpoints(tmp_path):
    assert launch(check_async_save, 2, str(tmp_path)) == [True, True]
