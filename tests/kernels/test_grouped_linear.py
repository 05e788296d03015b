"""grouped_linear at 4 and 8 bits: the loop and the kernel against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.grouped_linear import CASES, Case
from lowbit_kernels.composed import grouped_linear
from lowbit_kernels.composed.grouped_linear import reference
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only.codes_format import dequantized
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
ROUNDING = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


op = torch.ops.lowbit.grouped_linear


def off(out: torch.Tensor, arguments: tuple) -> float:
    """The relative error, in norms, divided by its bound."""
    expected = reference(*arguments)
    assert out.shape == expected.shape and out.dtype == expected.dtype and out.is_contiguous()
    norm, difference = expected.double().norm(), (out.double() - expected.double()).norm()
    end = int(arguments[4][-1])
    assert not out[end:].any()
    return (difference / (ROUNDING[out.dtype] * norm)).item() if norm else float(out.any())


def one_by_one(
    x, codes, scale, zero_point, offsets, group_size, global_scale=None, bits=0, table=()
) -> torch.Tensor:
    """Each token times its expert's dequantized weight."""
    if bits or table or codes.dtype not in (torch.uint8, torch.int8):
        return by_format(
            *(x, codes, scale, zero_point, offsets, group_size, global_scale, bits, table)
        )
    out = torch.zeros(len(x), codes.shape[1], dtype=torch.float64)
    for m in range(len(x)):
        e = int((offsets <= m).sum())
        if e < len(offsets):
            weight = codes[e]
            if weight.dtype == torch.uint8:
                weight = torch.stack([weight & 15, weight >> 4], -1).flatten(1).to(torch.int8) - 8
            zero = 0 if zero_point is None else zero_point[e].repeat_interleave(group_size, 1)
            weight = weight[:, : scale.shape[2] * group_size].double() - zero
            weight = weight * scale[e].double().repeat_interleave(group_size, 1)
            out[m] = weight[:, : x.shape[1]] @ x[m].double()
    return out.to(x.dtype)


def by_format(
    x, codes, scale, zero_point, offsets, group_size, global_scale, bits, table
) -> torch.Tensor:
    out = torch.zeros(len(x), codes.shape[1], dtype=torch.float64)
    for m in range(len(x)):
        e = int((offsets <= m).sum())
        if e < len(offsets):
            zero = None if zero_point is None else zero_point[e]
            parts = codes[e], scale[e], zero, group_size, x.shape[1], torch.float64
            out[m] = dequantized(*parts, global_scale, bits, table) @ x[m].double()
    return out.to(x.dtype)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_reference_and_cpu(case: Case) -> None:
    arguments = case.arguments()
    torch.testing.assert_close(reference(*arguments), one_by_one(*arguments))
    with launches.counted() as calls:
        assert off(op(*arguments), arguments) <= 1
    found = {implementation: n for (name, implementation), n in calls.items() if "group" in name}
    is_empty = 0 in (sum(case.tokens) + case.beyond, case.n, case.k)
    assert found == {"empty" if is_empty else "loop": 1}


@settings(max_examples=25)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 3))
def test_any_distribution_of_tokens(tokens: list[int], beyond: int) -> None:
    arguments = Case("", tuple(tokens), 8, 64, 32, beyond=beyond).arguments()
    out = op(*arguments)
    assert off(out, arguments) <= 1


INTERPRETED = """
import json, random, torch
from benchmarks.cases.grouped_linear import CASES, Case
from lowbit_kernels.runtime import launches
from lowbit_kernels.weight_only.codes_format import dequantized
from tests.kernels.test_grouped_linear import off, op

torch.manual_seed(0)
random.seed(0)
results = {}
for case in CASES:
    if not case.large:
        arguments = case.arguments()
        with launches.counted() as calls:
            more = off(op(*arguments), arguments)
        results[case.name] = more, calls["grouped_linear", "triton"]
worst = 0
for _ in range(10):
    tokens = tuple(random.choice([0, 1, 15, 16, 17, 40]) for _ in range(random.randint(1, 7)))
    arguments = Case("", tokens, 8, 64, 32, beyond=random.randint(0, 2)).arguments()
    worst = max(worst, off(op(*arguments), arguments))
results["random"] = worst, 1
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, tuple]:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("name", [*(c.name for c in SMALL), "random"])
def test_interpreted_kernel(under_triton: dict[str, tuple], name: str) -> None:
    more, launched = under_triton[name]
    loops = "odd-group", "no-tokens", "nvfp4", "nf4", "int3"
    assert more <= 1 and launched == (not name.endswith(loops))


@pytest.mark.parametrize("case", [SMALL[1], SMALL[3], SMALL[9]], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(op.default, case.arguments())


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"offsets": torch.tensor([1, 2])}, TypeError, r"int32, got torch\.int64"),
        ({"offsets": torch.zeros(3, dtype=torch.int32)}, ValueError, r"\(2,\), got \(3,\)"),
        ({"offsets": torch.zeros(2, dtype=torch.int32).to("meta")}, ValueError, "offsets on meta"),
        ({"scale": torch.ones(2, 3, 2, device="meta")}, ValueError, "x on cpu.* scale on meta"),
        ({"x": torch.zeros(1, 2, 64)}, ValueError, r"x \[M, K\].* got \(1, 2, 64\)"),
        ({"scale": torch.ones(1, 3, 2)}, ValueError, r"here \(2, 3, 2\), got \(1, 3, 2\)"),
        ({"group_size": 16}, ValueError, r"codes of shape \(2, 3, 16\), got \(2, 3, 32\)"),
        (
            {"zero_point": torch.zeros(2, 3, 1, dtype=torch.int8)},
            ValueError,
            r"zero_point .*here \(2, 3, 2\), got",
        ),
    ],
)
def test_wrong_arguments(change: dict, raised: type[Exception], message: str) -> None:
    arguments = {
        "x": torch.zeros(4, 64),
        "codes": torch.zeros(2, 3, 32, dtype=torch.uint8),
        "scale": torch.ones(2, 3, 2),
        "zero_point": None,
        "offsets": torch.tensor([1, 4], dtype=torch.int32),
        "group_size": 32,
    }
    assert grouped_linear.grouped_linear(**arguments).shape == (4, 3)
    with pytest.raises(raised, match=message):
        grouped_linear.grouped_linear(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert off(op(*arguments), arguments) <= 1


@pytest.mark.gpu
def test_cuda_offsets_change_between_replays() -> None:
    arguments = Case("", (20, 30, 50), 65, 256, 64).arguments("cuda")
    op(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*arguments)
    for ends in ((20, 50, 100), (0, 0, 100), (99, 99, 99), (1, 2, 3)):
        arguments[4].copy_(torch.tensor(ends))
        graph.replay()
        assert off(out, arguments) <= 1
