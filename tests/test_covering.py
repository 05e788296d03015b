"""The points of a product that the usual run takes, and the command that runs the others."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

from tests.covering import covering

ROOT = Path(__file__).resolve().parent.parent
FILE = """
import pytest

@pytest.mark.cover("pairs")
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", [0, 1, 2, pytest.param(3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("c", range(3))
def test_pairs(a, b, c):
    pass

@pytest.mark.cover("values", case=lambda c: divmod(c, 10))
@pytest.mark.parametrize("case", [0, 1, 10, 11])
def test_cases(case):
    pass

@pytest.mark.exhaustive
def test_by_hand():
    pass

def test_plain():
    pass
"""


def test_pairs_of_a_product() -> None:
    rows = list(itertools.product(range(4), "abc", range(3), (True, False)))
    chosen = [rows[at] for at in covering(rows, 2)]
    for left, right in itertools.combinations(range(4), 2):
        pairs = {(row[left], row[right]) for row in rows}
        assert {(row[left], row[right]) for row in chosen} == pairs
    assert 12 <= len(chosen) <= 16  # 4 × 3 pairs of the two longest axes; all points are 72
    assert covering(rows, 2) == covering(rows, 2)


def test_values_of_a_product_are_spread() -> None:
    rows = list(itertools.product(range(6), range(3)))
    chosen = [rows[at] for at in covering(rows, 1)]
    assert [row[0] for row in chosen] == list(range(6))
    assert sorted(row[1] for row in chosen) == [0, 0, 1, 1, 2, 2]


def test_points_that_are_left_out_of_a_product() -> None:
    rows = [(a, b, c) for a, b, c in itertools.product(range(3), repeat=3) if a != b]
    chosen = {rows[at] for at in covering(rows, 2)}
    assert {row[:2] for row in chosen} == {row[:2] for row in rows}
    assert covering([(1,), (1,), (2,)], 2) == [0, 2]
    assert covering([], 2) == []


def collected(folder: Path, *arguments: str) -> list[str]:
    settings = "[pytest]\nmarkers = cover(what)\n  exhaustive\n  gpu\n"
    (folder / "pytest.ini").write_text(settings)
    (folder / "test_it.py").write_text(FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.covering", "--co", "-q", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_the_marker_chooses_what_runs(tmp_path: Path) -> None:
    usual = collected(tmp_path)
    pairs = [name for name in usual if name.startswith("test_pairs")]
    with_gpu = [name for name in pairs if "-3-" in name]  # named [c-b-a]
    assert len(with_gpu) == 9 and 9 <= len(pairs) - 9 <= 11
    assert {"test_cases[0]", "test_cases[11]", "test_plain"} == set(usual) - set(pairs)
    assert collected(tmp_path, "-m", "gpu") == with_gpu
    further = collected(tmp_path, "-m", "exhaustive")
    assert not set(further) & set(usual) and len(usual) + len(further) == 36 + 4 + 2
    assert sorted(usual + further) == sorted(
        collected(tmp_path, "-m", "exhaustive or not exhaustive")
    )
