"""The benchmark of training packed models, on tiny models and a CPU."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import lowbit
from benchmarks.generate import random_model
from benchmarks.packed_training import (
    GPT_OSS_20B,
    OPENED,
    PACKED_TABLE,
    PLAIN,
    QWEN3_30B,
    PackedCost,
    bound,
    folder_of,
    problems,
    scratch,
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
        *packed_ones, plain = (row.measured for row in rows)
        for own in packed_ones:
            assert own.weights < 0.75 * plain.weights
            assert abs(own.loss - plain.loss) < 2e-3 * plain.loss, problem.name
        assert cells[-1][-2] == "1.00"


@pytest.mark.parametrize("packed", TINY)
def test_the_folder_is_one_that_export_writes(packed: str) -> None:
    """Names, dtypes and shapes of a model with all of its layers, and config.json's list of plain layers."""
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("transformers")
    shape = TINY[packed].with_layers(2)
    kind = getattr(importlib.import_module("transformers"), f"{shape.kind}ForCausalLM")
    model = random_model(kind, shape.config(2), "cpu")
    lowbit.quantize_(model, dict(shape.scheme))
    real = scratch() / f"real-{shape.kind}"
    lowbit.export(model, real, shape.format)

    def read(folder: Path) -> tuple[dict, dict]:
        tensors = {
            n: t for f in folder.glob("*.safetensors") for n, t in safetensors.load_file(f).items()
        }
        return tensors, json.loads((folder / "config.json").read_text())["quantization_config"]

    (own, settings), (other, wanted) = read(folder_of(shape)), read(real)
    assert {n: (t.shape, t.dtype) for n, t in own.items()} == {
        n: (t.shape, t.dtype) for n, t in other.items()
    }
    for key in ("ignore", "modules_to_not_convert"):
        assert sorted(settings.get(key, [])) == sorted(wanted.get(key, []))


def test_the_bound_of_a_peak() -> None:
    plain = PackedCost(1.0, 1.0, 5.0, weights=60.0, opening=None, held=61.0, peak=81.0)
    packed = replace(plain, weights=16.0, held=17.0, peak=38.0)
    assert bound(packed, plain) == pytest.approx(1.15 * 16 + 1 + 20)
    assert bound(packed, None) is None and bound(replace(packed, held=None), plain) is None
