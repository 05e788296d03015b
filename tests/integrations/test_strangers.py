"""A config.json that asks transformers for more than its folder holds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import lowbit
from lowbit.cli import main
from lowbit.formats import FormatError
from tests.integrations.models import llama

pytest.importorskip("transformers")

LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, r"num_hidden_layers 1e\+09; accepted: up to 10\d\d"),
    "more layers": ({"num_hidden_layers": 900}, r"describes more than 10\d\d parameters"),
    "inner layers": ({"text_config": {"n_layer": 10**9}}, r"n_layer 1e\+09; accepted"),
    "windows": ({"max_window_layers": 10**12}, r"max_window_layers 1e\+12"),
    "labels": ({"num_labels": 10**9}, r"num_labels 1e\+09; accepted: up to 1000000"),
    "a constant": ({"head_dim": 2**40}, "a constant of .* bytes; accepted: 1073741824"),
    "code": ({"attn_implementation": "someone/kernel"}, "code that lowbit does not load"),
}


@pytest.mark.parametrize("case", LARGE)
def test_it_is_refused_at_once(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    entries, why = LARGE[case]
    model = llama()
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    lowbit.export(model, tmp_path / "model", "lowbit")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    start = time.process_time()
    with pytest.raises(FormatError, match=why) as caught:
        lowbit.load_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value) and str(tmp_path / "model") in str(caught.value)
    if "layers" in case or case == "labels":
        capfd.readouterr()
        main(["estimate", str(path)])
        error = capfd.readouterr().err
        assert ("accepted: up to" in error and error.count("\n") == 1) or case == "more layers"
    assert time.process_time() - start < 10


@pytest.mark.parametrize("pattern", ["re:(a+)+", "re:" + "a" * 3000])
def test_expressions_of_a_config(pattern: str) -> None:
    from lowbit.hf import LowbitConfig

    made = LowbitConfig({"re:a.*": "int8"}).to_dict()
    assert LowbitConfig.from_dict(made).to_dict() == made
    made["schemes"][0][0] = pattern
    with pytest.raises(ValueError, match="an expression that lowbit does not run"):
        LowbitConfig.from_dict(made)
