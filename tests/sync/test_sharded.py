"""A model under FSDP2 on two ranks: each streams the tensors of one process, and rank 0 sends them to a third."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit
from lowbit import qat, sync, train
from lowbit.formats import FormatError
from lowbit.formats.shards import equal_bits
from lowbit.numerics.granularity import PerBlock
from lowbit.schemes.scheme import Scheme
from lowbit.testing.launch import launch
from tests.formats.models import SCHEMES

ROWS = 257
"""Rows that two ranks share unevenly."""
QAT: dict[str, tuple[Any, str]] = {
    "int4": (SCHEMES["int4 g64"], "present"),
    "int4 asymmetric, learned": (SCHEMES["int4 asymmetric g32"], "learned"),
    "int8 x int8": (SCHEMES["int8 x int8"], "present"),
    "float8 of the whole tensor": (SCHEMES["float8 tensor"], "present"),
    "float8 in blocks": (lowbit.Float8WeightOnly(PerBlock(128, 128)), "present"),
    "static inputs, learned": (lowbit.Int8StaticActivationInt8Weight(), "learned"),
    "nvfp4": (lowbit.NVFP4WeightOnly(), "present"),
}
TRAINED: dict[str, Any] = {
    "BitNet": lowbit.BitNet(),
    "Int8Weight": lowbit.Int8Weight(),
    "mixed precision": lowbit.Int8MixedPrecision(always=True),
    "float8 blocks": lowbit.Float8BlockMixedPrecision(always=True),
}


class Block(nn.Module):
    """Two siblings that servers merge, a linear after them, and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = nn.Linear(128, ROWS), nn.Linear(128, ROWS, bias=False)
        self.down_proj = nn.Linear(ROWS, 128, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 64, 128))
        self.norm = nn.LayerNorm(128)


def prepared(name: str) -> nn.Module:
    model = Block()
    chosen = {"*gate_proj": None, "*up_proj": None, "*experts": None}
    if name in TRAINED:
        train.prepare_(model, TRAINED[name])
        return model
    scheme, scales = QAT[name]
    assert isinstance(scheme, Scheme)
    chosen = {"*gate_proj": scheme, "*up_proj": scheme}
    chosen |= {} if scheme.is_static else {"*experts": scheme}
    qat.prepare_(model, {**chosen, "*": None}, scales=scales)
    if scheme.is_static:
        for module in (model.gate_proj, model.up_proj):
            module.input_scale.data.fill_(0.03)
    return model


def shard(model: nn.Module, ranks: int = 2) -> nn.Module:
    fully_shard(model, mesh=DeviceMesh("cpu", [*range(ranks)]))
    return model


def expected(name: str) -> dict[str, Tensor]:
    model = prepared(name)
    if name in QAT:
        qat.convert_(model)
    elif name != "mixed precision":
        train.convert_(model)
    return dict(sync.stream(model, "lowbit"))


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not equal_bits(a[name], b[name])]


def check_streams(rank: int, world_size: int, names: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in names:
        model = shard(prepared(name))
        assert isinstance(model.gate_proj.weight, DTensor)
        found[name] = differing(dict(sync.stream(model, "lowbit")), expected(name))
    return found


def test_every_rank_streams_the_bits_of_one_process() -> None:
    names = [*QAT, *TRAINED]
    for found in launch(check_streams, 2, names):
        assert found == {name: [] for name in names}


def check_sent(rank: int, world_size: int) -> Any:
    """Two ranks share the model, and the third is the server. A format that rank 0 cannot write ends all three."""
    group = dist.new_group([0, 2])
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        with pytest.raises(
            sync.SyncError, match=r"the sender stopped: FormatError: fp8 cannot hold"
        ):
            dict(sync.receive(group))
        return differing(dict(sync.receive(group)), expected("int4"))
    model = prepared("int4")
    fully_shard(model, mesh=mesh)
    if rank == 0:
        with pytest.raises(FormatError, match=r"fp8 cannot hold experts.*; gate_proj.weight"):
            sync.send(model, group, "fp8")
    else:
        assert sync.send(model, group, "fp8") == sync.Sent()
    return sync.send(model, group, "lowbit").tensors


def test_ranks_that_share_a_model_send_it_once() -> None:
    count = len(expected("int4"))
    assert launch(check_sent, 3) == [count, 0, []]


def check_written(rank: int, world_size: int, folder: Path) -> list[str]:
    """One rank writes, and both end."""
    report = sync.write(shard(prepared("int4")), folder / "served", "lowbit")
    assert (report is None) == (rank == 1)
    with pytest.raises(FormatError, match=r"exists already") if rank == 0 else nullcontext():
        sync.write(shard(prepared("int4")), folder / "served", "lowbit")
    dist.barrier()
    return differing(dict(sync.read(folder / "served")), expected("int4"))


def test_the_first_rank_writes(tmp_path: Path) -> None:
    assert launch(check_written, 2, tmp_path) == [[], []]


class Gathered(TorchDispatchMode):
    """Counts the bytes that this rank gives to gathers."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def check_bytes(rank: int, world_size: int, name: str) -> float:
    """Bytes that a rank gives for each element of its part."""
    torch.manual_seed(0)
    names = ("gate_proj", "up_proj")  # of siblings, which share the global scale of NVFP4
    linears = {name: nn.Linear(256, 512, bias=False) for name in names}
    model = nn.Sequential(OrderedDict(linears))
    qat.prepare_(model, QAT[name][0], scales=QAT[name][1])
    shard(model)
    with Gathered() as gathered:
        for _ in sync.stream(model, "lowbit"):
            pass
    return gathered.nbytes * world_size / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "most"),
    [("int4", 0.57), ("int4 asymmetric, learned", 0.66), ("int8 x int8", 1.02), ("nvfp4", 0.57)],
)
def test_codes_travel_between_ranks(name: str, most: float) -> None:
    """0.5 bytes of codes an element, and a float32 scale for 64, as the weights are float32."""
    assert all(found <= most for found in launch(check_bytes, 2, name))
