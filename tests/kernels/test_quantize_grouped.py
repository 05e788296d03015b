"""quantize_grouped and quantize_experts: as quantize_rowcol for each expert, on every implementation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.quantize_grouped import CASES, Case
from lowbit_kernels.matmul import grouped_columns
from lowbit_kernels.quantize import quantize_experts as experts_module
from lowbit_kernels.quantize import quantize_grouped as module
from lowbit_kernels.quantize import quantize_grouped_sm90
from lowbit_kernels.quantize.quantize_experts import quantize_experts
from lowbit_kernels.quantize.quantize_grouped import quantize_grouped, reference
from lowbit_kernels.quantize.quantize_rowcol import quantize_rowcol
from lowbit_kernels.runtime import launches
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER

OP = torch.ops.lowbit.quantize_grouped


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8) if t.element_size() == 1 else t


def assert_same(found: tuple, expected: tuple, case: Case) -> None:
    """In all elements that an expert has, and in the zeros that follow an expert's columns."""
    tokens = sum(case.tokens)
    for name, own, other in zip(("codes", "scale"), found[:2], expected[:2], strict=True):
        assert own.shape == other.shape, name
        assert torch.equal(bits(own[:tokens]), bits(other[:tokens])), name
    used = sum((count + 127) // 128 * 128 for count in case.tokens)
    assert found[2].shape == expected[2].shape
    used = min(used, found[2].shape[1] if case.columns else 0)
    assert torch.equal(bits(found[2])[:, :used], bits(expected[2])[:, :used]), "codes_t"
    assert found[3].shape == expected[3].shape and torch.equal(found[3], expected[3]), "scale_t"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_each_expert_is_quantized_by_rowcol(case: Case) -> None:
    """Stochastic rounding aside, whose random numbers belong to the whole matrix."""
    x, offsets, format, rows, columns, _, factor = case.arguments()
    with launches.counted() as calls:
        codes, scale, codes_t, scale_t = OP(x, offsets, format, rows, columns, None, factor)
    assert calls == {("quantize_grouped", "torch"): 1}
    start = place = 0
    for e, count in enumerate(case.tokens):
        own = x[start : start + count].float()
        if rows:
            factored = own if factor is None else own * factor[e]
            expected = quantize_rowcol(factored, format, columns=False)
            assert torch.equal(bits(codes[start : start + count]), bits(expected[0]))
            assert torch.equal(scale[start : start + count], expected[1])
        if columns:
            _, _, expected_t, own_scale = quantize_rowcol(own, format, rows=False)
            here = bits(codes_t)[:, place : place + (count + 127) // 128 * 128]
            assert torch.equal(here[:, :count], bits(expected_t)[:, :count])
            assert not here[:, count:].any() and torch.equal(scale_t[e], own_scale)
        start, place = start + count, place + (count + 127) // 128 * 128


@pytest.mark.cover(
    "values",
    case=lambda c: (c.format, c.dtype, (c.rows, c.columns), c.seed is None, c.factor, c.beyond > 0),
)
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("lag", [1, 640])
@pytest.mark.parametrize(
    "case", [c for c in CASES if sum(c.tokens) + c.beyond], ids=lambda c: c.name
)
def test_emulated(case: Case, lag: int) -> None:
    arguments = case.arguments()
    (m, k), format, rows, columns = arguments[0].shape, *arguments[2:5]
    results = module.results_of(m, k, len(case.tokens), format, rows, columns)
    with emulator.grouped_quantization(lag):
        out = quantize_grouped_sm90.tokens(*arguments, results)
    assert_same(tuple(out), reference(*arguments), case)


def test_stochastic_rounding_has_the_right_mean_and_both_copies_agree() -> None:
    x = torch.full((4096, 16), 0.3)
    x[::2, 0] = x[1::2, 1] = 1.0
    offsets = torch.tensor([1000, 4096], dtype=torch.int32)
    codes, scale, codes_t, _ = quantize_grouped(x, offsets, "int8", seed=torch.tensor([5]))
    assert abs((codes * scale[:, None])[:, 2:].mean() - 0.3) < 1e-4
    assert torch.equal(codes[:1000, 0], codes_t[0, :1000])
    assert torch.equal(codes[1000:, 0], codes_t[0, 1024 : 1024 + 3096])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_spoil_their_row_and_column_only(value: float) -> None:
    x = torch.randn(40, 32)
    x[7, 3] = value
    offsets = torch.tensor([5, 20, 40], dtype=torch.int32)
    codes, scale, codes_t, scale_t = quantize_grouped(x, offsets, "int8")
    assert scale.isnan().nonzero().tolist() == [[7]] and not codes[7].any()
    assert scale_t.isnan().nonzero().tolist() == [[1, 3]] and not codes_t[3, 128:143].any()
    if COMPILER:
        results = module.results_of(40, 32, 3, "int8", True, True)
        with emulator.grouped_quantization(1):
            out = quantize_grouped_sm90.tokens(x, offsets, "int8", True, True, None, None, results)
        assert torch.equal(out[0], codes) and torch.equal(out[2][:, :384], codes_t[:, :384])
        assert torch.equal(out[1].isnan(), scale.isnan())


OPCHECKED = [c for c in CASES if c.name.startswith("int8") or c.name == "factor-typical"]


@pytest.mark.parametrize("case", OPCHECKED, ids=lambda c: c.name)
def test_operator_is_registered_well(case: Case) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, case.arguments(), test_utils=checks)


def test_refusals() -> None:
    x, offsets = torch.randn(4, 16), torch.tensor([2, 4], dtype=torch.int32)
    for arguments, options, error, message in (
        ((x.double(), offsets, "int8"), {}, TypeError, "takes x of"),
        ((x[0], offsets, "int8"), {}, ValueError, r"x \[M, K\], got \(16,\)"),
        ((x, offsets.long(), "int8"), {}, TypeError, "offsets of torch.int32"),
        ((x, offsets, "int4"), {}, ValueError, "format must be one of"),
        ((x, offsets, "int8"), {"row_factor": x[0]}, ValueError, r"\[E, K\], here \(2, 16\)"),
        ((x, offsets, "int8"), {"seed": torch.zeros(2).long()}, ValueError, r"seed \[\] or \[1\]"),
        ((x, offsets.to("meta"), "int8"), {}, ValueError, "on one device"),
    ):
        with pytest.raises(error, match=message):
            quantize_grouped(*arguments, **options)
    with pytest.raises(ValueError, match=r"weight \[E, N, K\]"):
        quantize_experts(x, "int8")
    with pytest.raises(TypeError, match="takes weight of"):
        quantize_experts(x.double()[None], "int8")


# ---- weights -----------------------------------------------------------------------------------------------------

WEIGHTS = [(3, 40, 33), (2, 130, 272), (1, 16, 128), (2, 0, 16), (0, 8, 16)]


@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize("shape", WEIGHTS, ids=str)
def test_codes_of_weights_are_those_of_rows(shape: tuple, format: str) -> None:
    weight = torch.randn(shape, dtype=torch.bfloat16)
    experts, n, k = shape
    codes, scale, _, _ = quantize_rowcol(weight.reshape(-1, k), format, columns=False)
    along, own_scale = quantize_experts(weight, format)
    assert torch.equal(bits(along).view(-1, codes.shape[1]), bits(codes))
    assert torch.equal(own_scale.reshape(-1), scale)
    expected = bits(codes).view(experts, n, codes.shape[1])[..., :k].mT
    for given in (None, own_scale):
        found, own = quantize_experts(weight, format, transposed=True, scale=given)
        assert found.shape == (experts, k, n + -n % 16) and found.is_contiguous()
        assert torch.equal(bits(found)[..., :n], expected) and not bits(found)[..., n:].any()
        assert torch.equal(own, own_scale)
        arguments = (weight, format, True, given)
        checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        op = torch.ops.lowbit.quantize_experts.default
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.cover("values", shape=lambda shape: min(shape[0], 2))
@pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize("shape", [w for w in WEIGHTS if 0 not in w], ids=str)
def test_emulated_weights(shape: tuple, format: str) -> None:
    weight = torch.randn(shape, dtype=torch.bfloat16)
    weight[0, 0, 0], weight[-1, -1] = float("nan"), 0.0
    with emulator.grouped_quantization(1):
        results = experts_module.results_of(*shape, format, False)
        codes, scale = quantize_grouped_sm90.weights(weight, format, results)
        expected = experts_module.reference(weight, format)
        assert torch.equal(codes.float(), expected[0].float())  # a row with NaN may have codes -0
        assert torch.equal(scale.nan_to_num(-1), expected[1].nan_to_num(-1))
        expected = experts_module.reference(weight, format, transposed=True)
        for is_given in (False, True):
            results = experts_module.results_of(*shape, format, True)
            given = scale if is_given else None
            codes, own = quantize_grouped_sm90.weights_t(weight, format, given, results)
            assert torch.equal(codes.float(), expected[0].float())
            assert torch.equal(own.nan_to_num(-1), expected[1].nan_to_num(-1))


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert_same(OP(*arguments), reference(*arguments), case)


@pytest.mark.gpu
def test_cuda_with_many_experts() -> None:
    """More tiles than run at a time, so that blocks wait for each other."""
    tokens = torch.randint(0, 600, (64,), generator=torch.Generator().manual_seed(1))
    case = Case("many", tuple(tokens.tolist()), 1536, factor=True)
    arguments = case.arguments("cuda")
    for _ in range(3):
        assert_same(OP(*arguments), reference(*arguments), case)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_weights_on_cuda(format: str) -> None:
    for shape in (*WEIGHTS, (20, 1000, 1536)):
        weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        scale = quantize_experts(weight, format)[1]
        for options in ((False, None), (True, None), (True, scale)):
            found = torch.ops.lowbit.quantize_experts(weight, format, *options)
            expected = experts_module.reference(weight, format, *options)
            for own, other in zip(found, expected, strict=True):
                assert torch.equal(bits(own), bits(other)), (shape, options)


def test_columns_have_room_however_the_tokens_fall() -> None:
    for tokens in ((1, 1, 1, 1), (0, 0, 513), (128, 256, 0), (129, 1, 127, 0)):
        counts = torch.tensor(tokens)
        starts = grouped_columns.starts(counts)
        width = grouped_columns.width(sum(tokens), len(tokens))
        assert (starts % 128 == 0).all() and width % 16 == 0
        assert (starts + (counts + 127) // 128 * 128).max() <= width
