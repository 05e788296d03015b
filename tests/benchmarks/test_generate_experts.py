"""The benchmark of generate on a mixture of experts, on a tiny model and a CPU."""

import pytest

from benchmarks.generate import GENERATE_TABLE, OWN_LOOP, PLAIN
from benchmarks.generate_experts import CONVERSIONS, Mixture
from benchmarks.registry import Problem, Result, Row
from tests.benchmarks.test_generate import SHAPE, few_tokens  # noqa: F401


@pytest.mark.usefixtures("few_tokens")
def test_a_table_of_a_tiny_mixture() -> None:
    pytest.importorskip("transformers")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    shape = tuple({**SHAPE, **experts, "head_dim": 128}.items())
    models = [Mixture(name, 2, shape, "cpu") for name in (*CONVERSIONS, "int4 g128" + OWN_LOOP)]
    rows = [Row(model, GENERATE_TABLE.measure(model, 2)) for model in models]
    result = Result(Problem("tiny", models, reference=PLAIN), rows)
    cells = [GENERATE_TABLE.cells(row, result, 1.0) for row in rows]
    assert all(len(each) == len(GENERATE_TABLE.columns) and float(each[0]) > 0 for each in cells)
