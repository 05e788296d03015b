"""The benchmark of generate, on a tiny model and a CPU."""

import pytest

from benchmarks.generate import CONVERSIONS, GENERATE_TABLE, PLAIN, Model, check_peers
from benchmarks.registry import Problem, Result, Row

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.generate.NEW", 6)


@pytest.mark.usefixtures("few_tokens")
def test_a_table_of_a_tiny_model() -> None:
    pytest.importorskip("transformers")
    check_peers("cpu")
    names = [name for name in CONVERSIONS if not name.startswith("tinygemm")]
    models = [Model(name, 2, tuple(SHAPE.items()), "cpu") for name in names]
    rows = [Row(model, GENERATE_TABLE.measure(model, 2)) for model in models]
    result = Result(Problem("tiny", models, reference=PLAIN), rows)
    cells = [GENERATE_TABLE.cells(row, result, 1.0) for row in rows]
    assert all(len(each) == len(GENERATE_TABLE.columns) and float(each[0]) > 0 for each in cells)
    assert cells[names.index(PLAIN)][1] == "1.00"
