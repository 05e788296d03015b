"""The benchmark of calls of compiled models, with one block."""

import pytest

from benchmarks import compiled_call
from benchmarks.registry import Result, Row


def test_a_table_of_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_call, "SECONDS", 0.0)
    monkeypatch.setattr(compiled_call, "BLOCKS", 1)
    candidate = compiled_call.CallCandidate("int8", compiled_call.SCHEMES["int8"], False, 1)
    own, plain = compiled_call.measure(candidate, 1)
    assert 0 < own.seconds < 1 and 0 < plain.seconds < 1 and own.guards > plain.guards > 100
    problem = next(iter(compiled_call.compiled_call()))
    assert problem.name == "8 linears" and problem.candidates[-1].name == problem.reference
    calls = compiled_call.Call(3e-4, 40, 1.0), compiled_call.Call(2e-4, 30, 2.0)
    found = compiled_call.cells(Row(candidate, calls), Result(problem, []), 1.0)
    assert found == ["300", "200", "1.50", "40 / 30", "1.0 / 2.0"]
