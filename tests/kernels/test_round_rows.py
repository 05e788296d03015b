"""round_rows: every implementation gives the same unbiased codes; parts of rows get the codes of the whole."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases.round_rows import CASES, Case
from lowbit.numerics.packing import unpack
from lowbit_kernels.quantize.round_rows import reference, round_rows
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def same(found, expected) -> bool:
    equal = [
        torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
        for a, b in zip(found, expected, strict=True)
    ]
    return all(equal)


@every_case
def test_cpu_and_opcheck(case: Case) -> None:
    arguments = case.arguments()
    codes, scale = round_rows(*arguments)
    assert same((codes, scale), reference(*arguments))
    values, _, largest, first, *_, packed = arguments
    if packed:
        codes = unpack(codes, 4, values.shape[1]).to(torch.int8) - 8
    good = scale.isfinite()
    exact = values.double() / scale.double()[:, None]
    off = (codes - exact).abs()[good]
    assert off.numel() == 0 or off.max() <= (0.5 if first is None else 1) + 1e-4
    assert (
        not codes[~good].any() and (scale[values.eq(0).all(1)] == 1).all()
    ) or largest is not None
    finite = [a.nan_to_num(1.0, 1.0) if isinstance(a, torch.Tensor) else a for a in arguments]
    torch.library.opcheck(torch.ops.lowbit.round_rows, tuple(finite))  # opcheck holds no NaN equal


def test_parts_of_rows_get_the_codes_of_the_whole() -> None:
    values, old, _, first, *_ = Case("", 5, 100).arguments()
    codes, scale = round_rows(values, old, None, first)
    largest = values.abs().amax(1)
    for start, end in ((0, 33), (33, 100)):
        part = round_rows(values[:, start:end], old, largest, first, start)
        assert same(part, (codes[:, start:end], scale))


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of n roundings of a row lies within 5 standard errors; first indices are not multiples of 8."""
    n, columns = 4096, 21
    row = torch.cat([torch.linspace(-126.4, 126.7, columns - 1), torch.tensor([127.0])])
    first = torch.arange(n) * columns - 2**62 + 5
    codes, scale = round_rows(row.expand(n, columns), None, None, first)
    assert (scale == 1).all()
    share = (row % 1).double()
    off = codes.double().mean(0) - row.double()
    assert (off.abs() <= 5 * (share * (1 - share) / n).sqrt() + 2**-16).all()


INTERPRETED = """
import json, torch
from tests.kernels.test_round_rows import SMALL, reference, round_rows, same

torch.manual_seed(0)
arguments = {case.name: case.arguments() for case in SMALL}
print(json.dumps({name: same(round_rows(*a), reference(*a)) for name, a in arguments.items()}))
"""


def test_the_kernel_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert same(round_rows(*arguments), reference(*arguments))


def test_wrong_arguments() -> None:
    values, old, _, first, *_ = CASES[0].arguments()
    for arguments, error, message in (
        ((values.double(),), TypeError, "float32, got torch.float64"),
        ((values[0],), ValueError, r"\[R, K\]"),
        ((values, old.double()), TypeError, "old of torch.float32"),
        ((values, old, None, first.int()), TypeError, "first of torch.int64"),
        ((values, None, None, None, 0, 8, True), ValueError, "most of at most 7, got 256 and 8"),
        ((values, old[:1]), ValueError, r"old \[R\], here \(8,\), got \(1,\)"),
    ):
        with pytest.raises(error, match=message):
            round_rows(*arguments)


@pytest.mark.parametrize("most", [-1, 0, 128])
def test_codes_beyond_int8_raise(most: int) -> None:
    with pytest.raises(ValueError, match=f"must be 1 to 127, got {most}"):
        round_rows(torch.ones(2, 4), most=most)
