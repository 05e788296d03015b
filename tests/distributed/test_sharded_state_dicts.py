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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit
from lowbit.numerics.sharded import held_locally
from lowbit.tensor import LowbitTensor, joined
from lowbit.tensor.core.parts import split
from lowbit.testing.fsdp2 import TwoLinears, shard
from lowbit.testing.launch import launch
from lowbit.testing.serialization import check_loaded, gathered
from tests.covering import pairs
from tests.distributed.test_tensor_fsdp import ROWS, WEIGHTS
from tests.tensor.cases import named, one_of_each, same, same_bits, values

SOME = named(
    *("int4-g32-asymmetric", "int8-tensor", "e4m3-row", "ternary"),
    *("qat-int4-g32", "train-int8-weight", "train-bitnet"),
)
SHARED = named(
    *("int4-g32", "int8-tensor", "e5m2-tensor", "nf4-g16-double", "nvfp4", "int8static-nvfp4"),
    *("table8-tensor", "ternary", "train-int8-weight"),
)
"""Most of them share a scale among all rows."""
IN_TURN = list(zip(SOME, ROWS * 3, strict=False))
"""Each of them with one number of rows."""


def check_save(rank, world_size, folder, sharded):
    for case, rows in IN_TURN:
        model = TwoLinears(case, rows, seed=20)
        state = (shard(model) if sharded else model).state_dict()
        assert all(type(getattr(t, "_local_tensor", t)) is torch.Tensor for t in state.values())
        dcp.save({"model": state}, checkpoint_id=f"{folder}/{case.name}")
    return True


def check_load(rank, world_size, folder, sharded):
    for case, rows in IN_TURN:
        model, expected = TwoLinears(case, rows, seed=50), TwoLinears(case, rows, seed=20)
        model = shard(model) if sharded else model
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{folder}/{case.name}")
        model.load_state_dict(state)
        check_loaded(model, expected, (case.name, rows))
    return True


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_between_sharded_models_and_unsharded_ones(saved, loaded, tmp_path):
    assert launch(check_save, saved, str(tmp_path), saved > 1) == [True] * saved
    assert launch(check_load, loaded, str(tmp_path), loaded > 1) == [True] * loaded
    for file in tmp_path.rglob("*.distcp"):
        assert b"lowbit" not in Path(file).read_bytes(), "plain tensors, for readers without lowbit"


def check_get_and_set(rank, world_size):
    """torch's functions for model state dicts give and take what state_dict and load_state_dict do."""
    kinds = ({}, {"cpu_offload": True}, {"full_state_dict": True})
    for case, options, strict in pairs(SOME, kinds, (True, False)):
        if options.get("full_state_dict") and case.name == "e4m3-row":
            continue  # gloo gathers no float8
        expected, where = TwoLinears(case, 33, seed=20), (case.name, options, strict)
        told = StateDictOptions(**options, strict=strict)
        state = get_model_state_dict(shard(TwoLinears(case, 33, seed=20)), options=told)
        assert list(state) == list(expected.state_dict()), where
        assert {isinstance(t, DTensor) for t in state.values()} == {
            "full_state_dict" not in options
        }
        assert all(type(held_locally(t)) is torch.Tensor for t in state.values()), where
        model = shard(TwoLinears(case, 33, seed=50))
        found = set_model_state_dict(model, state, options=told)
        assert not found.missing_keys and not found.unexpected_keys, where
        check_loaded(model, expected, where)
    return True


def test_get_and_set():
    assert launch(check_get_and_set, 2) == [True, True]


def check_parts_keep_no_memory(rank, world_size):
    """The attributes by which torch finds the parts are None, on a copy of the parameter too."""
    for case in SOME:
        model = shard(TwoLinears(case, 33, seed=20))
        get_model_state_dict(model)
        parts = set() if case.has_master else {*case.make((2, 128)).tensor_attrs}
        for p in (model.first.weight, copy.deepcopy(model.first.weight)):
            assert parts <= {*vars(p)} and all(vars(p)[name] is None for name in parts), case.name
        assert not hasattr(model.first.bias, "codes")
    return True


def test_parts_keep_no_memory():
    assert launch(check_parts_keep_no_memory, 2) == [True, True]


def check_some_of_the_parameters(rank, world_size):
    """As of a LoRA: low-bit weights are frozen, what trains is saved and loaded by itself."""
    for case in SOME:
        expected, model = TwoLinears(case, 33, seed=20), shard(TwoLinears(case, 33, seed=50))
        before, names = model.state_dict(), list(expected.state_dict())
        before = {name: gathered(t).clone() for name, t in before.items()}
        for full in (False, True):
            bias = model.first.bias.detach().clone() if not full else expected.first.bias.detach()
            state, options = {"first.bias": bias}, {"full_state_dict": full}
            loose = StateDictOptions(**options, strict=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = set_model_state_dict(model, dict(state), options=loose)
            lacking = set() if full else {*names} - {"first.bias"}
            assert {*found.missing_keys} == lacking, (case.name, full)
            if not full:  # with it torch fills in the model's own values
                with pytest.raises(RuntimeError, match=r"Missing key.*first\.weight"):
                    set_model_state_dict(model, dict(state), options=StateDictOptions())
        for name, t in model.state_dict().items():
            wanted = expected.first.bias.detach() if name == "first.bias" else before[name]
            assert same_bits(gathered(t), wanted), (case.name, name)
    return True


def test_some_of_the_parameters():
    assert launch(check_some_of_the_parameters, 2) == [True, True]


def check_frozen(rank, world_size):
    """torch leaves frozen parameters out by their own names, which frozen low-bit weights do not have."""
    frozen = StateDictOptions(ignore_frozen_params=True)
    for case in SOME:
        expected = TwoLinears(case, 33, seed=20)
        for model in (shard(TwoLinears(case, 33, seed=20)), expected):
            if case.is_trainable:
                state = get_model_state_dict(model, options=frozen)
                assert list(state) == list(expected.state_dict())
            else:
                with pytest.raises(KeyError, match=r"first\.weight"):
                    get_model_state_dict(model, options=frozen)
    model = shard(TwoLinears(*named("qat-int4-g32"), 33, seed=20))
    model.first.weight.requires_grad_(False)
    assert {*get_model_state_dict(model, options=frozen)} == {"first.bias", "second.weight"}
    return True


def test_frozen():
    assert launch(check_frozen, 2) == [True, True]


def check_save_by_names(rank, world_size, folder):
    for case in SOME:
        state = get_model_state_dict(shard(TwoLinears(case, 33, seed=20)))
        dcp.save({"model": state}, checkpoint_id=f"{folder}/{case.name}")
    return True


def check_load_by_names(rank, world_size, source, target):
    for case in SOME:
        model, expected = shard(TwoLinears(case, 33, seed=50)), TwoLinears(case, 33, seed=20)
        state = {name: t.clone() for name, t in get_model_state_dict(model).items()}
        dcp.load({"model": state}, checkpoint_id=f"{source}/{case.name}")
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))
        check_loaded(model, expected, case.name)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{target}/{case.name}")
    return True


def test_by_names_from_two_processes_to_one_and_back(tmp_path):
    two, one, again = (str(tmp_path / name) for name in ("two", "one", "again"))
    assert launch(check_save_by_names, 2, two) == [True, True]
    assert launch(check_load_by_names, 1, two, one) == [True]
    assert launch(check_load_by_names, 2, one, again) == [True, True]


def check_wrapped(rank, world_size):
    """torch.compile and DistributedDataParallel: keys have no wrapper's name in them."""
    ddp, loose = nn.parallel.DistributedDataParallel, StateDictOptions(strict=False)

    def layers_compiled(model):  # as torchtitan does
        model.first = torch.compile(model.first)
        return model

    wraps = (torch.compile, ddp, lambda m: ddp(torch.compile(m)), layers_compiled)
    for case in SOME:
        expected = TwoLinears(case, 33, seed=20)
        for wrap in wraps:
            where = (case.name, wrap)
            state = get_model_state_dict(wrap(copy.deepcopy(expected)))
            assert {*state} == {*expected.state_dict()}, where
            wrapped = wrap(TwoLinears(case, 33, seed=50))
            if not case.has_master:
                with pytest.raises(RuntimeError, match=r"Missing key: first\.weight"):
                    set_model_state_dict(wrapped, dict(state))
            found = set_model_state_dict(wrapped, dict(state), options=loose)
            assert not found.missing_keys and not found.unexpected_keys, where
            found = get_model_state_dict(wrapped)
            assert all(same_bits(found[name], t) for name, t in expected.state_dict().items())
        blocks = shard(layers_compiled(TwoLinears(case, 33, seed=50)))
        state = get_model_state_dict(shard(copy.deepcopy(expected)))
        found = set_model_state_dict(blocks, state, options=loose)
        assert not found.missing_keys and not found.unexpected_keys, case.name
        found = get_model_state_dict(blocks)
        assert all(same_bits(gathered(found[n]), t) for n, t in expected.state_dict().items())
    return True


def test_wrapped():
    assert launch(check_wrapped, 2) == [True, True]


def check_whole_tensors(rank, world_size):
    """Low-bit tensors under the parameters' names load as well, full or sharded as the model is."""
    everywhere = StateDictOptions(full_state_dict=True)
    for case in SOME:
        expected = TwoLinears(case, 33, seed=20)
        for options, given in (
            (everywhere, expected),
            (None, shard(TwoLinears(case, 33, seed=20))),
        ):
            model = shard(TwoLinears(case, 33, seed=50))
            whole = {name: p.detach() for name, p in given.named_parameters()}
            assert isinstance(held_locally(whole["first.weight"]), LowbitTensor)
            set_model_state_dict(model, whole, options=options)
            check_loaded(model, expected, (case.name, options))
    return True


def test_whole_tensors():
    assert launch(check_whole_tensors, 2) == [True, True]


def check_full(rank, world_size, folder):
    """What one process saved loads from a full copy on every rank; what is gathered can be saved."""
    everywhere = StateDictOptions(full_state_dict=True)
    for case, rows in IN_TURN:
        model, expected = shard(TwoLinears(case, rows, seed=50)), TwoLinears(case, rows, seed=20)
        parts = {name: t.clone() for name, t in expected.state_dict().items()}
        set_model_state_dict(model, dict(parts), options=everywhere)
        check_loaded(model, expected, (case.name, rows))
        if case.name == "e4m3-row":
            continue  # gloo gathers no float8
        state = get_model_state_dict(model, options=everywhere)
        path = f"{folder}/{case.name}-{rank}.safetensors"
        lowbit.save(state, path)
        again = TwoLinears(case, rows, seed=50)
        again.load_state_dict(lowbit.load(path))
        check_loaded(again, expected, (case.name, rows))
        assert all(same_bits(state[name], t) for name, t in parts.items()), (case.name, rows)
    return True


def test_full(tmp_path):
    assert launch(check_full, 2, str(tmp_path)) == [True, True]


def check_joined(rank, world_size):
    """torch's function drops the descriptions, which the sharded model still has."""
    for case in SOME:
        if case.name == "e4m3-row":
            continue  # gloo gathers no float8
        expected, model = TwoLinears(case, 33, seed=20), shard(TwoLinears(case, 33, seed=20))
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        found = joined(state, model)
        for name, t in joined(expected.state_dict()).items():
            is_same = same if isinstance(t, LowbitTensor) else same_bits
            assert type(found[name]) is type(t) and is_same(found[name], t), (case.name, name)
        assert list(joined(state)) == list(state)
    return True


def test_joined():
    assert launch(check_joined, 2) == [True, True]


def check_broadcast(rank, world_size):
    """Parts on one rank alone do not reach the others, which say so; plain values do."""
    sent = {"full_state_dict": True, "broadcast_from_rank0": True}
    for case in SOME:
        if case.has_master or case.name == "e4m3-row":  # gloo sends no float8
            continue
        model, expected = shard(TwoLinears(case, 33, seed=50)), TwoLinears(case, 33, seed=20)
        told = ""
        try:
            state = dict(expected.state_dict()) if rank == 0 else {}
            set_model_state_dict(model, state, options=StateDictOptions(**sent))
        except RuntimeError as error:
            told = str(error)
        assert ("Missing key" in told and "first.weight.codes" in told) is (rank == 1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            state = dict(expected.state_dict()) if rank == 0 else {}
            set_model_state_dict(model, state, options=StateDictOptions(**sent, strict=False))
        told = [w for w in found if "accepted: full_state_dict=True without it" in str(w.message)]
        assert bool(told) is (rank == 1), "on the rank that received nothing"
        if case.name != "ternary":  # whose scales are means, not the largest values
            values = {name: p.detach() for name, p in expected.named_parameters()}
            values["first.weight"] = values["first.weight"].dequantize().contiguous()
            values["second.weight"] = values["second.weight"].dequantize().contiguous()
            state = dict(values) if rank == 0 else {}
            set_model_state_dict(model, state, options=StateDictOptions(**sent))
            own = model.first.weight.to_local().dequantize()
            wanted = values["first.weight"].chunk(world_size)[rank]
            assert (own - wanted).norm() < 0.02 * wanted.norm(), case.name
    return True


def test_broadcast():
    assert launch(check_broadcast, 2) == [True, True]


def check_placements(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    row, column = Shard(0), Shard(1)
    for case in one_of_each(WEIGHTS):
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
        whole = TwoLinears(case, 33, seed=20)
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
        model, sharded = TwoLinears(case, 33, seed=50), shard(TwoLinears(case, 33, seed=20))
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
        assert same(found, TwoLinears(case, 33, seed=20).first.weight.detach())
    return True


def check_plain_values(rank, world_size):
    """Ranks agree on what they share of the scales."""
    for case in SHARED:
        where, told = case.name, StateDictOptions(full_state_dict=True)
        model, expected = TwoLinears(case, 33, seed=50), TwoLinears(case, 33, seed=20)
        plain = {n: values(t.shape) for n, t in expected.named_parameters()}
        plain["first.weight"][20:] *= 5
        expected.load_state_dict(plain)
        model = shard(model)
        set_model_state_dict(model, plain, options=told)
        check_loaded(model, expected, where)
        held = {n: getattr(t, "dequantize", t.clone)() for n, t in expected.named_parameters()}
        set_model_state_dict(model, held, options=told)
        check_loaded(model, expected, where)
    for scheme in (
        lowbit.Int8Weight(),
        lowbit.Int4Weight(32),
    ):  # by columns, a scale a row, and a group
        model, expected = nn.Sequential(nn.Linear(128, 24)), nn.Sequential(nn.Linear(128, 24))
        plain = {n: values(t.shape) for n, t in expected.named_parameters()}
        expected.load_state_dict(plain)
        for own in (model, expected):
            lowbit.train.prepare_(own, scheme)
        parallelize_module(model[0], init_device_mesh("cpu", (world_size,)), RowwiseParallel())
        lowbit.train.locate_(model)
        set_model_state_dict(model, plain, options=told)
        found = model[0].weight.full_tensor().dequantize()
        assert torch.equal(found, expected[0].weight.dequantize()), scheme
    return True


def test_plain_values():
    assert launch(check_plain_values, 2) == [True, True]


def check_plain_siblings(rank, world_size):
    for scheme in (lowbit.NVFP4WeightOnly(), lowbit.Float8WeightOnly(lowbit.PerTensor())):
        whole = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj"):
            whole.register_module(name, nn.Linear(64, 33))
        lowbit.quantize_(whole, scheme)
        plain = {n: values(t.shape) for n, t in whole.named_parameters()}
        plain["k_proj.weight"][20:] *= 5
        model = fully_shard(copy.deepcopy(whole), mesh=init_device_mesh("cpu", (world_size,)))
        whole.load_state_dict(plain)
        set_model_state_dict(model, plain, options=StateDictOptions(full_state_dict=True))
        for name, weight in model.named_parameters():
            if isinstance(own := whole.get_parameter(name), LowbitTensor):
                assert same_bits(weight.full_tensor(), own.detach()), (name, scheme)
    return True


def test_plain_siblings():
    assert launch(check_plain_siblings, 2) == [True, True]
