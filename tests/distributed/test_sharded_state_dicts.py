"""State dicts of sharded low-bit weights: plain DTensors, which pass between any sharding and none."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit
from lowbit.tensor import LowbitTensor, joined
from lowbit.tensor.state_dict import split, whole_weights
from tests.distributed.launch import launch
from tests.distributed.test_tensor_checkpoints import check_loaded, filled, gathered
from tests.distributed.test_tensor_fsdp import ROWS, WEIGHTS, shard
from tests.tensor.cases import named, same, same_bits, values

SOME = named(
    *("int4-g32-asymmetric", "int8-tensor", "e4m3-row", "ternary"),
    *("qat-int4-g32", "train-int8-weight", "train-bitnet"),
)


def check_save(rank, world_size, folder, sharded):
    for case in SOME:
        for rows in ROWS:
            model = filled(case, rows, seed=20)
            state = (shard(model) if sharded else model).state_dict()
            assert all(type(getattr(t, "_local_tensor", t)) is torch.Tensor for t in state.values())
            dcp.save({"model": state}, checkpoint_id=f"{folder}/{case.name}-{rows}")
    return True


def check_load(rank, world_size, folder, sharded):
    for case in SOME:
        for rows in ROWS:
            model, expected = filled(case, rows, seed=50), filled(case, rows, seed=20)
            model = shard(model) if sharded else model
            state = model.state_dict()
            dcp.load({"model": state}, checkpoint_id=f"{folder}/{case.name}-{rows}")
            model.load_state_dict(state)
            check_loaded(model, expected, (case.name, rows))
    return True


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_between_sharded_models_and_unsharded_ones(saved, loaded, tmp_path):
    assert launch(check_save, saved, str(tmp_path), saved > 1) == [True] * saved
    assert launch(check_load, loaded, str(tmp_path), loaded > 1) == [True] * loaded
    for file in tmp_path.rglob("*.distcp"):
        assert b"lowbit" not in Path(file).read_bytes(), "plain tensors, for readers without lowbit"


def by_name(model, **options):
    """torch's function, which knows parameters by their own names only."""
    with whole_weights():
        return get_model_state_dict(model, **options)


def check_by_names(rank, world_size, folder):
    """torch's functions for model state dicts: every parameter under its own name."""
    frozen = StateDictOptions(ignore_frozen_params=True)
    for case in SOME:
        model, expected = shard(filled(case, 33, seed=20)), filled(case, 33, seed=20)
        state = by_name(model)
        assert set(state) == {"first.weight", "first.bias", "second.weight"}
        assert isinstance(state["first.weight"].to_local(), LowbitTensor) is not case.has_master
        dcp.save({"model": state}, checkpoint_id=f"{folder}/{case.name}")
        trained = {"first.weight", "second.weight"} if case.is_trainable else set()
        assert set(by_name(model, options=frozen)) == {"first.bias", *trained}
        other = shard(filled(case, 33, seed=50))
        state = by_name(other)
        dcp.load({"model": state}, checkpoint_id=f"{folder}/{case.name}")
        set_model_state_dict(other, state)
        check_loaded(other, expected, case.name)
        for wrap in (torch.compile, nn.parallel.DistributedDataParallel):
            other = filled(case, 33, seed=50)
            if case.is_trainable or wrap is torch.compile:
                set_model_state_dict(wrap(other), by_name(wrap(copy.deepcopy(expected))))
                check_loaded(other, expected, (case.name, wrap))
    return True


def test_by_names(tmp_path):
    assert launch(check_by_names, 2, str(tmp_path)) == [True, True]


def check_whole(rank, world_size, folder):
    """Every rank loads the full state dict of one process; a gathered state dict can be saved."""
    everywhere = StateDictOptions(full_state_dict=True)
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    for case in SOME:
        for rows in ROWS:
            model, expected = shard(filled(case, rows, seed=50)), filled(case, rows, seed=20)
            parts = {name: t.clone() for name, t in expected.state_dict().items()}
            set_model_state_dict(model, dict(parts), options=everywhere)
            check_loaded(model, expected, (case.name, rows))
            state = by_name(model, options=everywhere)
            path = f"{folder}/{case.name}-{rows}-{rank}.safetensors"
            lowbit.save(state, path)
            again = filled(case, rows, seed=50)
            again.load_state_dict(lowbit.load(path))
            check_loaded(again, expected, (case.name, rows))
            found = {name: gathered(t) for name, t in model.state_dict().items()}
            assert all(same_bits(t, parts[name]) for name, t in found.items()), (case.name, rows)
        if not case.has_master and case.name != "e4m3-row":  # gloo sends no float8
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                set_model_state_dict(model, parts if rank == 0 else {}, options=sent)
            told = [w for w in found if "accepted: the parts on every rank" in str(w.message)]
            assert bool(told) is (rank == 1), "on the rank that received nothing"
    return True


def test_whole(tmp_path):
    pytest.importorskip("safetensors")
    assert launch(check_whole, 2, str(tmp_path)) == [True, True]


def check_placements(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    row, column = Shard(0), Shard(1)
    for case in WEIGHTS:
        if case.has_master or 128 % case.column_step:
            continue
        whole = case.make((64, 256))
        for placement in (row, column, Replicate()):
            value = distribute_tensor(whole, mesh, [placement])
            parts = split(value)
            assert parts is not None and parts.keys() == whole.inner_tensors().keys()
            for name, t in parts.items():
                where = (case.name, placement, name)
                assert same_bits(gathered(t), getattr(whole, name)), where
                assert same_bits(t.to_local(), getattr(value.to_local(), name)), where
    (case,) = named("int4-g32")
    odd = distribute_tensor(case.make((64, 96)), mesh, [Shard(0)])
    assert split(DTensor.from_local(odd.to_local(), mesh, [Partial()])) is None
    return True


def test_parts_are_placed_as_the_weight_is():
    assert launch(check_placements, 2) == [True, True]


def check_tensor_parallel(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}

    def made(seed):
        model = nn.ModuleDict({"first": nn.Linear(64, 128), "second": nn.Linear(128, 32)})
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(values(p.shape, seed))
        return model

    for prepare in (
        lambda m: lowbit.quantize_(m, lowbit.Int4WeightOnly(32)),
        lambda m: lowbit.quantize_(m, lowbit.Int8WeightOnly()),
        lambda m: lowbit.train.prepare_(m, lowbit.Int8Weight()),
    ):
        whole, model = made(1), made(2)
        for m in (whole, model):
            prepare(m)
        parallelize_module(model, mesh, plan)
        state = model.state_dict()
        placed = {
            name: distribute_tensor(t, mesh, state[name].placements, src_data_rank=None)
            for name, t in whole.state_dict().items()
        }
        model.load_state_dict(placed)
        for name, t in model.state_dict().items():
            assert same_bits(gathered(t), whole.state_dict()[name]), name
        moved = {**placed}
        name = "first.weight.codes"
        moved[name] = placed[name].redistribute(placements=[Replicate()])
        with pytest.raises(RuntimeError, match=r"first\.weight\.codes is placed as .*expected"):
            model.load_state_dict(moved)
    return True


def test_tensor_parallel():
    assert launch(check_tensor_parallel, 2) == [True, True]


def check_onto_meta(rank, world_size):
    """Loading as accelerate does: onto a meta model, each tensor of the full state dict sharded and assigned."""
    for case in SOME:
        whole = filled(case, 33, seed=20)
        model = shard(copy.deepcopy(whole).to("meta"))
        state = model.state_dict()
        assert list(state) == list(whole.state_dict())
        placed = {
            name: distribute_tensor(
                t, state[name].device_mesh, state[name].placements, src_data_rank=None
            )
            for name, t in whole.state_dict().items()
        }
        model.load_state_dict(placed, assign=True)
        check_loaded(model, whole, case.name)
    return True


def test_onto_meta():
    assert launch(check_onto_meta, 2) == [True, True]


def test_sharded_parts_into_an_unsharded_model():
    assert launch(check_sharded_into_unsharded, 2) == [True, True]


def check_sharded_into_unsharded(rank, world_size):
    for case in named("int4-g32", "train-int8-weight"):
        model, sharded = filled(case, 33, seed=50), shard(filled(case, 33, seed=20))
        state = sharded.state_dict()
        with pytest.raises(RuntimeError, match=r"first\.weight\.codes is a DTensor.*full_tensor"):
            model.load_state_dict(state)
        with pytest.raises(ValueError, match=r"is sharded: .*gather its parts"):
            joined(state)
        for name in state:
            state[name] = state[name].full_tensor()
        assert dist.get_rank() == rank
        model.load_state_dict(state)
        found = joined(state)["first.weight"]
        assert same(found, filled(case, 33, seed=20).first.weight.detach())
    return True
