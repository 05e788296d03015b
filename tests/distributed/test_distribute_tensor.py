"""torch's `distribute_tensor` and collectives over low-bit tensors: what rank 0 holds arrives as it is stored, or the
operation is refused by name. torch would hand gloo the address of the wrapper, which has no memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lowbit.tensor import Int8WeightTensor
from lowbit.tensor.core import collectives
from lowbit.testing import launch
from tests.tensor.cases import BY_NAME, CASES, same

SHAPES = {"even": (32, 192), "uneven": (25, 96), "experts": (4, 32, 96)}
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda t: dist.broadcast(t, 0),
    "scatter": lambda t: dist.scatter(
        t, [t.clone(), t.clone()] if dist.get_rank() == 0 else None, 0
    ),
    "all_reduce": dist.all_reduce,
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([t.clone(), t.clone()], t),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(torch.cat([t, t]), t),
    "gather": lambda t: dist.gather(t, [t.clone(), t.clone()] if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda t: dist.reduce_scatter(t, [t.clone(), t.clone()]),
    "all_to_all": lambda t: dist.all_to_all([t.clone(), t.clone()], [t, t]),
    "send and recv": lambda t: dist.send(t, 1) if dist.get_rank() == 0 else dist.recv(t, 0),
}
RIGHT = {"broadcast", "scatter"}


def part_of(whole: Any, placement: Placement, rank: int, world_size: int) -> Any:
    if isinstance(placement, Replicate):
        return whole
    parts = torch.chunk(whole, world_size, placement.dim)  # type: ignore[attr-defined]
    return parts[rank]


def check_distributed(rank: int, world_size: int, shape: tuple[int, ...]) -> dict[str, int]:
    """Counts of what was right and what was refused, over all representations and placements."""
    mesh = init_device_mesh("cpu", (world_size,))
    counts = {"right": 0, "refused": 0}
    for case in CASES:
        for placement in PLACEMENTS:
            whole, own = case.make(shape, seed=0), case.make(shape, seed=rank)
            given = nn.Parameter(own, requires_grad=case.is_trainable)
            label = f"{case.name} {placement}"
            try:
                expected = part_of(whole, placement, rank, world_size)
            except NotImplementedError:
                with pytest.raises(NotImplementedError, match=r"does not support slicing"):
                    distribute_tensor(given, mesh, [placement])
                counts["refused"] += 1
                continue
            made = distribute_tensor(given, mesh, [placement])
            assert isinstance(made, DTensor) and made.shape == whole.shape, label
            own = made.to_local().detach()
            if isinstance(own, Int8WeightTensor):  # `locate_` tells its columns where they lie
                own.columns = expected.columns
            assert same(own, expected), label
            counts["right"] += 1
    return counts


@pytest.mark.parametrize("shape", SHAPES)
def test_the_data_of_rank_0_arrives(shape: str) -> None:
    first, second = launch(check_distributed, 2, SHAPES[shape], timeout=240)
    assert first == second
    assert first["right"] + first["refused"] == len(CASES) * len(PLACEMENTS)
    assert first["right"] >= 2 * len(CASES)


def check_functions(rank: int, world_size: int, names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        case = BY_NAME[name]
        for function, run in FUNCTIONS.items():
            held = case.make((8, 96), seed=rank)
            if function in RIGHT:
                run(held)
                if not same(held, case.make((8, 96), seed=0)):
                    wrong.append(f"{function} of {name}: other values")
                continue
            try:
                run(held)
                wrong.append(f"{function} of {name}: not refused")
            except NotImplementedError as error:
                if "dequantize" not in str(error):
                    wrong.append(f"{function} of {name}: {error}")
    return wrong


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_collective_returns_when_no_thread_refers_to_its_tensors(which: str) -> None:
    """Gloo's threads drop their references after the result is there. Python must free neither tensor meanwhile."""
    dropped = threading.Event()

    def hold(held: list[Any]) -> None:
        time.sleep(0.03)
        dropped.set()
        held.clear()

    def collective(sent: torch.Tensor) -> torch.Tensor:
        result = sent.clone()
        view = (sent if which == "input" else result).view(-1)  # which refers to its base
        threading.Thread(target=hold, args=([view],)).start()
        return result

    inner = torch.rand(2, 3)
    found = collectives._finished(collective, (), {}, inner)
    assert dropped.is_set() and torch.equal(found, inner)


def test_collectives_are_right_or_refused() -> None:
    names = [
        "int4-g32",
        "nf4-g16-double",
        "e4m3-row",
        "ternary",
        "train-int8-weight",
        "qat-int4-g32",
    ]
    for wrong in launch(check_functions, 2, names):
        assert wrong == []
