"""Tensor parallelism over quantized linears: split by columns and by rows, equal to the unsharded ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import lowbit
from tests.distributed.launch import launch
from tests.tensor.cases import CASES, named, same_bits, values

FROZEN = [c for c in CASES if c.is_weight and not c.is_trainable and c.row_step == 1]


class Block(nn.Module):
    """192 → 64 → 192; both ranks' parts of 64 and 192 hold whole groups of 32 and 48."""

    def __init__(self, case):
        super().__init__()
        self.up, self.down = nn.Linear(192, 192), nn.Linear(192, 64)
        for seed, layer in enumerate((self.up, self.down)):
            layer.weight = nn.Parameter(case.make(layer.weight.shape, seed))
            with torch.no_grad():
                layer.bias.copy_(values(layer.bias.shape, 3 + seed))

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())


def check_parallel_block(rank, world_size):
    """Columns then rows, as in a transformer's MLP: outputs, and gradients of the input and the biases."""
    mesh = init_device_mesh("cpu", (world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for case in FROZEN:
        if not splits_over_columns(case, 192 // world_size):
            continue
        whole, model = Block(case), Block(case)
        parallelize_module(model, mesh, plan)
        for layer, dim in ((model.up, 0), (model.down, 1)):
            weight = layer.weight
            assert isinstance(weight, DTensor) and weight.placements == (Shard(dim),), case.name
            local, full = weight.to_local(), layer_of(whole, model, layer).weight
            assert type(local) is case.kind and local.shape[dim] * world_size == full.shape[dim]
            expected = full.dequantize().chunk(world_size, dim)[rank]
            assert same_bits(local.dequantize(), expected), (case.name, dim)
        for _ in range(2):
            found = outcome(model)
            for name, expected in outcome(whole).items():
                error = relative_error(found[name], expected)
                # Each part of an activation has its own scales.
                limit = 0.02 if case.activation is not None else 1e-5
                assert error < limit, (case.name, name, error)
    return True


def splits_over_columns(case, columns):
    return columns % case.column_step == 0


def layer_of(whole, model, layer):
    return whole.up if layer is model.up else whole.down


def outcome(model):
    """Output and gradients by name."""
    model.zero_grad()
    x = values((5, 192), 9).requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = {f"{n}.bias": getattr(model, n).bias.grad for n in ("up", "down")}
    full = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {"y": y.detach(), "input": x.grad, **full}


def check_parts_that_do_not_divide(rank, world_size):
    """Uneven rows work; a cut through a group is refused by name, and the weight stays as it was."""
    mesh = init_device_mesh("cpu", (world_size,))
    for case in named("int4-g32", "int8-row", "int3-g48", "e4m3-row"):
        linear = nn.Linear(96, 33, bias=False)
        linear.weight = nn.Parameter(case.make((33, 96)))
        x = values((5, 96), 1)
        expected = linear(x)
        parallelize_module(linear, mesh, ColwiseParallel(output_layouts=Shard(-1)))
        part = linear(x)
        assert relative_error(part, expected.tensor_split([17], dim=-1)[rank]) < 1e-6, case.name
    weight = named("int4-g32")[0].make((16, 96))
    try:
        distribute_tensor(weight, mesh, [Shard(1)])
    except NotImplementedError as error:
        assert "slicing dimension 1 of 96 at 0:48" in str(error), error
    else:
        raise AssertionError("48 columns are no whole groups of 32")
    return True


def check_qat_is_refused(rank, world_size):
    """DTensor dispatches below autograd, where the straight-through gradient is lost: so training raises an error."""
    mesh = init_device_mesh("cpu", (world_size,))
    (case,) = named("qat-int4-g32")
    linear = nn.Linear(96, 32, bias=False)
    linear.weight = nn.Parameter(case.make((32, 96)))
    parallelize_module(linear, mesh, ColwiseParallel())
    try:
        linear(values((5, 96), 1)).sum().backward()
    except NotImplementedError as error:
        assert "FakeQuantizedTensor" in str(error) and "dequantize" in str(error), error
        return True
    raise AssertionError("a QAT linear cannot be split over ranks yet")


def check_a_sharded_linear_by_hand(rank, world_size):
    """F.linear of a DTensor input and a DTensor weight, without parallelize_module."""
    mesh = init_device_mesh("cpu", (world_size,))
    for case in named("int4-g32", "int4-g32-asymmetric", "int8-row", "int8-tensor", "e4m3-row"):
        whole = case.make((16, 192))
        plain = whole.dequantize()
        for dim in (0, 1):
            weight = distribute_tensor(whole, mesh, [Shard(dim)])
            x = distribute_tensor(values((5, 192), 1), mesh, [Shard(1)] if dim else None)
            x.requires_grad_()
            y = nn.functional.linear(x, weight)
            y.full_tensor().sum().backward()
            reference = values((5, 192), 1) @ plain.t()
            assert relative_error(y.full_tensor(), reference) < 1e-5, (case.name, dim)
            reference = plain.sum(0).expand(5, -1)
            assert relative_error(x.grad.full_tensor(), reference) < 1e-5, (case.name, dim)
    return True


def test_a_block_split_by_columns_and_rows():
    assert launch(check_parallel_block, 2) == [True, True]


def test_parts_that_do_not_divide():
    assert launch(check_parts_that_do_not_divide, 2) == [True, True]


def test_a_sharded_linear_by_hand():
    assert launch(check_a_sharded_linear_by_hand, 2) == [True, True]


def test_qat_is_refused():
    assert launch(check_qat_is_refused, 2) == [True, True]


def check_qat(rank, world_size):
    """QAT weights: outputs and gradients, masked where codes clip, are those of one process, and so is the model
    that is converted from the gathered weights. Parts that cut through blocks are refused."""
    mesh = init_device_mesh("cpu", (world_size,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for scheme in (lowbit.Int4WeightOnly(32), lowbit.Int8DynamicActivationInt4Weight(32)):
        plain = Block(named("int8-row")[0])
        for layer in (plain.up, plain.down):
            layer.weight = nn.Parameter(values(layer.weight.shape, 7))
        whole, model = copy.deepcopy(plain), copy.deepcopy(plain)
        for m in (whole, model):
            lowbit.qat.prepare_(m, scheme)
        parallelize_module(model, mesh, plan)
        limit = 1e-5 if scheme.activation is None else 0.02
        for m in (whole, model):
            m.zero_grad()
            m.x = values((5, 192), 9).requires_grad_()
            m.y = m(m.x)
            m.y.square().sum().backward()
        assert relative_error(model.y, whole.y) < limit
        assert relative_error(model.x.grad, whole.x.grad) < limit
        for name, p in whole.named_parameters():
            grad = model.get_parameter(name).grad
            assert isinstance(grad, DTensor), name
            assert type(grad.to_local()) is torch.Tensor, name
            assert relative_error(grad.full_tensor(), p.grad) < limit, name
            found = model.get_parameter(name).full_tensor().detach()
            assert torch.equal(found, p.detach()), name
    for scheme, part in (
        (lowbit.Int8WeightOnly(), "RowwiseParallel"),
        (lowbit.Int4WeightOnly(64), ""),
    ):
        model = nn.Sequential(nn.Linear(192, 64))
        lowbit.qat.prepare_(model, scheme)
        with pytest.raises(NotImplementedError, match=rf"parts of 96, which cut.*{part}"):
            parallelize_module(model, mesh, {"0": RowwiseParallel()})
    return True


def test_qat():
    assert launch(check_qat, 2) == [True, True]
