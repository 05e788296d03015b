"""Saved and loaded: `torch.save`, state dicts, `lowbit.save`, and distributed checkpoints."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit.checkpoint import load, save
from lowbit.numerics.packing import as_bytes
from lowbit.testing.comparison import same, same_bits, values
from lowbit.testing.fsdp2 import TwoLinears, shard
from lowbit.testing.launch import launch
from lowbit.testing.subject import Subject


class Net(nn.Module):
    """100 → 24, under a name of two parts, the weight tied to another module's."""

    body: Any

    def __init__(self, subject: Any, seed: int = 0) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"up": nn.Linear(100, 24)})
        self.tied = nn.Linear(100, 24, bias=False)
        up: Any = self.body["up"]
        with torch.no_grad():
            up.bias.copy_(values((24,), seed + 3))
        up.weight = nn.Parameter(subject.make((24, 100), seed), requires_grad=subject.trainable)
        self.tied.weight = up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.body["up"](x) + self.tied(x)

    def stored(self) -> Any:
        return self.body["up"].weight.detach()


def check_equal(model: Net, other: Net) -> None:
    """The same weight, still tied, and the same outputs to the bit."""
    assert same(model.stored(), other.stored())
    assert model.body["up"].weight is model.tied.weight
    x = values((5, 100), 1)
    assert same_bits(model(x), other(x))


def gathered(value: Any) -> Tensor:
    """The whole tensor, of any dtype. Gloo cannot gather float8, so its bytes are gathered."""
    if not isinstance(value, DTensor):
        return value
    local = as_bytes(value.to_local())
    options: Any = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    placed = DTensor.from_local(local, value.device_mesh, value.placements, **options)
    return placed.full_tensor().view(value.dtype)


def check_loaded(model: Any, expected: Any, where: Any) -> None:
    """A sharded model holds what the unsharded one holds, in plain tensors, and computes the same."""
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    for name, p in expected.state_dict().items():
        found = gathered(state[name])
        assert type(found) is Tensor and same_bits(found, p), (where, name)
    x = values((4, 100), 1)
    assert same_bits(model(x), expected(x)), where


def check_save(rank: int, world_size: int, subject: Any, folder: str) -> bool:
    for rows in subject.fsdp_rows:
        model = shard(TwoLinears(subject, rows, seed=20))
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/{rows}")
    return True


def check_load_and_save_again(
    rank: int, world_size: int, subject: Any, source: str, target: str
) -> bool:
    """Load the checkpoint `source` into a model with other values, over any number of processes; save to `target`."""
    for rows in subject.fsdp_rows:
        model, expected = (
            shard(TwoLinears(subject, rows, seed=50)),
            TwoLinears(subject, rows, seed=20),
        )
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"{source}/{rows}")
        model.load_state_dict(state)
        check_loaded(model, expected, rows)
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{target}/{rows}")
    return True


class TorchSaveContract(Subject):
    """`torch.load` with `weights_only=True` gives every bit that `torch.save` wrote. The class must be among torch's
    safe globals, as every `lowbit.LowbitTensor` is."""

    def test_torch_save_with_weights_only(self) -> None:
        t, buffer = self.make((7, 101)), io.BytesIO()
        parameter = nn.Parameter(t, requires_grad=self.trainable)
        torch.save({"tensor": t, "parameter": parameter}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)
        assert same(loaded["tensor"], t) and same(loaded["parameter"].detach(), t)
        assert isinstance(loaded["parameter"], nn.Parameter)
        assert loaded["parameter"].requires_grad == self.trainable


class SerializationContract(TorchSaveContract):
    """State dicts of plain tensors, `lowbit.save` and distributed checkpoints: for a `lowbit.LowbitTensor`."""

    def test_a_state_dict_loads_into_a_model_that_was_prepared_alike(self) -> None:
        for assign in (False, True):
            source, model = Net(self), Net(self, seed=1)
            parameter = model.tied.weight
            found = model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
            assert not found.missing_keys and not found.unexpected_keys
            assert (model.tied.weight is parameter) is not assign
            assert model.tied.weight.requires_grad == self.trainable
            assert same(model.stored(), source.stored())
            x = values((5, 100), 1)
            assert same_bits(model(x), source(x))

    def test_a_state_dict_of_plain_tensors_in_a_file(self) -> None:
        source, model, file = Net(self), Net(self, seed=1), io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert {type(value) for value in state.values()} == {Tensor}
        model.load_state_dict(state)
        check_equal(model, source)

    def test_lowbit_save(self, tmp_path: Path) -> None:
        source, model, file = Net(self), Net(self, seed=1), tmp_path / "model.safetensors"
        save(source, file)
        model.load_state_dict(load(file))
        check_equal(model, source)

    def test_distributed_checkpoints_from_two_processes_to_one_and_back(
        self, tmp_path: Path
    ) -> None:
        two, one, again = (str(tmp_path / name) for name in ("two", "one", "again"))
        assert launch(check_save, 2, self, two) == [True, True]
        assert launch(check_load_and_save_again, 1, self, two, one) == [True]
        assert launch(check_load_and_save_again, 2, self, one, again) == [True, True]
