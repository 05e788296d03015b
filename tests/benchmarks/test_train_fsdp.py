"""The benchmark of low-bit training under FSDP2, in two processes on a CPU."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks import train_fsdp
from benchmarks.ranks import in_ranks
from benchmarks.registry import Problem, Result, Row
from benchmarks.train_fsdp import ShardedCandidate, ShardedCost, measure_rank, measure_sharded
from lowbit.schemes.training import TrainingScheme
from lowbit.testing.launch import launch
from recipes.llama import LlamaConfig

CONFIG = LlamaConfig(300, dim=64, layers=2, heads=2, kv_heads=1, hidden=64, context=16)
BLOCK = 64 * (64 + 32 + 32 + 64 + 3 * 64) + 2 * 64
REST = 300 * 64 + 64
ROWS = 64 + 32 + 32 + 64 + 3 * 64


def tiny(candidate: ShardedCandidate) -> ShardedCandidate:
    scheme = candidate.scheme
    if isinstance(scheme, TrainingScheme):
        scheme = replace(scheme, always=True)
    config = replace(CONFIG, recompute=candidate.config.recompute)
    return replace(
        candidate, config=config, device="cpu", compile=False, scheme=scheme, host_repeats=1
    )


def low_bit() -> ShardedCandidate:
    return next(c for c in train_fsdp.candidates((2, 16)) if c.products == "int8")


def all_costs(rank: int, world_size: int) -> dict[str, ShardedCost]:
    found = train_fsdp.candidates((2, 16))
    own = [c for c in found if not c.products.startswith("torchao")]
    return {c.products: measure_rank(tiny(c), 1) for c in own}


def test_low_bit_weights_travel_in_a_byte_and_products_run() -> None:
    ranks = launch(all_costs, 2)
    found = {name: ShardedCost.joined([costs[name] for costs in ranks]) for name in ranks[0]}
    recomputed = ["int8, recomputed", "float8 rowwise, recomputed"]
    compressed = ["bf16, compressed", "int8, compressed", "QAT int4 g128, compressed"]
    assert list(found) == ["bf16", *train_fsdp.SCHEMES, *compressed, *recomputed]
    elements = 2 * 2 * BLOCK + REST  # two blocks, gathered in forward and in backward
    for name, cost in found.items():
        assert cost.parameters == 2 * BLOCK + REST and cost.gathered == elements, name
        assert cost.seconds > 0 and cost.tokens == 2 * 2 * 16 and cost.peak is None
        assert cost.forward > 0 and cost.backward > 0
        if name.startswith(("bf16", "QAT")):
            assert cost.sent == 2 * elements and cost.products == 0, name
            continue
        assert cost.products == 2 * 3 * (2 * 7 + 1), name  # ranks; y, dx, dw; blocks and the head
        norms, scales = 2 * 2 * 2 * 64 + 64, 2 * 2 * ROWS + 300
        assert cost.sent == elements - norms + 4 * scales + 2 * norms, name
        assert 1 < cost.sent / elements < 1.1, name


def test_processes_of_its_own_and_the_cells() -> None:
    candidate = tiny(low_bit())
    cost = measure_sharded(candidate, 2)
    assert cost.tokens == 2 * 2 * 16 and cost.products == 90
    reference = replace(candidate, products="bf16")
    rows = [
        Row(candidate, ShardedCost(0.2, 20_000, 2**30, 2**31, 2**31, 90, 3.0, 0.02, 0.03)),
        Row(reference, ShardedCost(0.4, 20_000, 2**30, 2**32, 2**31, 0, None, 0.01, 0.04)),
    ]
    result = Result(Problem("p", [candidate, reference], reference.name), rows)
    cells = train_fsdp.sharded_cells(rows[0], result, 1.0)
    assert cells == [
        "200.0",
        "0.50",
        "100.0",
        "2.00",
        "2.00",
        "1.00",
        "90",
        "3.00",
        "20.0 / 30.0",
        "1.00",
    ]
    assert train_fsdp.sharded_cells(rows[1], result, 1.0)[-3] == ""
    assert len(cells) == len(train_fsdp.SHARDED_TABLE.columns)


def misbehave(how: str) -> None:
    if dist.get_rank() == 0:
        dist.barrier()
    elif how == "raises":
        raise ValueError("no such weight")
    elif how == "dies":
        os._exit(3)
    else:
        time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "seconds", "error", "text"),
    [
        ("raises", 100, RuntimeError, r"(?s)rank 1: .*Traceback.*ValueError: no such weight"),
        ("dies", 100, RuntimeError, "rank 1: process 1 terminated with exit code 3"),
        ("hangs", 1, TimeoutError, "rank 0 and 1 gave no answer within 1 s"),
    ],
    ids=["raises", "dies", "hangs"],
)
def test_a_rank_that_fails(how: str, seconds: float, error: type[Exception], text: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(error, match=text):
        in_ranks(misbehave, 2, "cpu", seconds, how)
    assert set(multiprocessing.active_children()) <= before


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(RuntimeError, match="2 GPUs are needed and 0 visible"):
        measure_sharded(low_bit(), 2)


def test_one_process_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, expected in ((0, 2), (1, 1), (2, 2), (8, train_fsdp.MOST_RANKS)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert train_fsdp.ranks() == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = [problem.name for problem in train_fsdp.train_fsdp()]
    assert names == ["1.2B, 1 rank, batch 4 x 4096 a rank", "8B, 1 rank, batch 2 x 4096 a rank"]


def test_nothing_gathered_is_an_empty_cell() -> None:
    candidate = tiny(low_bit())
    cost = ShardedCost(1.0, 32, 100, 0, 0, 45, None, 0.1, 0.2)
    row = Row(candidate, cost)
    cells = train_fsdp.sharded_cells(row, Result(Problem("1 rank", [candidate]), [row]), 1.0)
    found = dict(zip(train_fsdp.SHARDED_TABLE.columns, cells, strict=True))
    assert (found["gathered GiB"], found["B/parameter"], found["B/element"]) == ("0.00", "0.00", "")
