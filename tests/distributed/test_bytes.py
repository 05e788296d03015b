"""Every transport keeps all bits of the codes: each is tested with all 65,536 pairs of bytes.

On CUDA `torch._foreach_copy_` converts bfloat16 and float16 through float32, which rewrites NaN patterns. A CPU's
kernel doesn't, so these tests put a stand-in in its place; `test_multigpu.py` runs the same checks over NCCL.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lowbit.schemes.mixed_precision import BLOCK
from lowbit.testing.launch import launch
from tests.as_sent import as_sent
from tests.tensor.cases import CASES, one_of_each, same_bits

ROW_CASES = one_of_each([c for c in CASES if c.row_step == 1])
WEIGHTS = [c for c in ROW_CASES if c.is_weight]
COLUMNS = 768  # whole groups of 32 and 48, whole blocks of 128 and 256
NARROW = (torch.bfloat16, torch.float16)


def device():
    """This process's device: its own GPU under NCCL."""
    return "cuda" if "nccl" in dist.get_backend_config() else "cpu"


def foreach_copy_as_on_cuda(dsts, srcs, non_blocking=False):
    """`torch._foreach_copy_` as CUDA's kernel does it: 16-bit NaNs become 0x7FFF."""
    for dst, src in zip(dsts, srcs, strict=True):
        dst.copy_(src)
        if dst.dtype in NARROW and src.dtype is dst.dtype:
            bits = dst.view(torch.int16)
            bits[src.isnan().view(bits.shape)] = 0x7FFF


@contextlib.contextmanager
def copies_as_on_cuda():
    own = torch._foreach_copy_
    if device() == "cpu":
        torch._foreach_copy_ = foreach_copy_as_on_cuda
    try:
        yield
    finally:
        torch._foreach_copy_ = own


def byte_pairs(t, shift):
    """Fill a tensor of one-byte elements with all pairs of bytes in turn, from the first or from the second byte on."""
    pairs = torch.arange(2**16, dtype=torch.int32, device=t.device).to(torch.int16)
    pairs = pairs.view(torch.uint8).roll(-shift)
    flat = t.view(torch.uint8).view(-1)
    flat.copy_(pairs.repeat(-(-flat.numel() // pairs.numel()))[: flat.numel()])


def filled(case, rows, shift, dtype=torch.bfloat16, wire=False):
    """A tensor, as stored or as FSDP2 gathers it, whose codes are all pairs of bytes."""
    t = case.make((rows, COLUMNS), dtype=dtype).to(device())
    if wire:
        t = as_sent(t)
    for inner in t.inner_tensors().values():
        if inner.dtype.itemsize == 1:
            byte_pairs(inner, shift)
    return t


def rows_of(case, wire):
    """An uneven number of rows that is large enough for the codes to hold all pairs."""
    codes = next(iter(filled(case, 1, 0, wire=wire).inner_tensors().values()))
    rows = -(-(2**17) // codes.nbytes) + 2
    return rows + 1 - rows % 2


def check_same(found, expected, where):
    for name, t in expected.inner_tensors().items():
        assert same_bits(getattr(found, name).cpu(), t.cpu()), (*where, name)


def cleared(t):
    return t._map(torch.zeros_like)


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def shard(model, mesh):
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    if isinstance(model, FSDPModule) and device() == "cpu":
        model.set_force_sum_reduction_for_comms(True)
    return model


def meshes():
    """All ranks in one group; and two dimensions, replicated over the first (HSDP)."""
    world = dist.get_world_size()
    yield init_device_mesh(device(), (world,))
    groups = 2 if world == 4 else 1
    names = ("replicate", "shard")
    yield init_device_mesh(device(), (groups, world // groups), mesh_dim_names=names)


def check_gathered(rank, world_size):
    """FSDP2 and HSDP gather a group whose tensors would all share one 16-bit dtype, twice into the same memory."""
    with copies_as_on_cuda():
        for case in WEIGHTS:
            stored = filled(case, 2, 0)
            rows, sent = rows_of(case, True), as_sent(stored)
            if sent._row_attrs() == ("weight",):  # values travel, in their own dtype
                continue
            for mesh in meshes():
                for shift, count in ((0, rows), (1, rows), (0, rows + 1)):
                    size = torch.Size((count, COLUMNS))
                    if (
                        sent is not stored
                        and as_sent(stored, ranks=world_size, shape=size) is stored
                    ):
                        count = -(-count // (BLOCK * world_size)) * BLOCK * world_size
                    whole = filled(case, count, shift, wire=True)
                    model = shard(Holder(whole.clone()), mesh)
                    for _ in range(2):
                        model.unshard()
                        check_same(model.weight, whole, (case.name, count, shift, mesh.ndim))
                        model.reshard()
    return True


def check_placed(rank, world_size):
    """distribute_tensor (scatter, broadcast), full_tensor (all-gather), redistribute, broadcast in place."""
    mesh = next(meshes())
    with copies_as_on_cuda():
        for case in ROW_CASES:
            rows = rows_of(case, False)
            for shift in (0, 1):
                whole = filled(case, rows, shift)
                for placement in (Shard(0), Replicate()):
                    placed = distribute_tensor(whole, mesh, [placement])
                    where = (case.name, shift, placement)
                    check_same(placed.full_tensor(), whole, where)
                    moved = placed.redistribute(placements=[Replicate()])
                    check_same(moved.to_local(), whole, where)
                received = whole.clone() if rank == 0 else cleared(whole)
                dist.broadcast(received, 0)
                check_same(received, whole, (case.name, shift, "broadcast"))
    return True


def check_replicated(rank, world_size):
    """DistributedDataParallel sends rank 0's weights and buffers at the start, flattened with others of their dtype,
    and the buffers anew before each forward."""
    with copies_as_on_cuda():
        for case in (c for c in WEIGHTS if not c.has_master):
            whole = filled(case, rows_of(case, False), 0)
            model = nn.Linear(*whole.shape[::-1], dtype=torch.bfloat16, device=device())
            own = whole if rank == 0 else cleared(whole)
            model.weight = nn.Parameter(own.clone())
            model.register_buffer("held", own.clone())
            replica = nn.parallel.DistributedDataParallel(model)
            for t in (model.weight.detach(), model.held):
                check_same(t, whole, (case.name,))
            if rank:
                for t in model.held.inner_tensors().values():
                    t.zero_()
            replica._sync_buffers()
            check_same(model.held, whole, (case.name, "before a forward"))
    return True


def check_saved(rank, world_size, folder):
    """torch.distributed.checkpoint, sharded: weights, and states of optimizers."""
    mesh = next(meshes())
    with copies_as_on_cuda():
        for case in ROW_CASES:
            whole = filled(case, rows_of(case, False), 1)
            state = {"t": distribute_tensor(whole, mesh, [Shard(0)])}
            dcp.save(state, checkpoint_id=f"{folder}/{case.name}")
            state = {"t": distribute_tensor(cleared(whole), mesh, [Shard(0)])}
            dcp.load(state, checkpoint_id=f"{folder}/{case.name}")
            check_same(state["t"].full_tensor(), whole, (case.name,))
            assert isinstance(state["t"], DTensor)
    return True


CHECKS = [check_gathered, check_placed, check_replicated]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
def test_two_processes(check):
    assert launch(check, 2) == [True, True]


def test_two_processes_saved(tmp_path):
    assert launch(check_saved, 2, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("dtype", NARROW)
def test_the_stand_in_rewrites_what_cuda_does(dtype):
    """CUDA's copy turns every bfloat16 NaN other than 0x7FFF into 0x7FFF: 253 patterns of each sign."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    found = torch.zeros(2**16, dtype=dtype)
    foreach_copy_as_on_cuda([found], [bits.view(dtype)])
    changed = found.view(torch.int16) != bits
    assert torch.equal(changed, bits.view(dtype).isnan() & (bits != 0x7FFF))
