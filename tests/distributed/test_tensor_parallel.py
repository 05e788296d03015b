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
from lowbit.testing import relative_error
from lowbit.testing.launch import launch
from lowbit.testing.tensor_parallel import ParallelBlock
from tests.tensor.cases import CASES, named, values

FROZEN = [c for c in CASES if c.is_weight and not c.is_trainable and c.row_step == 1]


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
        raise AssertionError("48 columns are not whole groups of 32")
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
        plain = ParallelBlock(named("int8-row")[0])
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
