"""grouped_scaled_mm: every implementation against float64, expert by expert."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.cases.grouped_scaled_mm import CASES, Case
from lowbit_kernels.matmul import grouped_columns, grouped_mm_sm90, grouped_mm_triton
from lowbit_kernels.matmul.grouped_scaled_mm import grouped_scaled_mm, reference
from lowbit_kernels.runtime import launches, nvrtc
from tests.kernels import grouped_mm_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.interpreted import interpreted
from tests.kernels.test_scaled_mm import ROUNDING

OP = torch.ops.lowbit.grouped_scaled_mm
INT8 = [case for case in CASES if case.a_dtype == torch.int8]


def is_empty(case: Case) -> bool:
    return 0 in (case.n, case.k) or (sum(case.tokens) + case.beyond == 0 and not case.ragged)


def exact(case: Case, a, b, a_scale, b_scale, offsets, out_dtype) -> np.ndarray:
    """The formulas in float64, by numpy."""
    a, b, a_scale, b_scale = (x.cpu().double().numpy() for x in (a, b, a_scale, b_scale))
    experts, start, place = len(case.tokens), 0, 0
    shape = (experts, case.n, case.k) if case.ragged else (a.shape[0], case.n)
    out = np.zeros(shape)
    for e, count in enumerate(case.tokens):
        columns = b_scale if case.one_scale else b_scale[e]
        if case.ragged:
            own = slice(place, place + count)
            out[e] = a[:, own] @ b[:, own].T * a_scale[e][:, None] * columns
        else:
            own = slice(start, start + count)
            out[own] = a[own] @ b[e].T * a_scale[own][:, None] * columns
        start, place = start + count, place + (count + 127) // 128 * 128
    return out


def assert_close(out: torch.Tensor, case: Case, arguments: tuple, sums: float = 0.0) -> None:
    """In norm, within two roundings to the output dtype and a relative error `sums` of the sums; zeros exactly."""
    expected = torch.from_numpy(exact(case, *arguments))
    assert out.shape == expected.shape and out.dtype == case.out_dtype and out.is_contiguous()
    error = (out.cpu().double() - expected).norm()
    assert error <= (ROUNDING[case.out_dtype] + sums) * expected.norm()
    if case.ragged:
        assert not out[[e for e, count in enumerate(case.tokens) if count == 0]].any()
    else:
        assert not out[sum(case.tokens) :].any()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_reference_is_the_formula(case: Case) -> None:
    arguments = case.arguments()
    assert_close(reference(*arguments), case, arguments)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cpu(case: Case) -> None:
    arguments = case.arguments()
    with launches.counted() as calls:
        out = OP(*arguments)
    name = "int8" if case in INT8 else "float8"
    ran = f"{name} {'empty' if 0 in (*out.shape, arguments[0].shape[1]) else 'torch'}"
    assert calls == {("grouped_scaled_mm", ran): 1}
    assert_close(out, case, arguments, sums=0.0 if case in INT8 else 1e-5)


INTERPRETED = """
import json, torch
from lowbit_kernels.runtime.launches import counted
from tests.kernels.test_grouped_scaled_mm import INT8, OP, reference

torch.manual_seed(0)
results = {}
for case in INT8:
    arguments = case.arguments()
    with counted() as calls:
        out, expected = OP(*arguments), reference(*arguments)
    results[case.name] = torch.equal(out, expected) and out.dtype == expected.dtype
    empty = 0 in (*out.shape, arguments[0].shape[1])
    implementation = "int8 empty" if empty else "int8 triton"
    results[case.name] &= calls == {("grouped_scaled_mm", implementation): 1}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def under_triton() -> dict[str, bool]:
    return interpreted(INTERPRETED)


@pytest.mark.parametrize("case", INT8, ids=lambda c: c.name)
def test_interpreted_kernel(under_triton: dict[str, bool], case: Case) -> None:
    assert under_triton[case.name]


EMULATED = [case for case in INT8 if not is_empty(case) and sum(case.tokens) + case.beyond > 0]


@pytest.mark.cover("values", case=lambda c: (c.ragged, 0 in c.tokens, c.beyond > 0))
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("across", [1, 2])
@pytest.mark.parametrize("case", EMULATED, ids=lambda c: c.name)
def test_emulated(case: Case, across: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks share all tiles, so that each takes several. Stores are as late as the kernel allows."""
    monkeypatch.setattr(grouped_mm_sm90, "beside", lambda *shape: across)
    arguments = case.arguments()
    with grouped_mm_emulator.emulated():
        out = grouped_mm_sm90.grouped_mm(*arguments)
    assert_close(out, case, arguments)


def test_clusters_fill_few_rows_and_columns() -> None:
    beside = grouped_mm_sm90.beside
    assert beside(131072, 128, 1536, False) == 2, "an expert has 1,024 rows"
    assert beside(131072, 128, 768, False) == 1, "768 columns are three tiles"
    assert beside(32768, 8, 14336, False) == 1
    assert beside(32768, 8, 14336, False, blocks=True) == 2, "faster where neither fills anything"
    assert beside(1536, 128, 2048, True) == 1


OPCHECKED = [case for case in CASES if case.name.endswith(("typical", "no-tokens"))]


def opcheck(case: Case, device: str = "cpu") -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if case in INT8:  # the check of mutations multiplies, which float8 cannot
        checks.append("test_schema")
    torch.library.opcheck(OP.default, case.arguments(device), test_utils=checks)


@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    opcheck(case)


def test_offsets_that_fall_or_exceed_the_rows_stay_inside() -> None:
    a, b, a_scale, b_scale, _, dtype = INT8[0].arguments()
    offsets = torch.tensor([9, 4, 1000, 7], dtype=torch.int32)
    counts = grouped_columns.counts(offsets, len(a))
    assert counts.tolist() == [9, 0, len(a) - 9, 0]
    assert torch.equal(
        OP(a, b, a_scale, b_scale, offsets, dtype),
        OP(a, b, a_scale, b_scale, counts.cumsum(0).int(), dtype),
    )


ARGUMENTS = INT8[0].arguments()
REFUSED = {
    "b as [E, K, N]": ({1: ARGUMENTS[1].mT}, ValueError, "pass b transposed"),
    "K": ({0: ARGUMENTS[0][:, :40], 1: ARGUMENTS[1][..., :40]}, ValueError, "multiple of 16"),
    "offsets int64": ({4: ARGUMENTS[4].long()}, TypeError, "torch.int32"),
    "offsets of other experts": ({4: ARGUMENTS[4][1:]}, ValueError, r"shape \(4,\)"),
    "scale dtype": (
        {2: ARGUMENTS[2].half()},
        TypeError,
        "a_scale of torch.float32, got torch.float16",
    ),
    "scale shape": ({3: ARGUMENTS[3][0]}, ValueError, r"b_scale must .* \(4, 48\) or \(1,\)"),
    "dtypes": ({0: ARGUMENTS[0].short()}, TypeError, "takes a of .*, got torch.int16"),
    "pair": (
        {0: ARGUMENTS[0].to(torch.float8_e4m3fn)},
        TypeError,
        "both operands must be torch.int8",
    ),
    "out": ({5: torch.float64}, TypeError, "out_dtype of .*, got torch.float64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    changes, error, message = REFUSED[name]
    *tensors, dtype = (changes.get(i, part) for i, part in enumerate(ARGUMENTS))
    with pytest.raises(error, match=message):
        grouped_scaled_mm(*tensors, out_dtype=dtype)


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.cover("values")
@pytest.mark.gpu
@pytest.mark.parametrize("across", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case, across: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm_sm90, "beside", lambda *shape: across)
    arguments = case.arguments("cuda")
    sums = 0.0 if case in INT8 else 2.0**-9
    assert_close(OP(*arguments), case, arguments, sums)
    # The launcher may have learnt the plan of the other `across`.
    if not is_empty(case) and nvrtc.runs_on_hopper(arguments[0].device):
        assert_close(grouped_mm_sm90.grouped_mm(*arguments), case, arguments, sums)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_triton_on_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    a, b, *_ = arguments
    if is_empty(case) or not grouped_mm_triton.takes(a.dtype, b.dtype, a.device):
        pytest.skip("the op does not run this kernel")
    found = grouped_mm_triton.grouped_mm(*arguments)
    assert_close(found, case, arguments, 0.0 if case in INT8 else 2.0**-9)


@pytest.mark.gpu
def test_offsets_may_change_between_replays_of_a_graph() -> None:
    case = next(c for c in INT8 if c.name == "int8-wide")
    *arguments, offsets, dtype = case.arguments("cuda")
    OP(*arguments, offsets, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OP(*arguments, offsets, dtype)
    for ends in ((202, 202, 202), (0, 1, 150), (64, 128, 202)):
        offsets.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, reference(*arguments, offsets, dtype))
