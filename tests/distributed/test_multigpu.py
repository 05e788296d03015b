"""Two and four GPUs over NCCL against one: weights, states and outputs after three steps, to the bit.

Every rank gets the same batch, so that the mean of the gradients is each rank's gradient exactly. Every check runs
over many cases in one call, since starting processes is what takes the time.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lowbit import Float8MixedPrecision, Int8MixedPrecision, optim, train
from lowbit.layers.prepared import make_prepared
from lowbit.tensor import (
    BitNetTensor,
    LowbitTensor,
    MixedPrecisionTensor,
)
from lowbit.testing.launch import launch
from tests.distributed import test_bytes, test_compressed_collectives, test_learned_scales
from tests.distributed.test_bytes import device
from tests.scaled_products import scaled_products
from tests.tensor.cases import CASES, Case, named, same_bits, values

WORLDS = (2, 4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("fsdp", "hsdp")
# Without always=True, mixed precision would multiply these small layers in high precision.
STORED = [
    c
    for c in CASES
    if c.is_weight and c.row_step == 1 and not issubclass(c.kind, MixedPrecisionTensor)
]
MIXED = [
    Case(
        "train-int8-always",
        MixedPrecisionTensor,
        Int8MixedPrecision(always=True, stochastic_rounding=False),
    ),
    Case("train-float8-always", MixedPrecisionTensor, Float8MixedPrecision(always=True)),
]
WEIGHTS = [*STORED, *MIXED]
ROWS = (64, 333, 1)  # even; uneven; most ranks without any
STEPS = 3

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]


def run(check, world, *args):
    found = torch.cuda.device_count()
    if found < world:
        pytest.skip(f"needs {world} GPUs; torch.cuda.device_count() is {found} here")
    assert launch(check, world, *args, nccl=True, timeout=300.0) == [True] * world


class Model(nn.Module):
    """inputs → rows, and → 96 where `chained`; the weights as the case stores them, a bias on the first."""

    def __init__(self, case, rows, dtype, chained=True, inputs=100):
        super().__init__()
        self.first = layer(case, rows, inputs, dtype, 0)
        self.first.bias = nn.Parameter(values((rows,), 3, dtype).to(device()))
        self.second = layer(case, 96, rows, dtype, 1) if chained else None

    def forward(self, x):
        y = self.first(x)
        return y if self.second is None else self.second(nn.functional.silu(y))


def layer(case, n, k, dtype, seed):
    """The model after `prepare_` or `quantize_`."""
    made = nn.Linear(k, n, bias=False, dtype=dtype, device=device())
    weight = values((n, k), seed) / k**0.5
    made.weight = nn.Parameter(case.encode(weight.to(dtype)).to(device()))
    if case.is_trainable:
        make_prepared([made], [nn.Linear])
    return made


@functools.cache
def mesh_of(layout):
    """The mesh of this process, with the dimensions "outer" and "inner" for "hsdp"; one for all cases, since a
    communicator of NCCL keeps memory of the GPU."""
    world = dist.get_world_size()
    if layout == "fsdp":
        return init_device_mesh(device(), (world,))
    return init_device_mesh(device(), (2, world // 2), mesh_dim_names=("outer", "inner"))


def shard(model, mesh):
    # halving a small float16 gradient loses its last bit, and so would a mean
    is_half = model.first.weight.dtype is torch.float16
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_half else None)
    for module in (model.first, model.second, model):
        if module is not None:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    if device() == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def batch(step, inputs, dtype):
    return values((8, inputs), 10 + step, dtype).to(device())


def step_of(model, optimizer, x):
    y = model(x)
    y.float().square().sum().backward()  # float16 has few bits for the gradients of a mean
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return y.detach()


def whole_of(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_equal(found, expected, where):
    found, expected = whole_of(found).detach(), expected.detach()
    assert type(found) is type(expected), where
    if isinstance(expected, LowbitTensor):
        for name, t in expected.inner_tensors().items():
            own = getattr(found, name)
            if name == "scale_absmax":  # parts of columns have copies
                t = t.repeat_interleave(own.shape[-1] // t.shape[-1], -1)
            assert same_bits(own.cpu(), t.cpu()), (*where, name)
    else:
        assert same_bits(found.cpu(), expected.cpu()), where


def check_weights(model, whole, where):
    for name, expected in whole.named_parameters():
        check_equal(model.get_parameter(name), expected, (*where, name))


def check_representations(rank, world_size, dtype, layout):
    """Every representation: outputs of each step, then weights. Frozen weights train the biases around them.

    The gradient of the input reads weights of mixed precision as they were gathered, in codes, so there is no layer
    before theirs.
    """
    mesh = mesh_of(layout)
    for case in WEIGHTS:
        for rows in ROWS:
            where = (case.name, rows, dtype, layout)
            chained = case in STORED
            whole = Model(case, rows, dtype, chained)
            model = shard(Model(case, rows, dtype, chained), mesh)
            optimizers = [optim.AdamW8bit(m.parameters(), lr=1e-2) for m in (whole, model)]
            for step in range(STEPS):
                x = batch(step, 100, dtype)
                y, expected = (
                    step_of(m, o, x) for m, o in zip((model, whole), optimizers[::-1], strict=True)
                )
                assert same_bits(y.cpu(), expected.cpu()), (*where, step)
            check_weights(model, whole, where)
            full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            for name, expected in whole.state_dict().items():
                check_equal(full[name], expected, (*where, "state dict", name))
    return True


ALGORITHMS = {
    "AdamW": optim.AdamW,
    "Adam": optim.Adam,
    "SGD": optim.SGD,
    "Lion": optim.Lion,
    "AdEMAMix": optim.AdEMAMix,
    "Muon": optim.Muon,
}
OPTIONS = {"SGD": {"momentum": 0.9}, "Muon": {"stacked": False}}
VARIANTS = {
    "rounded": {"state": "8bit", "bf16_stochastic_round": True},
    "corrected": {"state": "4bit", "weight_correction": "8bit"},
}


def optimizers_of():
    for name, cls in ALGORITHMS.items():
        for state in ("4bit", "8bit", "float8", "bf16", "fp32"):
            yield f"{name}-{state}", cls, {"state": state, **OPTIONS.get(name, {})}
    for name, options in VARIANTS.items():
        yield f"AdamW-{name}", optim.AdamW, options


def check_optimizers(rank, world_size, dtype, layout):
    """Every algorithm in every format, over a QAT weight that the ranks share unevenly: weights and states."""
    (case,) = named("qat-int4-g32")
    mesh = mesh_of(layout)
    for name, cls, options in optimizers_of():
        where = (name, dtype, layout)
        whole = Model(case, 333, dtype, inputs=512)
        model = shard(Model(case, 333, dtype, inputs=512), mesh)
        optimizers = [cls(m.parameters(), lr=1e-2, **options) for m in (whole, model)]
        for step in range(STEPS):
            x = batch(step, 512, dtype)
            for m, optimizer in zip((whole, model), optimizers, strict=True):
                step_of(m, optimizer, x)
        check_weights(model, whole, where)
        for key, p in whole.named_parameters():
            found = optimizers[1].state[model.get_parameter(key)]
            assert found.keys() == optimizers[0].state[p].keys(), where
            for slot, expected in optimizers[0].state[p].items():
                check_equal(found[slot], expected, (*where, key, slot))
    return True


def check_compiled(rank, world_size):
    """Each layer compiled by inductor, bfloat16, even and uneven."""
    for case in (*named("qat-int4-g32", "train-int8-weight", "train-bitnet"), *MIXED):
        for rows in (64, 333):
            torch._dynamo.reset()
            chained = case in STORED
            whole = Model(case, rows, torch.bfloat16, chained)
            model = Model(case, rows, torch.bfloat16, chained)
            for m in (whole, model):
                for module in (m.first, m.second):
                    if module is not None:
                        module.compile()
            shard(model, mesh_of("fsdp"))
            optimizers = [optim.AdamW8bit(m.parameters(), lr=1e-2) for m in (whole, model)]
            for step in range(STEPS):
                x = batch(step, 100, torch.bfloat16)
                for m, optimizer in zip((whole, model), optimizers, strict=True):
                    step_of(m, optimizer, x)
            check_weights(model, whole, (case.name, rows, "compiled"))
    return True


class Block(nn.Module):
    """192 → 384 → 64: the parts of 2 and 4 ranks are whole groups of 32 and 48."""

    def __init__(self, case, dtype):
        super().__init__()
        self.up, self.down = layer(case, 384, 192, dtype, 0), layer(case, 64, 384, dtype, 1)

    def forward(self, x):
        return self.down(nn.functional.silu(self.up(x)))


def is_in_blocks(case):
    """Rows share scales, so that QAT refuses parts that cut through blocks."""
    return case.is_qat and case.how.weight.shares_rows


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def placed_gradients(model, step, dtype):
    """Sets gradients that do not depend on how products are split, so that weights can be compared to the bit."""
    for i, p in enumerate(model.parameters()):
        if not p.requires_grad:
            continue
        whole = values(p.shape, 100 * step + i, dtype).to(device())
        is_split = isinstance(p, DTensor)
        p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if is_split else whole


def relative(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_tensor_parallel(rank, world_size, dtype, sharded):
    """Linears split by columns and by rows; `sharded`: within FSDP2, on a mesh of two dimensions.

    Weights are equal. Outputs are close: partial sums are added in another order, and an activation that is quantized
    in parts has a scale for each part."""
    for case in WEIGHTS:
        if case.column_step > 1 and 384 // world_size % case.column_step:
            continue
        if case.name in ("qat-e4m3-row", "qat-nvfp4"):
            continue  # refused: each part would choose a scale of its own, for the row or for all
        if sharded and case.shares_rows and case.kind is not BitNetTensor:
            continue  # one scale for all rows of a part: FSDP2 cannot gather it
        where = (case.name, dtype, sharded)
        whole, model = Block(case, dtype), Block(case, dtype)
        if sharded:
            mesh = mesh_of("hsdp")
            parallelize_module(model, mesh["inner"], PLAN)
            for module in (model.up, model.down, model):
                fully_shard(module, mesh=mesh["outer"])
        else:
            parallelize_module(model, mesh_of("fsdp"), PLAN)
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (whole, model)]
        for step in range(STEPS):
            if case.kind is BitNetTensor:
                train.precompute_bitnet_scale(model)
            x = batch(step, 192, dtype).requires_grad_()
            y, expected = model(x), whole(x)
            in_low_bits = case.activation or case in MIXED or case.name.endswith("-products")
            limit = 0.06 if in_low_bits else 0.02
            assert relative(whole_of(y).detach(), expected.detach()) < limit, (*where, step)
            for m, out in ((model, y), (whole, expected)):
                whole_of(out).float().square().mean().backward()
                placed_gradients(m, step, dtype)
            if case.is_trainable:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        check_weights(model, whole, where)
    return True


def check_columns_unevenly(rank, world_size, dtype):
    """333 rows over the ranks: each row's product is that of one process."""
    for case in (c for c in WEIGHTS if not c.shares_rows and not is_in_blocks(c)):
        whole, model = Model(case, 333, dtype, False), Model(case, 333, dtype, False)
        plan = {"first": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh_of("fsdp"), plan)
        x = batch(0, 100, dtype)
        y, expected = whole_of(model(x)), whole(x)
        assert relative(y.detach(), expected.detach()) < 0.01, (case.name, dtype)
        check_weights(model, whole, (case.name, dtype))
    return True


def check_replicas(rank, world_size, dtype):
    """Under DistributedDataParallel all ranks start from rank 0's weights and take the steps of one process."""
    for case in WEIGHTS:
        where = (case.name, dtype)
        whole, model = Model(case, 333, dtype), Model(case, 333, dtype)
        with torch.no_grad():
            for p in model.parameters() if rank else ():
                inner = p.inner_tensors().values() if isinstance(p, LowbitTensor) else [p]
                for t in inner:
                    t.copy_(t.flip(0))
        replica = nn.parallel.DistributedDataParallel(model)
        check_weights(model, whole, where)
        optimizers = [optim.AdamW8bit(m.parameters(), lr=1e-2) for m in (whole, model)]
        for step in range(STEPS):
            x = batch(step, 100, dtype)
            for m, optimizer in zip((whole, replica), optimizers, strict=True):
                step_of(m, optimizer, x)
        check_weights(model, whole, where)
    return True


def check_low_bit_products_ran(rank, world_size):
    for case, format in zip(MIXED, ("int8", "float8"), strict=True):
        model = shard(Model(case, 64, torch.bfloat16, inputs=128), mesh_of("fsdp"))
        with scaled_products() as calls:
            step_of(model, None, batch(0, 128, torch.bfloat16))
        assert calls == {format: 5}, calls
    return True


def check_host_far_ahead(rank, world_size):
    """What an all-gather computed is read late, when the host has issued the all-gathers of many layers."""
    for case in (*named("train-bitnet", "train-int8-weight", "int8-tensor"), *MIXED):
        layers = [layer(case, 64, 64, torch.bfloat16, seed) for seed in range(12)]
        whole, model = nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))
        for module in (*model, model):
            fully_shard(module, mesh=mesh_of("fsdp"))
        x = batch(0, 64, torch.bfloat16)
        with torch.no_grad():
            expected = whole(x)
            for turn in range(4):
                if device() == "cuda":
                    torch.cuda._sleep(200_000_000)  # about a tenth of a second
                assert same_bits(model(x).cpu(), expected.cpu()), (case.name, turn)
    return True


worlds = pytest.mark.parametrize("world", WORLDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
@dtypes
@worlds
@pytest.mark.timeout(600)
def test_representations(world, dtype, layout):
    run(check_representations, world, dtype, layout)


@layouts
@dtypes
@worlds
@pytest.mark.timeout(600)
def test_optimizers(world, dtype, layout):
    run(check_optimizers, world, dtype, layout)


@worlds
@pytest.mark.timeout(600)
def test_compiled(world):
    run(check_compiled, world)


@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "in-fsdp"])
@dtypes
@worlds
@pytest.mark.timeout(600)
def test_tensor_parallel(world, dtype, sharded):
    run(check_tensor_parallel, world, dtype, sharded)


@dtypes
@worlds
def test_columns_unevenly(world, dtype):
    run(check_columns_unevenly, world, dtype)


@dtypes
@worlds
def test_replicas(world, dtype):
    run(check_replicas, world, dtype)


@worlds
def test_low_bit_products_ran(world):
    run(check_low_bit_products_ran, world)


@worlds
def test_host_far_ahead(world):
    run(check_host_far_ahead, world)


@pytest.mark.parametrize("check", test_bytes.CHECKS, ids=lambda f: f.__name__)
@worlds
def test_all_pairs_of_bytes(world, check):
    run(check, world)


@worlds
def test_all_pairs_of_bytes_saved(world, tmp_path):
    run(test_bytes.check_saved, world, str(tmp_path))


@pytest.mark.parametrize(
    "check",
    [*test_learned_scales.CHECKS, test_learned_scales.check_exact],
    ids=lambda f: f.__name__,
)
@worlds
def test_learned_scales_and_their_weights(world, check, tmp_path):
    saves = check is test_learned_scales.check_checkpoints
    run(check, world, *((str(tmp_path),) if saves else ()))


@pytest.mark.parametrize("check", test_compressed_collectives.CHECKS, ids=lambda f: f.__name__)
@worlds
def test_compressed_collectives_of_gpus(world, check):
    run(check, world)
