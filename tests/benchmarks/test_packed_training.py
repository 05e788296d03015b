"""The benchmark of training packed models, on tiny models and a CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from benchmarks.packed_training import (
    GPT_OSS_20B,
    OPENED,
    PACKED_TABLE,
    PLAIN,
    QWEN3_30B,
    problems,
)
from benchmarks.registry import Problem, Result, Row

SIZES = {
    **{"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64},
}
TINY = {
    "int4 g128": replace(
        QWEN3_30B,
        sizes=tuple(
            {
                **SIZES,
                **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
            }.items()
        ),
        device="cpu",
    ),
    "MXFP4 experts": replace(
        GPT_OSS_20B,
        sizes=tuple({**SIZES, **{"num_local_experts": 4, "num_experts_per_tok": 2}}.items()),
        device="cpu",
    ),
}


@pytest.fixture(autouse=True)
def opened_anew() -> Iterator[None]:
    yield
    OPENED.drop()


@pytest.mark.parametrize("packed", TINY)
def test_a_table_of_tiny_models(packed: str) -> None:
    """Packed and plain, the first loss is the same up to rounding in bfloat16."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("safetensors")
    for problem in problems(TINY[packed], "tiny", packed, few=2):
        candidates = [replace(each, batch=(2, 16)) for each in problem.candidates]
        rows = [Row(each, PACKED_TABLE.measure(each, 2)) for each in candidates]
        result = Result(Problem(problem.name, candidates, PLAIN), rows)
        cells = [PACKED_TABLE.cells(row, result, 1.0) for row in rows]
        assert all(len(each) == len(PACKED_TABLE.columns) for each in cells)
        own, plain = (row.measured for row in rows)
        assert own.weights < 0.75 * plain.weights
        assert abs(own.loss - plain.loss) < 2e-3 * plain.loss, problem.name
        assert cells[1][-2] == "1.00"
