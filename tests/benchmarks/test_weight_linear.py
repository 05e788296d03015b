"""The benchmark of low-bit linears: the shapes that it reads, and the table that its times give."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import lowbit
from benchmarks.__main__ import main
from benchmarks.weight_linear import Linear, _measure, shapes_of
from benchmarks.write_linear_table import thresholds, written
from lowbit_kernels.weight_only import linear_table


def test_shapes_of_a_trace(tmp_path: Path) -> None:
    how = ("float32", "float32", "torch")
    products = [
        lowbit.TracedProduct("a", "output", 1, 8, 4, *how, calls=1, why=""),
        lowbit.TracedProduct("b", "output", 1, 8, 4, *how, calls=2, why=""),
        lowbit.TracedProduct("b", "grad_weight", 3, 8, 4, *how, calls=1, why=""),
        lowbit.TracedProduct("c", "output", 2, 4, 4, *how, calls=1, why=""),
        lowbit.TracedProduct("d", "output", 0, 9, 9, *how, calls=0, why="not reached"),
    ]
    file = tmp_path / "shapes.json"
    lowbit.Trace(tuple(products)).write(file)
    assert shapes_of(file) == [(2, 4, 4), (1, 8, 4)]


def test_a_wrong_result_is_not_timed() -> None:
    one = Linear(
        *("int4", lambda x: x + 0.02, lambda: (torch.ones(3),), 1), reference=lambda x: x.double()
    )
    with pytest.raises(ValueError, match=r"wrong: its error is 2.0e-02"):
        _measure(one, 2)


def test_shapes_go_with_the_benchmark_that_takes_them(capsys: pytest.CaptureFixture) -> None:
    for names in (["dequantize"], []):
        with pytest.raises(SystemExit):
            main([*names, "--shapes", "shapes.json"])
        assert "--shapes goes with the benchmark weight_linear" in capsys.readouterr().err


def test_thresholds_are_the_ends_of_runs() -> None:
    fastest = {1: "decode", 8: "decode", 16: "large_batch", 32: "large_batch", 64: "dequantize"}
    assert thresholds(fastest) == ((8, "decode"), (32, "large_batch"))
    assert thresholds({**fastest, 128: "large_batch"}) == (
        (8, "decode"),
        (32, "large_batch"),
        (64, "dequantize"),
        (128, "large_batch"),
    )
    assert thresholds({1: "dequantize"}) == ()


def test_the_table_is_replaced_and_nothing_else() -> None:
    source = Path(linear_table.__file__).read_text(encoding="utf-8")
    assert written(source, linear_table.REGIMES).split() == source.split()
    table = {
        (4, 128, 1, 2): ((8, "decode"), (32, "large_batch")),
        (8, 0, 1, 2): ((1, "decode"),),
        (8, 1, 1, 1): (),
    }
    tree = ast.parse(written(source, table))
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "REGIMES"
    )
    assert found.value is not None and ast.literal_eval(found.value) == table
