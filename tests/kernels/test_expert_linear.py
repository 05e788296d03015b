"""expert_linear: the loop, the emulated decode kernel and the Triton kernels against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.cases.expert_linear import CASES, Case
from benchmarks.cases.formats import FORMATS
from lowbit_kernels.composed import expert_linear
from lowbit_kernels.composed.expert_linear import reference
from lowbit_kernels.runtime import launch_plan, launches
from lowbit_kernels.weight_only import weight_mm_experts_large_sm90, weight_mm_experts_sm90
from lowbit_kernels.weight_only.codes_format import dequantized
from tests.kernels.experts_emulator import emulated, emulated_large
from tests.kernels.interpreted import interpreted, names

SMALL = [case for case in CASES if not case.large]
ROUNDING = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8.9, torch.float16: 2.0**-10}
EMULATED = [
    *(
        "typical",
        "zero-bias",
        "groups-of-32",
        "groups-of-64",
        "per-row",
        "odd-k",
        "one-expert",
        "int8",
    ),
    *("int8-groups", "int8-many", "float8", "mxfp4", "mxfp4-half", "nothing-but-beyond"),
    *("nf4", "int3", "unsigned", "int2", "int6", "table3"),
]
NO_TRITON = {"nf4", "int3", "nvfp4", "odd-group", "no-tokens"}
NO_TRITON |= {"unsigned", "int2", "int6", "table3"}
cases = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def axes_of(name: str) -> tuple[object, ...]:
    """What the kernels distinguish of a case."""
    (case,) = [c for c in CASES if c.name == name]
    (format,) = [f for f in FORMATS if f.name == case.format]
    flags = (case.gated, case.bias, case.per_pair, case.beyond, case.same is None)
    return *format.axes, case.group_size, case.dtype, *flags, case.k % 2


op = torch.ops.lowbit.expert_linear


def exact(x, codes, scale, zero, ids, bias, group, gated, global_scale, bits, table):
    """Each pair times its expert's dequantized weight, in float64."""
    top = len(ids) // max(len(x), 1)
    out = torch.zeros(len(ids), codes.shape[1], dtype=torch.float64)
    for p, e in enumerate(ids.tolist()):
        if 0 <= e < len(codes):
            zeros = None if zero is None else zero[e]
            parts = (codes[e], scale[e], zeros, group, x.shape[1], torch.float64, global_scale)
            out[p] = dequantized(*parts, bits, table) @ x[p // top].double()
            if bias is not None:
                out[p] += bias[e].double()
    if not gated:
        return out
    gate, up = out.chunk(2, 1)
    return F.silu(gate) * up


def off(out: torch.Tensor, arguments: tuple, expected: torch.Tensor | None = None) -> float:
    """The relative error, in norms, divided by its bound."""
    expected = reference(*arguments) if expected is None else expected
    assert out.shape == expected.shape and out.dtype == arguments[0].dtype and out.is_contiguous()
    norm = expected.double().norm()
    difference = (out.double() - expected.double().to(out.device)).norm()
    return (difference / (ROUNDING[out.dtype] * norm)).item() if norm else float(out.any())


def fitting(case: Case) -> float:
    """How far beyond the bound the loop may be, which rounds before silu."""
    return 2.0 if case.gated else 1.0


def test_without_columns_biases_are_left() -> None:
    bias, ids = torch.randn(2, 3), torch.tensor([1, 5, 0, 1])
    codes, scale = torch.empty(2, 3, 0, dtype=torch.int8), torch.empty(2, 3, 0)
    out = op(torch.empty(2, 0), codes, scale, None, ids, bias, 32)
    assert torch.equal(out, torch.stack([bias[1], torch.zeros(3), bias[0], bias[1]]))


@cases
def test_reference_and_cpu(case: Case) -> None:
    torch.manual_seed(0)
    arguments = case.arguments()
    expected = exact(*arguments)
    assert off(reference(*arguments), arguments, expected) <= 1
    with launches.counted() as calls:
        out = op(*arguments)
    assert off(out, arguments, expected) <= fitting(case)
    found = {how: n for (name, how), n in calls.items() if name == "expert_linear"}
    assert found == {"empty" if case.tokens == 0 else "loop": 1}


@pytest.mark.cover("values", name=axes_of)
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_decode_kernel(name: str) -> None:
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == name]
    x, codes, scale, zero, ids, bias, group, gated, _, bits, table = case.arguments()
    operands = operands_of(x, codes, scale, zero, ids, bias, group, gated, bits, table)
    assert weight_mm_experts_sm90.takes(operands)
    with emulated():
        product = weight_mm_experts_sm90.ExpertProduct(operands)
        out = product((x, codes, scale, zero, bias, ids, None))
        plan = expert_linear.ExpertLinearPlan("decode", product, product.shape).launches
        (planned,) = launch_plan.run(plan, (x, codes, scale, zero, ids, bias, None))
    assert torch.equal(planned, out)
    assert (
        off(
            out,
            case.arguments(),
            exact(*(x, codes, scale, zero, ids, bias, group), gated, None, bits, table),
        )
        <= 1
    )


EMULATED_LARGE = {
    **dict.fromkeys(["typical", "zero-bias", "groups-of-64", "one-expert", "int8", "int8-many"]),
    **dict.fromkeys(["float8", "mxfp4", "mxfp8", "nf4", "int3", "nvfp4", "nothing-but-beyond"]),
    "groups-of-32": (64, 256, 2, 2, 1, False, 128),
    "int8-groups": (32, 128, 2, 1, 1, False, 128),
    "per-row": (160, 128, 2, 2, 1, False, 128),
    "mxfp4-up": (128, 128, 2, 2, 1, True, 64),
    "many": (32, 128, 2, 2, 1, False, 128),
    "many-down": (64, 256, 2, 1, 1, False, 128),
}
"""Cases, and a division other than the chosen one."""


@pytest.mark.cover("values", name=lambda name: (*axes_of(name), *(EMULATED_LARGE[name] or ())))
@pytest.mark.parametrize("name", EMULATED_LARGE)
def test_emulated_large_kernel(name: str) -> None:
    torch.manual_seed(0)
    (case,) = [c for c in CASES if c.name == name]
    arguments = case.arguments()
    x, codes, scale, zero, ids, bias, group, gated, global_scale, bits, table = arguments
    operands = operands_of(
        x, codes, scale, zero, ids, bias, group, gated, bits, table, global_scale
    )
    assert weight_mm_experts_large_sm90.takes(operands)
    with emulated_large():
        product = weight_mm_experts_large_sm90.LargeExpertProduct(operands, 3)
        if chosen := EMULATED_LARGE[name]:
            own = product.macros[1]
            division = weight_mm_experts_large_sm90.with_stages(chosen, own, case.experts)
            product = weight_mm_experts_large_sm90.LargeExpertProduct(operands, 3, division)
        out = product((x, codes, scale, zero, bias, ids, global_scale))
        plan = expert_linear.ExpertLinearPlan("large", product, product.shape).launches
        (planned,) = launch_plan.run(plan, (x, codes, scale, zero, ids, bias, global_scale))
    assert torch.equal(planned, out) and len(plan.scratch) == 1
    assert off(out, arguments, exact(*arguments)) <= 1.1


def operands_of(x, codes, scale, zero, ids, bias, group, gated, bits, table, global_scale=None):
    from lowbit_kernels.weight_only.codes_format import format_of
    from lowbit_kernels.weight_only.expert_operands import ExpertOperands
    from lowbit_kernels.weight_only.weight_operands import layout

    format = format_of(codes.dtype, scale.dtype, None if zero is None else zero.dtype, bits, table)
    layouts = map(layout, (x, codes, scale, zero, bias))
    return ExpertOperands(*layouts, len(ids), group, gated, format, layout(global_scale))


def test_more_tiles_than_a_grid_holds_are_declined() -> None:
    pytest.importorskip("triton")
    from lowbit_kernels.weight_only.weight_mm_experts_triton import takes

    x, codes, scale = (
        torch.randn(4, 64),
        torch.zeros(2, 3, 32, dtype=torch.uint8),
        torch.ones(2, 3, 2),
    )
    ids = torch.zeros(8, dtype=torch.int64)
    operands = operands_of(x, codes, scale, None, ids, None, 32, False, 0, ())
    assert takes(operands) and takes(operands._replace(pairs=2**22 - 2**8))
    assert not takes(operands._replace(pairs=2**22))


INTERPRETED = """
import json, torch
from benchmarks.cases.expert_linear import CASES
from lowbit_kernels.runtime import launches
from tests.kernels.test_expert_linear import exact, off, op

results = {}
for case in CASES:
    if case.name in NAMES:
        torch.manual_seed(0)
        arguments = case.arguments()
        with launches.counted() as calls:
            more = off(op(*arguments), arguments, exact(*arguments))
        results[case.name] = more, calls["expert_linear", "triton"]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton(request: pytest.FixtureRequest) -> dict[str, tuple]:
    return interpreted(f"NAMES = {names(request)}" + INTERPRETED)


@cases
def test_interpreted_kernel(under_triton: dict[str, tuple], case: Case) -> None:
    more, launched = under_triton[case.name]
    assert more <= fitting(case) and launched == (case.name not in NO_TRITON)


@pytest.mark.parametrize("nan", ["x", "scale"])
def test_nan_passes(nan: str) -> None:
    x, codes, scale, *rest = CASES[0].arguments()
    (x[0] if nan == "x" else scale[rest[1][0]]).view(-1)[3] = torch.nan
    with emulated():
        operands = operands_of(x, codes, scale, *rest[:5], *rest[6:])
        out = weight_mm_experts_sm90.ExpertProduct(operands)(
            (x, codes, scale, rest[0], None, rest[1], None)
        )
    assert torch.equal(out.isnan(), op(x, codes, scale, *rest).isnan()) and out[0].isnan().any()


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(op.default, case.arguments())


@pytest.mark.parametrize(
    ("change", "raised", "message"),
    [
        ({"ids": torch.zeros(4, dtype=torch.int32)}, TypeError, r"int64, got torch\.int32"),
        (
            {"ids": torch.zeros(5, dtype=torch.int64)},
            ValueError,
            "5 ids are not a multiple of the 2 rows of x",
        ),
        ({"ids": torch.zeros(4, dtype=torch.int64).to("meta")}, ValueError, "ids on meta"),
        ({"scale": torch.ones(1, 3, 2)}, ValueError, r"got \(1, 3, 2\)"),
        ({"group_size": 16}, ValueError, r"codes of shape \(2, 3, 16\), got \(2, 3, 32\)"),
        ({"gated": True}, ValueError, "even N, got 3"),
        ({"bias": torch.zeros(2, 3).half()}, TypeError, r"bias must be of x's dtype"),
    ],
)
def test_wrong_arguments(change: dict, raised: type[Exception], message: str) -> None:
    arguments = {
        "x": torch.zeros(2, 64),
        "codes": torch.zeros(2, 3, 32, dtype=torch.uint8),
        "scale": torch.ones(2, 3, 2),
        "zero_point": None,
        "ids": torch.tensor([0, 1, 1, 0]),
        "group_size": 32,
    }
    assert expert_linear.expert_linear(**arguments).shape == (4, 3)
    with pytest.raises(raised, match=message):
        expert_linear.expert_linear(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["decode", "large", "triton"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case, how: str) -> None:
    arguments = case.arguments("cuda")
    x, codes, scale, zero, ids, bias, group, gated, global_scale, bits, table = arguments
    bound = 1.0
    try:
        out = expert_linear.run(*arguments, implementation=how)
    except ValueError as error:
        assert "does not take" in str(error)
        out, bound = op(*arguments), 2.0  # the loop may round the weight
    if case.tokens < 100:
        assert off(out, arguments) <= bound
    else:  # some of the tokens
        some = torch.arange(0, len(ids), 997, device="cuda")
        rows = x[some // case.top]
        few = (rows, codes, scale, zero, ids[some], bias, group, gated, global_scale, bits, table)
        assert off(out[some].contiguous(), few) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_cuda_ids_change_between_replays(tokens: int) -> None:
    arguments = Case("", 8, 128, 256, tokens, 2).arguments("cuda")
    op(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*arguments)
    for seed in range(3):
        torch.manual_seed(seed)
        arguments[4].copy_(torch.randint(-1, 9, arguments[4].shape))
        graph.replay()
        assert off(out, arguments) <= 1
