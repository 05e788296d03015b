"""Adding a scheme, a tensor or an optimizer takes one file: this one writes such a file, imports it, and takes a model
through everything that lowbit does with its own. Nothing else in lowbit learns about the new classes."""

from __future__ import annotations

import copy
import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowbit
from lowbit import testing, train
from lowbit.testing.launch import launch

ADDITION = '''
"""A weight in 5 bits, its scheme, and a sign optimizer."""

from dataclasses import dataclass

import torch

from lowbit import AffineTensor, IntxWeightOnly, TrainingScheme
from lowbit.optim.base import LowbitOptimizer
from lowbit.tensor.core.checks import check_weight
from lowbit.tensor.trained.trainable import TrainableTensor


@dataclass(frozen=True)
class Int5Weight(TrainingScheme):
    """Train the weight in 5 bits. `largest`: the largest code."""

    largest: int = 15


class Int5Tensor(TrainableTensor):
    """codes: int8 [N, K], -15 .. 15. scale: float32 [N, 1]."""

    tensor_attrs = ("codes", "scale")
    schemes = (Int5Weight,)

    def __new__(cls, weight, scheme):
        check_weight(weight)
        meta = {"scheme": scheme}
        return cls.from_inner(_quantize(weight, scheme), meta, weight.shape, weight.dtype)

    def dequantize(self):
        if self.flat_from is not None:
            return self._with(shape=self.flat_from).dequantize().reshape(-1)
        return (self.codes * self.scale).to(self.dtype)

    def _encode(self, values):
        return _quantize(values, self.scheme)

    def inner_shapes(self, shape):
        return {
            "codes": (tuple(shape), torch.int8),
            "scale": ((*shape[:-1], 1), torch.float32),
        }

    def frozen(self):
        spec = IntxWeightOnly(5).weight
        codes = AffineTensor._store(self.codes, spec)
        return AffineTensor(codes, self.scale, None, spec, self.shape, self.dtype)


def _quantize(weight, scheme):
    weight = weight.detach().float()
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / scheme.largest
    return {"codes": (weight / scale).round().to(torch.int8), "scale": scale}


class SignMomentum(LowbitOptimizer):
    """w -= lr * sign(m), with m = (m + g) / 2."""

    moments = {"momentum": True}

    def __init__(self, params, lr=0.05, **common):
        super().__init__(params, {"lr": lr}, common)

    @staticmethod
    def reference(param, grad, momentum, *, lr):
        momentum.add_(grad).mul_(0.5)
        param.sub_(momentum.sign() * lr)
'''


def load_addition(folder):
    """The module of that file, as an import gives it: pickles and processes find it by its name."""
    name = "lowbit_addition"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("addition")
    (folder / "lowbit_addition.py").write_text(ADDITION)
    return folder


@pytest.fixture
def addition(folder):
    return load_addition(folder)


class TestInt5(
    testing.BasicContract,
    testing.AutogradContract,
    testing.CompileContract,
    testing.FSDP2Contract,
    testing.SerializationContract,
):
    """The tests that lowbit's own tensors pass."""

    trainable = True
    column_step = 0

    @pytest.fixture(autouse=True)
    def _addition(self, folder):
        self.folder = str(folder)

    def encode(self, weight):
        addition = load_addition(self.folder)
        return addition.Int5Tensor(weight, addition.Int5Weight())


class Model(nn.Module):
    """64 → 48 → 32, without biases, so that every parameter is one of the new class."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 48, bias=False), nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu())


def prepared(addition):
    torch.manual_seed(0)
    model = Model()
    report = train.prepare_(model, addition.Int5Weight())
    assert report.converted == ["first.weight", "second.weight"]
    return model


def batch(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def take_steps(model, optimizer, count, first=0):
    losses = []
    for step in range(first, first + count):
        loss = (model(batch(step)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_it_trains_in_five_bits(addition):
    model = prepared(addition)
    before = copy.deepcopy(model)
    losses = take_steps(model, addition.SignMomentum(model.parameters(), lr=0.01), 20)
    assert losses[-1] < losses[0]
    weight = model.first.weight
    assert type(weight) is addition.Int5Tensor and weight.codes.abs().amax() == 15
    assert not torch.equal(weight.codes, before.first.weight.codes)


def test_torch_optimizers_compile_and_arithmetic(addition):
    model = prepared(addition)
    take_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    take_steps(model, torch.optim.AdamW(model.parameters(), foreach=True), 2)
    weight = model.first.weight
    assert torch.equal(weight.norm(), weight.dequantize().norm())
    assert type(weight.detach().clone()[:5]) is addition.Int5Tensor
    x = batch(0)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x), model(x))


def test_a_trace_names_it(addition):
    model = prepared(addition)
    found = lowbit.trace(model, batch(0).requires_grad_())
    assert {(p.layer, p.weight) for p in found.products} == {
        ("first", "Int5Tensor"),
        ("second", "Int5Tensor"),
    }
    assert len(found.products) == 6 and all(p.why for p in found.products)


def test_it_is_saved_and_loaded(addition, tmp_path):
    model = prepared(addition)
    optimizer = addition.SignMomentum(model.parameters())
    take_steps(model, optimizer, 2)
    lowbit.save(model, tmp_path / "model.safetensors")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = prepared(addition)
    other.load_state_dict(lowbit.load(tmp_path / "model.safetensors"), assign=True)
    again = addition.SignMomentum(other.parameters())
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert take_steps(other, again, 2, first=2) == take_steps(model, optimizer, 2, first=2)
    torch.save(model.first.weight, tmp_path / "weight.pt")
    weight = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert torch.equal(weight.detach(), model.first.weight.detach())


def test_it_is_converted_and_restored(addition):
    model = prepared(addition)
    take_steps(model, addition.SignMomentum(model.parameters()), 2)
    restored, x = copy.deepcopy(model), batch(0)
    expected = model(x)
    train.convert_(model)
    assert type(model.first.weight) is lowbit.AffineTensor
    assert model.first.weight.spec.format == lowbit.Int(5)
    assert torch.equal(model(x), expected)
    train.restore_(restored)
    assert type(restored.first.weight) is nn.Parameter
    assert torch.equal(restored(x), expected)


def check_sharded(rank, world_size, folder):
    addition = load_addition(folder)
    whole, model = prepared(addition), prepared(addition)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    for module in (model.first, model.second, model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    losses = [
        take_steps(m, addition.SignMomentum(m.parameters(), lr=0.01), 3) for m in (model, whole)
    ]
    assert losses[0] == losses[1], "the same batch on every rank, so the same training"
    expected = whole.state_dict()
    assert set(expected) == {
        f"{layer}.weight.{part}" for layer in ("first", "second") for part in ("codes", "scale")
    }
    for name, t in model.state_dict().items():
        assert torch.equal(t.full_tensor(), expected[name]), name
    assert isinstance(model.first.weight.to_local(), addition.Int5Tensor)
    other = prepared(addition)
    for module in (other.first, other.second, other):
        fully_shard(module, mesh=mesh)
    other.load_state_dict(model.state_dict())
    for name, t in other.state_dict().items():
        assert torch.equal(t.full_tensor(), expected[name]), name
    assert dist.get_rank() == rank
    return True


def test_it_is_sharded_by_fsdp2(folder, addition):
    assert launch(check_sharded, 2, str(folder)) == [True, True]
