"""round_rows: uniform draws by the formula, every path gives the same codes, parts those of the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit_kernels.round_rows import CASES, KEYS, Case, draws, reference, round_rows

ROOT = Path(__file__).resolve().parents[2]
SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def same(found, expected) -> bool:
    equal = [
        torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))
        for a, b in zip(found, expected, strict=True)
    ]
    return all(equal)


def draw_of(i: int) -> int:
    """The formula, in Python's integers."""
    mask, pair = 2**32 - 1, i >> 1
    h = (pair & mask) ^ KEYS[0]
    h = ((h ^ h >> 16) * 0x7FEB352D) & mask
    h ^= (h >> 15) ^ ((KEYS[1] + 0x9E3779B9 * ((pair >> 32) & mask)) & mask)
    h = (h * 0x846CA68B) & mask
    h ^= h >> 16
    return h >> 16 if i & 1 else h & 0xFFFF


def test_the_draws_are_those_of_the_formula_and_uniform() -> None:
    some = torch.randint(-(2**63), 2**63 - 1, (300,)).tolist() + list(range(-5, 5))
    assert draws(torch.tensor(some)).tolist() == [draw_of(i) for i in some]
    for first in (0, -(2**40) - 1, 2**62 + 12345):
        found = draws(torch.arange(2**18) + first)
        counts = torch.bincount(found >> 8, minlength=256).double()
        chi2 = ((counts - 2**10) ** 2 / 2**10).sum()
        assert chi2 < 255 + 6 * (2 * 255) ** 0.5
        for a, b in ((found[:-1], found[1:]), (found[::2], found[1::2])):  # neighbours, pairs
            both = torch.stack([a, b]).double()
            assert abs(torch.corrcoef(both)[0, 1]) < 6 / len(a) ** 0.5


@every_case
def test_cpu_and_opcheck(case: Case) -> None:
    arguments = case.arguments()
    codes, scale = round_rows(*arguments)
    assert same((codes, scale), reference(*arguments))
    values, _, largest, first, _ = arguments
    good = scale.isfinite()
    exact = values.double() / scale.double()[:, None]
    off = (codes - exact).abs()[good]
    assert off.numel() == 0 or off.max() <= (0.5 if first is None else 1) + 1e-4
    assert (
        not codes[~good].any() and (scale[values.eq(0).all(1)] == 1).all()
    ) or largest is not None
    finite = [a.nan_to_num(1.0, 1.0) if isinstance(a, torch.Tensor) else a for a in arguments]
    torch.library.opcheck(torch.ops.lowbit.round_rows, tuple(finite))  # takes no NaN for equal


def test_parts_of_rows_are_those_of_the_whole() -> None:
    values, old, _, first, _ = Case("", 5, 100).arguments()
    codes, scale = round_rows(values, old, None, first)
    largest = values.abs().amax(1)
    for start, end in ((0, 33), (33, 100)):
        part = round_rows(values[:, start:end], old, largest, first, start)
        assert same(part, (codes[:, start:end], scale))


INTERPRETED = """
import json, torch
from lowbit_kernels import triton_runtime
from lowbit_kernels.round_rows import CASES, reference, round_rows

assert triton_runtime.runs_on(torch.device("cpu"))
torch.manual_seed(0)
results = {}
for case in CASES:
    if not case.large:
        arguments = case.arguments()
        pairs = zip(round_rows(*arguments), reference(*arguments))
        results[case.name] = all(torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0)) for a, b in pairs)
print(json.dumps(results))
"""


def test_the_kernel_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "kernels")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert all(results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    arguments = case.arguments("cuda")
    assert same(round_rows(*arguments), reference(*arguments))


def test_what_is_refused() -> None:
    values, old, _, first, _ = CASES[0].arguments()
    for arguments, error, message in (
        ((values.double(),), TypeError, "float32, got torch.float64"),
        ((values[0],), ValueError, r"\[R, K\]"),
        ((values, old.double()), TypeError, "old as torch.float32"),
        ((values, old, None, first.int()), TypeError, "first as torch.int64"),
        ((values, old[:1]), ValueError, r"old must have one element a row, \(8,\), got \(1,\)"),
    ):
        with pytest.raises(error, match=message):
            round_rows(*arguments)
