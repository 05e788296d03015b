"""Plans of several ops in one, carried out in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lowbit_kernels.runtime import launch_plan
from lowbit_kernels.runtime.launch_plan import (
    PART,
    Address,
    Buffer,
    Composition,
    CublasProduct,
    Launch,
    LaunchPlan,
    Map,
    TensorPart,
)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(launch_plan, "tensor_map", lambda *a: SimpleNamespace(getPtr=lambda: a[0]))
    yield


def add(stream: int, grid: int, threads: int, x: int, y: int, out: int, number: int) -> None:
    """out = x + y + number, four float32 each; y may be a null pointer."""
    a, b, c = ((ctypes.c_float * 4).from_address(p) if p else [0.0] * 4 for p in (x, y, out))
    c[:] = [p + q + number for p, q in zip(a, b, strict=True)]


FLOATS = Buffer((4,), torch.float32)
SUM = LaunchPlan((FLOATS,), (), (Launch(add, 1, 1, (Address(0), Address(1), Address(2), 10)),))
"""The sum of two operands and 10."""
SUM_BY_SCRATCH = LaunchPlan(
    (FLOATS,),
    (FLOATS, Buffer((8,), torch.float32, fill=0)),
    (
        Launch(add, 1, 1, (Address(0), Address(1), Address(3), 0)),
        Launch(add, 1, 1, (Address(3), Map(4, 4, 1, 4, 4, 1, 4, 16), Address(2), 100)),
    ),
)
"""The sum of two operands and 100, by scratch memory and the second half of zeros."""


def test_plans_follow_each_other_and_share_scratch_memory() -> None:
    x, y = torch.arange(4.0), torch.full((4,), 0.5)
    whole = Composition(2, (FLOATS, FLOATS))
    (between,) = whole.scratch([FLOATS])
    whole.add(SUM, (0, 1), (between,))
    whole.add(SUM_BY_SCRATCH, (between, 0), (2,))
    whole.add(SUM, (2, None), (3,))
    plan = whole.plan()
    assert len(plan.launches) == 4 and len(plan.scratch) == 1
    shared = plan.scratch[0]
    assert (shared.nbytes, shared.filled_bytes, shared.fill) == (3 * PART, PART, 0)
    first, second = launch_plan.run(plan, (x, y))
    expected = (x + y + 10) + x + 100
    assert torch.equal(first, expected) and torch.equal(second, expected + 10)


def test_tensors_share_memory_unless_they_are_used_at_the_same_time() -> None:
    whole = Composition(1, (FLOATS,))
    a, b, c, d, _ = whole.scratch([FLOATS] * 5)
    for operands, to in (((0, 0), a), ((a, 0), b), ((b, 0), c), ((c, b), d), ((d, 0), 1)):
        whole.add(SUM, operands, (to,))
    plan = whole.plan()
    place = {
        number: launch.arguments[2]
        for launch, number in zip(plan.launches, (a, b, c, d, 1), strict=True)
    }
    assert plan.scratch == (Buffer((3 * PART,), torch.uint8),)  # b, c and d live together
    assert place[a] in (place[c], place[d]) and len({place[b], place[c], place[d]}) == 3
    x = torch.arange(4.0)
    (found,) = launch_plan.run(plan, (x,))
    second = x + x + 10 + x + 10
    third = second + x + 10
    assert torch.equal(found, third + second + 10 + x + 10)


def test_a_larger_tensor_takes_the_memory_of_several() -> None:
    large = Buffer((3 * PART,), torch.uint8)
    whole = Composition(1, (FLOATS,))
    a, b, c = whole.scratch([FLOATS, FLOATS, large])
    for operands, to in (((0, 0), a), ((a, 0), b), ((b, 0), 1), ((0, 0), c), ((c, 0), 1)):
        whole.add(SUM, operands, (to,))
    assert whole.plan().scratch == (Buffer((3 * PART,), torch.uint8),)


def test_cublas_reads_parts_of_tensors_of_its_dtypes() -> None:
    codes, scale = Buffer((2, 16), torch.float8_e4m3fn), Buffer((1,), torch.float32, fill=1)
    product = CublasProduct(
        TensorPart(0, (2, 16)),
        TensorPart(1, (2, 16)),
        TensorPart(2, ()),
        TensorPart(4, ()),
        None,
        TensorPart(3, (2, 2)),
    )
    multiply = LaunchPlan((Buffer((2, 2), torch.float32),), (scale,), (product,))
    whole = Composition(1, (Buffer((2, 2), torch.float32),))
    zeros, own, own_scale = whole.scratch([FLOATS._replace(fill=0), codes, FLOATS])
    whole.add(SUM, (zeros, None), (own_scale,))
    whole.add(multiply, (own, 0, own_scale), (1,))
    plan = whole.plan()
    parts = Buffer((2 * PART // 4,), torch.float32, fill=0, filled=PART // 4)
    assert plan.scratch == (Buffer((PART,), torch.float8_e4m3fn), parts, scale)
    assert plan.launches[1] == CublasProduct(
        TensorPart(2, (2, 16)),
        TensorPart(0, (2, 16)),
        TensorPart(3, (), PART),
        TensorPart(4, ()),
        None,
        TensorPart(1, (2, 2)),
    )


def test_codes_that_other_kernels_read_lie_beside_those_that_cublas_reads() -> None:
    """So they can share memory."""
    codes = Buffer((2, 16), torch.float8_e4m3fn)
    whole = Composition(1, (FLOATS,))
    first, second, scale = whole.scratch([codes, codes, FLOATS])
    whole.add(SUM, (0, None), (first,))
    whole.add(SUM, (first, None), (scale,))
    whole.add(SUM, (0, None), (second,))
    product = CublasProduct(
        *(TensorPart(second, (2, 16)),) * 2,
        *(TensorPart(scale, ()),) * 2,
        None,
        TensorPart(1, (2, 2)),
    )
    whole.launch((product,), range(5))
    plan = whole.plan()
    assert plan.scratch == (
        Buffer((PART,), torch.float8_e4m3fn),
        Buffer((PART // 4,), torch.float32),
    )


@pytest.mark.parametrize(
    ("buffer", "filled"),
    [
        (Buffer((3,), torch.float32), 0),
        (Buffer((3,), torch.float32, fill=1), 12),
        (Buffer((300,), torch.uint8, fill=0, filled=128), 128),
    ],
)
def test_a_part_of_a_buffer_is_filled(buffer: Buffer, filled: int) -> None:
    assert buffer.filled_bytes == filled
    (made,) = launch_plan.run(LaunchPlan((buffer,), (), ()), (torch.zeros(1),))
    assert made.shape == buffer.shape and made.dtype == buffer.dtype
    part = made.view(torch.uint8)[:filled].view(buffer.dtype)
    assert (part == (buffer.fill or 0)).all()
