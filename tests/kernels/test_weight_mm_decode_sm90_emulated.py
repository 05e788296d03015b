"""The decode kernel on a CPU: ``decode_emulator`` runs its source."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit_kernels.weight_only.weight_mm_decode_sm90 import DecodeProduct, planned
from tests.kernels import decode_emulator
from tests.kernels.compiled_on_cpu import COMPILER
from tests.kernels.test_weight_mm_decode_sm90_gpu import (
    BOUND,
    exact,
    float8_operands,
    operands,
    operands_of,
    run_planned,
    tensors_of,
)

pytestmark = pytest.mark.skipif(not COMPILER, reason="no g++")


def run(case: dict, blocks: int = 2, split: int = 1, height: int = 1, **changed: int) -> Tensor:
    chosen = planned(operands_of(case), blocks, splits=(split,), heights=(height,))
    assert chosen is not None and chosen.split == split
    chosen = replace(chosen, **changed)
    with decode_emulator.emulated():
        return run_planned(case, chosen)


def check(case: dict, **divided: int) -> None:
    out, expected = run(case, **divided), exact(**case)
    assert (out.double() - expected).norm() <= BOUND[out.dtype] * expected.norm()


def test_blocks_after_attention_have_a_multiprocessor_alone() -> None:
    """A product with a residual follows attention; without one there is room for a block of the next launch."""
    own = operands_of(operands(1, 4096, 4096, extras=True, device="cpu"))
    alone, beside = (planned(o, 132) for o in (own, own._replace(residual=None)))
    assert alone is not None and beside is not None and alone.resident == beside.resident == 2
    assert 2 * (beside.shared + 1024) <= 228 * 1024 < 2 * (alone.shared + 1024)


@pytest.mark.parametrize("m", [1, 2, 4, 7])
def test_tokens_whose_x_shares_registers_and_k_in_parts(m: int) -> None:
    """One and a half chunks a warp and part, more tiles than stages, and a k that ends within a chunk."""
    check(operands(m, 60, 2 * 3072 + 32, 4, 32, device="cpu"), blocks=1)


@pytest.mark.parametrize("m", [2, 3])
def test_x_of_several_tokens_in_many_parts(m: int) -> None:
    check(operands(m, 40, 9216 + 128, device="cpu"), blocks=1)


@pytest.mark.parametrize("constant", [0, 1])
@pytest.mark.parametrize(("early", "n", "k"), [(1, 16 * 5, 1440), (2, 16 * 5, 2560), (6, 40, 6144)])
def test_parts_of_a_constant_weight_before_the_wait(
    early: int, n: int, k: int, constant: int
) -> None:
    """One, all stages, and more than the block has; x by loads of the lanes and by a copy."""
    case = operands(1, n, k, device="cpu", zero=True)
    expected = run(case)
    for loads_x in (False, True):
        chosen = planned(operands_of(case), 2, splits=(1,), heights=(1,))
        assert chosen is not None and chosen.teams == chosen.resident == 1
        product = DecodeProduct(operands_of(case), replace(chosen, loads_x=loads_x, early=early))
        product.sizes = (*product.sizes[:-1], constant)
        with decode_emulator.emulated():
            assert torch.equal(product(tensors_of(case)), expected), loads_x


@pytest.mark.cover("values")
@pytest.mark.parametrize("group", [64, 96, 128, 0])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups(bits: int, group: int) -> None:
    dtype = torch.float16 if group == 96 else torch.bfloat16
    check(operands(3, 160, 1440, bits, group, dtype, zero=True, extras=True, device="cpu"))


@pytest.mark.parametrize(("split", "height", "m"), [(2, 1, 8), (4, 2, 9), (1, 2, 16)])
def test_divisions(split: int, height: int, m: int) -> None:
    case = operands(m, 150, 2560, 4, 128, extras=True, device="cpu")
    check(case, blocks=2 * split, split=split, height=height)


@pytest.mark.parametrize(
    ("m", "k", "split"),
    [
        *((5, 1440, 1), (16, 2560, 2), (16, 8192, 2)),
        pytest.param(8, 4096, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_x_in_boxes(m: int, k: int, split: int) -> None:
    """Also with fewer tokens and less k than a box holds, and where stages reuse the memory of boxes. Where the TMA
    can't read x, the kernel loads it and gives the same result."""
    case = operands(m, 70, k, device="cpu", zero=True)
    out = run(case, blocks=2 * split, split=split)
    expected = exact(**case)
    assert (out.double() - expected).norm() <= BOUND[out.dtype] * expected.norm()
    for width, first in ((k + 8, 8), (k + 1, 0), (k + 16, 3)) if k < 8192 else ():
        x = torch.full((m, width), float("nan"), dtype=torch.bfloat16)
        x[:, first : first + k] = case["x"]
        x = x[:, first : first + k]
        assert torch.equal(run({**case, "x": x}, blocks=2 * split, split=split), out)


@pytest.mark.cover("values")
@pytest.mark.parametrize(("stages", "apart"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 3), (4, 4)])
@pytest.mark.parametrize("split", [1, 2])
def test_stages_where_x_was(split: int, stages: int, apart: int) -> None:
    """More tiles than stages, with any number of stages over the memory of x."""
    case = operands(8, 16 * 7, 1280, device="cpu")
    expected = run(case, blocks=split, split=split)
    out = run(case, blocks=split, split=split, stages=stages, apart=apart)
    assert torch.equal(out, expected)


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "k", "split"), [(1, 1440, 1), (3, 1024, 1), (8, 96, 1), (8, 1440, 2), (16, 1024, 1)]
)
def test_float8(m: int, k: int, split: int, dtype: torch.dtype) -> None:
    """x is float16, results may have another dtype, and a row may end within a chunk."""
    case = float8_operands(m, 40, k, dtype, extras=True, device="cpu")
    case["scale"] /= 64  # results within float16
    check(case, blocks=2 * split, split=split)


def test_nan_of_float8_stays_in_its_row_and_column() -> None:
    """The memory after a row of the weight may hold NaN, too."""
    case = float8_operands(3, 40, 96, extras=True, device="cpu")
    clean = run(case)
    wide = torch.full((40, 128), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert wide.float().isnan().all()
    wide.view(torch.uint8)[:, :96] = case["codes"].view(torch.uint8)
    assert torch.equal(run({**case, "codes": wide[:, :96]}), clean)
    wide.view(torch.uint8)[7, 50], case["token_scale"][1] = 255, float("nan")
    out = run({**case, "codes": wide[:, :96]})
    expected = clean.clone()
    expected[1], expected[:, 7] = float("nan"), float("nan")
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_strided_rows() -> None:
    case = operands(2, 24, 512, device="cpu")
    wide = torch.zeros(24, 512, dtype=torch.uint8)
    wide[:, 32:288] = case["codes"]
    x = torch.zeros(2, 519, dtype=torch.bfloat16)
    x[:, 3:515] = case["x"]
    expected = run(case)
    assert torch.equal(run({**case, "codes": wide[:, 32:288]}), expected)
    assert torch.equal(run({**case, "x": x[:, 3:515]}), expected)


def test_nan_and_infinity_stay_with_their_token() -> None:
    """Also where the registers hold the x of another chunk in other columns."""
    case = operands(2, 20, 2304, device="cpu")
    clean = run(case)
    case["x"][1, 5], case["x"][1, 2000] = float("nan"), float("inf")
    out = run(case)
    assert out[1].isnan().all() and torch.equal(out[0], clean[0])


def rounding(m: int, n: int, k: int, bits: int = 4, group: int = 128, **options) -> dict:
    """A case whose x the kernel rounds to int8."""
    case = operands(m, n, k, bits, group, extras=True, device="cpu", **options)
    return {**case, "token_scale": None, "rounds": torch.int8}


@pytest.mark.parametrize(
    ("m", "k", "group", "split"),
    [(1, 1088, 32, 4), (3, 640, 64, 2), (5, 1000, 128, 1), (8, 1024, 128, 1), (16, 1024, 128, 2)],
)
def test_rounds_x_to_int8(m: int, k: int, group: int, split: int) -> None:
    """Blocks of a cluster have parts of a token, and registers the x of several chunks."""
    check(rounding(m, 40, k, 4, group, zero=k != 1024), blocks=2 * split, split=split)


@pytest.mark.parametrize(("m", "group", "zero"), [(4, 32, False), (8, 0, False), (2, 128, True)])
def test_rounds_x_for_weights_of_8_bits(m: int, group: int, zero: bool) -> None:
    check(rounding(m, 40, 1024, 8, group, zero=zero), blocks=2, split=2)


@pytest.mark.parametrize(("m", "split"), [(3, 1), (16, 2)])
def test_rounds_x_to_e4m3(m: int, split: int) -> None:
    case = float8_operands(m, 40, 1024, torch.bfloat16, extras=True, device="cpu")
    x = torch.randn(m, 1024).bfloat16()
    rounded = {"x": x, "token_scale": None, "rounds": torch.float8_e4m3fn}
    check({**case, **rounded}, blocks=2 * split, split=split)


def test_rounding_keeps_nan_with_its_token_and_zeros() -> None:
    case = rounding(5, 40, 1024)
    clean = run(case, blocks=4, split=2)
    case["x"][1, 5], case["x"][2, 900], case["x"][3] = float("nan"), -float("inf"), 0
    out, expected = run(case, blocks=4, split=2), exact(**case)
    assert torch.equal(out[[0, 4]], clean[[0, 4]]) and out[1:3].isnan().all()
    assert torch.equal(out[3], expected[3].to(out.dtype))
