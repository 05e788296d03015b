"""Quantization in blocks: the reference against lowbit's Spec, every implementation against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases.operands import offsets_of
from benchmarks.cases.quantize_blocks import CASES, Case
from lowbit import Float8, PerBlock, PerGroup, Spec
from lowbit_kernels.matmul.block_scaled_mm import values
from lowbit_kernels.quantize import quantize_blocks_sm90
from lowbit_kernels.quantize.quantize_blocks import quantize_blocks, reference, results_of
from lowbit_kernels.runtime import nvrtc
from tests.kernels import emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_quantize_rowcol import assert_same, extreme, name_of

SMALL = [case for case in CASES if not case.large]
each_shape = pytest.mark.cover("values", case=lambda c: (c.tiles, c.name.removeprefix("tiles-")))

OP = torch.ops.lowbit.quantize_blocks


def bytes_of(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_codes_and_scales_are_those_of_a_spec(case: Case) -> None:
    """To the bit. Scales of groups have the group first; codes of tiles are padded along one dimension only."""
    x, tiles, rows, columns, power_of_two, _ = case.arguments()
    codes, scale, codes_t, scale_t = OP(x, tiles, rows, columns, power_of_two)
    m, k = x.shape
    if power_of_two or 0 in (m, k):
        return
    spec = Spec(Float8(), PerBlock(128, 128) if tiles else PerGroup(128))
    for wanted, matrix, found, found_scale in (
        (rows, x, codes, scale),
        (columns, x.T, codes_t, scale_t),
    ):
        if not wanted:
            assert found.shape == found_scale.shape == (0, 0)
            continue
        expected, expected_scale, _ = spec.quantize(matrix)
        assert torch.equal(bytes_of(found), bytes_of(expected)[: len(matrix)])
        assert torch.equal(found_scale, expected_scale if tiles else expected_scale.T)
        assert found.is_contiguous() and found_scale.is_contiguous()


@pytest.mark.parametrize("case", [c for c in SMALL if c.m * c.k], ids=name_of)
def test_the_error_is_half_a_step(case: Case) -> None:
    x, tiles, _, _, power_of_two, _ = case.arguments()
    codes, scale, codes_t, scale_t = quantize_blocks(x, tiles=tiles, power_of_two=power_of_two)
    for matrix, found, own in ((x, codes, scale), (x.T, codes_t, scale_t)):
        rounded = values(found, own, torch.float64)
        assert not rounded[:, matrix.shape[1] :].any()
        spread = values(torch.ones(found.shape).to(found.dtype), own, torch.float64)
        exact, spread = matrix.double(), spread[:, : matrix.shape[1]]
        step = torch.exp2((exact / spread).abs().clamp(min=2.0**-6).log2().floor() - 3) * spread
        error = (rounded[:, : matrix.shape[1]] - exact).abs()
        assert (error <= 0.5 * step * (1 + 1e-5)).all()
    if power_of_two:
        mantissas = scale.view(torch.int32) & 0x7FFFFF
        assert not mantissas.any()
        plain = quantize_blocks(x, tiles=tiles)[1]
        assert (plain <= scale).all() and (scale < 2 * plain).all()


@pytest.mark.parametrize("tiles", [False, True])
def test_tiles_are_rounded_once(tiles: bool) -> None:
    x = torch.randn(200, 300)
    codes, scale, codes_t, scale_t = quantize_blocks(x, tiles=tiles)
    same = torch.equal(bytes_of(codes)[:, :300], bytes_of(codes_t)[:, :200].T)
    assert same is tiles
    assert not tiles or torch.equal(scale, scale_t.T)


@pytest.mark.parametrize("tiles", [False, True])
def test_extreme_values(tiles: bool) -> None:
    x = extreme()
    codes, scale, _, scale_t = quantize_blocks(x, tiles=tiles)
    if tiles:
        expected = torch.tensor([[True, False], [False, False]])
        assert torch.equal(scale.isnan(), expected) and torch.equal(scale_t.isnan(), expected)
        assert not codes.float()[:128, :128].any() and codes.float()[128:].any()
        return
    bad = torch.zeros(2, 140, dtype=torch.bool)
    bad[0, [3, 7]] = True
    assert torch.equal(scale.isnan(), bad)
    assert not codes.float()[[3, 7], :128].any() and codes.float()[[3, 7], 128:].any()
    assert scale[0, 11] == scale[0, 22] == 2.0**-126 and not codes[11].float().any()
    rows = [20, 21, 23]
    rounded = values(codes, scale, torch.float64)[rows, :150]
    assert (rounded - x[rows].double()).norm(dim=1).le(0.04 * x[rows].double().norm(dim=1)).all()
    product = values(codes, scale)[3, :128]
    assert product.isnan().all()


@settings(max_examples=40)
@given(st.integers(1, 150), st.integers(1, 150), st.booleans(), st.booleans(), st.data())
def test_codes_t_is_the_codes_of_the_transpose(m, k, tiles, power_of_two, data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(m, k) * 10.0 ** data.draw(st.integers(-20, 20))
    codes, scale, codes_t, scale_t = quantize_blocks(x, tiles=tiles, power_of_two=power_of_two)
    transposed = quantize_blocks(x.T, tiles=tiles, power_of_two=power_of_two)
    assert_same(transposed, (codes_t, scale_t, codes, scale))


def results(arguments: tuple) -> tuple:
    x, tiles, rows, columns, _, offsets = arguments
    return results_of(x.shape, tiles, rows, columns, None if offsets is None else len(offsets))


TOKENS = {
    "ragged": (5, 130, 0, 256, 1),
    "beyond": (0, 17, 40),
    "nobody": (0, 0),
    "one": (300,),
}
STACKS = {"whole": (3, 256, 128), "odd": (2, 131, 257), "two-dimensions": (2, 2, 40, 16)}


def of_tokens(name: str, device: str = "cpu", dtype=torch.float32, power_of_two=False) -> tuple:
    """The arguments for tokens of experts. "beyond" has 20 of none."""
    m = sum(TOKENS[name]) + 20 * (name in ("beyond", "nobody"))
    x = torch.randn(m, 700 if name == "one" else 260, device=device).to(dtype)  # two blocks a band
    return x, False, True, True, power_of_two, offsets_of(TOKENS[name], device)


def of_stack(name: str, device: str = "cpu") -> tuple:
    return torch.randn(STACKS[name], device=device), True, True, True, False, None


def assert_by_expert(found: tuple, arguments: tuple, tokens: tuple[int, ...]) -> None:
    """The codes of each expert's rows alone, at its columns."""
    x, *_, power_of_two, _ = arguments
    codes, scale, codes_t, scale_t = found
    start = place = 0
    for count in tokens:
        own, columns = slice(start, start + count), slice(place, place + -(-count // 128) * 128)
        groups = slice(columns.start // 128, columns.stop // 128)
        alone = reference(x[own], False, True, True, power_of_two, None)
        parts = codes[own], scale[:, own], codes_t[:, columns], scale_t[groups]
        assert_same(tuple(t.contiguous() for t in parts), alone)
        start, place = start + count, columns.stop


def assert_each(found: tuple, arguments: tuple) -> None:
    """The codes of each matrix of a stack."""
    x = arguments[0]
    for i, one in enumerate(x.reshape(-1, *x.shape[-2:])):
        own = tuple(t.view(-1, *t.shape[-2:])[i] for t in found)
        assert_same(own, reference(one, True, True, True, False, None))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("name", TOKENS)
def test_tokens_of_experts(name: str, power_of_two: bool) -> None:
    arguments = of_tokens(name, power_of_two=power_of_two)
    found = OP(*arguments)
    assert found[2].shape[1] % 128 == 0 and found[3].shape[0] == found[2].shape[1] // 128
    assert_by_expert(found, arguments, TOKENS[name])
    torch.library.opcheck(OP.default, arguments)


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_weights(name: str) -> None:
    arguments = of_stack(name)
    assert_each(OP(*arguments), arguments)
    torch.library.opcheck(OP.default, arguments)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TOKENS)
def test_emulated_tokens(name: str, dtype: torch.dtype) -> None:
    arguments = of_tokens(name, dtype=dtype, power_of_two=name == "beyond")
    found = emulator.quantize_blocks(*arguments, results(arguments))
    assert_by_expert(found, arguments, TOKENS[name])


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("name", STACKS)
def test_emulated_stack(name: str) -> None:
    arguments = of_stack(name)
    assert_each(emulator.quantize_blocks(*arguments, results(arguments)), arguments)


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
def test_emulated_stack_of_single_rows() -> None:
    """Such a stack is contiguous, whatever the stride between its rows."""
    x = torch.randn(4, 40, 1).transpose(1, 2)
    assert x.is_contiguous() and x.stride() == (40, 1, 1)
    arguments = x, True, True, True, False, None
    assert_each(emulator.quantize_blocks(*arguments, results(arguments)), arguments)


EMULATED = ("typical", "fp32", "prime-everything", "rows-only", "columns-only", "power-of-two")


@pytest.mark.cover(
    "values", case=lambda c: (c.tiles, c.dtype, (c.rows, c.columns), c.power_of_two, c.m % 2)
)
@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize(
    "case",
    [c for c in SMALL if c.name.removeprefix("tiles-") in (*EMULATED, "misaligned")],
    ids=name_of,
)
def test_emulated_cuda(case: Case) -> None:
    """The CUDA source, compiled by this machine's C++ compiler."""
    arguments = case.arguments()
    out = emulator.quantize_blocks(*arguments, results(arguments))
    assert_same(out, reference(*arguments))


@pytest.mark.skipif(not COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("tiles", [False, True])
def test_emulated_extreme_values(tiles: bool) -> None:
    arguments = extreme(), tiles, True, True, False, None
    out = emulator.quantize_blocks(*arguments, results(arguments))
    assert_same(out, reference(*arguments))


@pytest.mark.parametrize("case", [*SMALL[:4], SMALL[8], SMALL[12], SMALL[17]], ids=name_of)
def test_operator_is_registered_well(case: Case) -> None:
    torch.library.opcheck(OP.default, case.arguments())


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 3, dtype=torch.float64), TypeError, r"got torch\.float64"),
        (torch.ones(2, 3, 4), ValueError, r"\[M, K\], got \(2, 3, 4\); flatten"),
        (torch.ones(3), ValueError, r"got \(3,\)"),
    ],
)
def test_wrong_arguments(x: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_blocks(x, tiles=False)


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_cuda(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert_same(OP(*arguments), reference(*arguments))


@each_shape
@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in SMALL if c.m * c.k], ids=name_of)
def test_cuda_source(case: Case) -> None:
    arguments = case.arguments("cuda")
    if not nvrtc.runs_on_hopper(arguments[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    if not (case.rows or case.columns):
        pytest.skip("the op answers without a launch")
    with emulator.filled_memory():
        out = quantize_blocks_sm90.quantize(*arguments, results(arguments))
    assert_same(out, reference(*arguments))
    for _ in range(2):  # the second call runs the launcher's plan
        assert_same(OP(*arguments), reference(*arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOKENS)
def test_cuda_tokens(name: str) -> None:
    arguments = of_tokens(name, "cuda", torch.bfloat16)
    for _ in range(3):  # the launcher's plan runs later calls
        assert_by_expert(OP(*arguments), arguments, TOKENS[name])


@pytest.mark.gpu
@pytest.mark.parametrize("name", STACKS)
def test_cuda_stack(name: str) -> None:
    arguments = of_stack(name, "cuda")
    for _ in range(3):
        assert_each(OP(*arguments), arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [False, True])
def test_cuda_extreme_values(tiles: bool) -> None:
    x = extreme().cuda()
    x[[20, 22]] = 0  # PyTorch's division on a GPU may round subnormal numbers differently
    assert_same(OP(x, tiles), reference(x, tiles, True, True, False, None))
    assert math.isnan(float(OP(x, tiles)[1].sum()))
