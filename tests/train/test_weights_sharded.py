"""Int8 and BitNet weights in two processes: FSDP2 and tensor parallelism equal one process, and draw the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import lowbit
from lowbit import BitNet, Int4Weight, Int8Weight, train
from lowbit.tensor import BitNetTensor, Int8WeightTensor
from lowbit.testing.launch import launch
from tests.covering import pairs
from tests.scaled_products import scaled_products
from tests.train.problems import relative, values

INT8 = Int8Weight(True, True, True, always=True, stochastic_rounding=False)
INT4 = Int4Weight(
    16, output=True, grad_input=True, grad_weight=True, always=True, stochastic_rounding=False
)


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 48)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


def model_of(scheme, width=96, dtype=torch.float32):
    model = Model(width).to(dtype)
    train.prepare_(model, scheme)
    return model


def shard(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def batch(step):
    """Small integers: their gradients are summed exactly, in any order."""
    return values(8, 64, seed=step)


def step_of(model, optimizer, step):
    """With gradients that do not depend on how they are summed, so that weights can be compared to the bit."""
    y = model(batch(step))
    y.square().mean().backward()
    for name, p in sorted(model.named_parameters()):
        own = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        own.copy_(part_of(p, values(*p.shape, seed=100 * step + len(name))))
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def part_of(p, whole):
    if not isinstance(p, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, p.device_mesh, p.placements).to_local()


OPTIMIZERS = {
    "torch-AdamW": torch.optim.AdamW,
    "AdamW8bit": lowbit.optim.AdamW8bit,
    "SGD": lowbit.optim.SGD,
}


def same_weights(model, whole, where):
    for name, expected in whole.named_parameters():
        found = model.get_parameter(name)
        found = found.full_tensor() if isinstance(found, DTensor) else found
        found, expected = found.detach(), expected.detach()
        assert type(found) is type(expected), (*where, name)
        if isinstance(expected, Int8WeightTensor):
            for part, t in expected.inner_tensors().items():
                assert torch.equal(getattr(found, part), t), (*where, name, part)
        elif isinstance(expected, BitNetTensor):
            assert torch.equal(found.weight, expected.weight), (*where, name)
        else:
            assert torch.equal(found, expected), (*where, name)


def check_updates_are_the_same_at_any_sharding(rank, world_size):
    """To the bit: FSDP2, even and uneven; tensor parallel by columns and rows."""
    layouts = (shard, 96), (shard, 33), (parallel, 96), (parallel, 94)
    for scheme, name, (make, width) in pairs((Int8Weight(), BitNet()), OPTIMIZERS, layouts):
        if make is parallel and name == "AdamW8bit" and width == 94:
            continue  # 47 columns are not whole blocks of a state
        whole, model = model_of(scheme, width), make(model_of(scheme, width))
        optimizers = [OPTIMIZERS[name](m.parameters(), lr=1e-2) for m in (whole, model)]
        for step in range(3):
            for m, optimizer in zip((whole, model), optimizers, strict=True):
                step_of(m, optimizer, step)
        if make is parallel and name == "AdamW8bit":
            continue  # The blocks of its states differ, so its values do too.
        same_weights(model, whole, (scheme, name, make.__name__, width))
    return True


def check_gradients(rank, world_size):
    """FSDP2 with a batch a rank, tensor parallelism with one batch: by name, and counted."""
    for scheme in (Int8Weight(), INT8, INT4, BitNet(), BitNet(True, True)):
        whole = model_of(scheme)
        for other in range(world_size):
            (whole(batch(other)).square().mean() / world_size).backward()
        model = shard(model_of(scheme))
        with scaled_products() as calls:
            model(batch(rank).requires_grad_()).square().mean().backward()
        ran = calls["int8"]
        expected = {Int8Weight(): 0, INT8: 6, INT4: 6, BitNet(): 2, BitNet(True, True): 6}
        assert ran == expected[scheme]
        for name, p in whole.named_parameters():
            assert relative(model.get_parameter(name).grad.full_tensor(), p.grad) < 1e-6, name

        whole, model = model_of(scheme), parallel(model_of(scheme))
        x, twin = (batch(0).requires_grad_() for _ in range(2))
        with scaled_products() as calls:
            y = model(x)
            y.square().mean().backward()
        assert calls["int8"] == ran
        expected = whole(twin)
        expected.square().mean().backward()
        # Each part of an input or gradient has its own scales, as a part of a row of an int4 weight has.
        limit = 1e-5 if scheme == Int8Weight() else 0.03
        assert relative(y.detach(), expected) < limit, scheme
        for name, p in whole.named_parameters():
            grad = model.get_parameter(name).grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert relative(grad, p.grad) < limit, (scheme, name)
        assert relative(x.grad, twin.grad) < limit, scheme
    return True


TOGETHER = (
    Int8Weight(),
    Int8Weight(True, True, True, always=True),
    Int4Weight(16),
    Int4Weight(16, output=True, grad_input=True, grad_weight=True, always=True),
)


def check_all_together(rank, world_size):
    """Uneven shards, errors in the momentum, activations in int8 and steps in backward: the bits of one process that
    steps afterwards, with the sum of the ranks' gradients."""
    for scheme in TOGETHER:
        whole, model = model_of(scheme, 33), shard(model_of(scheme, 33))
        first, second = (
            lowbit.optim.AdamW8bit(m.parameters(), lr=1e-2, weight_correction="momentum")
            for m in (whole, model)
        )
        lowbit.optim.step_in_backward(second, bucket_mib=1e-6)

        def backward(m, number):
            with train.save_in_int8(m, min_numel=1):
                y = m(values(9, 64, seed=number))
            y.square().mean().backward()

        for step in range(0, 3 * world_size, world_size):
            for other in range(world_size):
                backward(whole, step + other)
            for p in whole.parameters():
                p.grad /= world_size
            first.step()
            first.zero_grad()
            backward(model, step + rank)
        same_weights(model, whole, (scheme,))
        assert not torch.equal(
            whole.up.weight.dequantize(), model_of(scheme, 33).up.weight.dequantize()
        )
    return True


def check_compiled(rank, world_size):
    """Each layer compiled, under FSDP2: the same gradients, and low-bit products."""
    for scheme in (INT8, INT4, BitNet()):
        torch._dynamo.reset()
        expected, model = (shard(model_of(scheme)) for _ in range(2))
        model.up.compile(backend="aot_eager")
        model.down.compile(backend="aot_eager")
        for m in (expected, model):
            with scaled_products() as calls:
                m(batch(rank)).square().mean().backward()
            assert calls["int8"] == (2 if scheme == BitNet() else 5)
        for name, p in expected.named_parameters():
            found = model.get_parameter(name).grad
            assert relative(found.full_tensor(), p.grad.full_tensor()) < 1e-5, (scheme, name)
    return True


def check_one_reduction_for_all_scales(rank, world_size):
    model, whole = shard(model_of(BitNet(), 33)), model_of(BitNet(), 33)
    reductions = []
    all_reduce = dist.all_reduce

    def counted(*args, **kwargs):
        reductions.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        with torch.no_grad():
            expected = whole(batch(0))
            assert torch.equal(model(batch(0)), expected) and len(reductions) == 2
            for module in (model.up, model.down):
                module.reshard()
            train.precompute_bitnet_scale(model)
            assert len(reductions) == 3
            assert torch.equal(model(batch(0)), expected) and len(reductions) == 3
            # weights that have changed since take no scale of old
            for m in (model, whole):
                optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
                for p in m.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
            for module in (model.up, model.down):
                module.reshard()
            assert torch.equal(model(batch(0)), whole(batch(0))) and len(reductions) == 5
    finally:
        dist.all_reduce = all_reduce
    model = parallel(model_of(BitNet()))
    train.precompute_bitnet_scale(model)
    found = model.up.weight._local_tensor.known_scale()
    assert torch.equal(found, model_of(BitNet()).up.weight.own_scale())
    return True


def check_sharded_twice(rank, world_size):
    """Tensor parallelism within FSDP2, on four processes."""
    for scheme in (Int8Weight(), BitNet()):
        whole, model = model_of(scheme), model_of(scheme)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["parts"], plan)
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["data"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        if scheme == BitNet():
            try:
                model(batch(0))
            except NotImplementedError as error:
                assert "precompute_bitnet_scale" in str(error)
            else:
                raise AssertionError("a gather knows of one sharding only")
            train.precompute_bitnet_scale(model)
        y, expected = model(batch(0)), whole(batch(0))
        assert relative(y.detach(), expected) < (0.03 if scheme == BitNet() else 1e-5), scheme
        for m, out in ((model, y), (whole, expected)):
            out.square().mean().backward()
            torch.optim.SGD(m.parameters(), lr=1e-2).step()
        for name, p in whole.named_parameters():
            found = model.get_parameter(name).full_tensor().detach()
            values_of = [getattr(t, "master", lambda t=t: t)() for t in (found, p.detach())]
            assert relative(*values_of) < 0.02, (scheme, name)
    return True


def check_from_meta(rank, world_size):
    """Prepared on meta, sharded, brought to memory: the same draws as ever."""
    for make in (shard, parallel):
        with torch.device("meta"):
            model = Model()
        train.prepare_(model, Int8Weight())
        model = make(model)
        model.to_empty(device="cpu")
        train.locate_(model)
        whole = model_of(Int8Weight())
        for name, p in Model().named_parameters():
            own = model.get_parameter(name)
            with torch.no_grad():
                local = own.to_local() if isinstance(own, DTensor) else own
                local.copy_(part_of(own, p.detach()))
        for m in (whole, model):
            step_of(m, torch.optim.SGD(m.parameters(), lr=1e-2), 0)
        same_weights(model, whole, (make.__name__,))
    return True


def check_refused(rank, world_size):
    model = shard(model_of(Int8Weight()))
    for call in (train.restore_, train.convert_):
        try:
            call(model)
        except ValueError as error:
            assert "is sharded" in str(error)
        else:
            raise AssertionError("it is sharded")
    for scheme in (Int8Weight(), BitNet()):
        try:
            parallel(model_of(scheme, 95))
        except NotImplementedError as error:
            assert "(48, 47) cannot be padded to 48 columns" in str(error)
            assert "multiple of the number of ranks" in str(error)
        else:
            raise AssertionError("torch pads them")
    return True


def check_whole_state_dicts(rank, world_size):
    """Every rank loads its low-bit values, random-number offsets included; one rank may broadcast plain values."""
    whole = StateDictOptions(full_state_dict=True)
    for sizes in ((1, world_size), (world_size, 1)):
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(64, 33, bias=False)) for _ in range(2))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "parts"))
        for m in (model, other):
            train.prepare_(m, Int8Weight())
            fully_shard(m, mesh=mesh)
        with torch.no_grad():
            model[0].weight.to_local().add_(1.0)
        state = get_model_state_dict(model, options=whole)
        set_model_state_dict(other, dict(state), options=whole)
        found = [m[0].weight.to_local().inner_tensors() for m in (model, other)]
        assert all(torch.equal(t, found[1][name]) for name, t in found[0].items())
    sent = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    plain = {"0.weight": model[0].weight.full_tensor().dequantize().contiguous()}
    set_model_state_dict(other, plain if rank == 0 else {}, options=sent)
    local = other[0].weight.to_local()
    assert type(local) is Int8WeightTensor
    assert relative(local.master(), model[0].weight.to_local().master()) < 1e-6
    return True


def test_whole_state_dicts():
    assert launch(check_whole_state_dicts, 2) == [True, True]


def test_updates_are_the_same_at_any_sharding():
    assert launch(check_updates_are_the_same_at_any_sharding, 2) == [True, True]


def test_gradients():
    assert launch(check_gradients, 2) == [True, True]


def test_all_together():
    assert launch(check_all_together, 2) == [True, True]


def test_compiled():
    assert launch(check_compiled, 2) == [True, True]


def test_one_reduction_for_all_scales():
    assert launch(check_one_reduction_for_all_scales, 2) == [True, True]


def test_sharded_twice():
    assert launch(check_sharded_twice, 4) == [True] * 4


def test_from_meta():
    assert launch(check_from_meta, 2) == [True, True]


def test_refused():
    assert launch(check_refused, 2) == [True, True]
