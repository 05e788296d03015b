"""The settings of a GGUF file, without the package that reads it: what lowbit would compute otherwise is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from lowbit.formats import FormatError, gguf_file
from lowbit.formats.gguf_llama import config_of, settings_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}


def fields(**changes: Any) -> dict[str, Any]:
    whole, floats = settings_of(CONFIG)
    own = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {"general.architecture": "llama", **whole, **floats, **own}


def test_settings_come_back() -> None:
    found = config_of(fields(), True, 50)
    assert {key: found[key] for key in CONFIG} == CONFIG and found["head_dim"] == 32


@pytest.mark.parametrize("act", ["gelu", None, 5])
def test_another_activation_is_not_written(act: Any) -> None:
    """A GGUF file of a Llama does not name it, so llama.cpp would compute silu."""
    with pytest.raises(FormatError, match=r"llama.cpp computes silu, swish"):
        settings_of({**CONFIG, "hidden_act": act})
    settings_of({**CONFIG, "hidden_act": "silu"})


def test_a_sliding_window_is_told(recwarn: pytest.WarningsRecorder) -> None:
    """GGUF's llama has no place for it. A window as long as the longest text changes nothing."""
    long = {**CONFIG, "max_position_embeddings": 8192}
    settings_of({**long, "sliding_window": None})
    settings_of({**long, "sliding_window": 8192})
    assert not recwarn.list
    with pytest.warns(UserWarning, match="sliding_window 4096; llama.cpp attends to all tokens"):
        settings_of({**long, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope__scale_linear": 4.0}, r"scaled \(linear, 4\)"),
        ({"rope__scaling__type": "yarn"}, r"scaled \(yarn\)"),
        ({"rope__dimension_count": 16}, "16 of 32 elements of a head are rotated"),
        ({"embedding_length": 0}, "llama.embedding_length is 0"),
        ({"attention__head_count": [4, 4]}, r"head_count is \[4, 4\]"),
        ({"block_count": None}, "block_count is None"),
    ],
)
def test_files_that_mean_another_computation_are_refused(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(FormatError, match=reason):
        config_of(fields(**changes), True, 50)


def test_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package swaps the bytes of its numbers, and not those inside of blocks."""
    path, order = tmp_path / "model.gguf", SimpleNamespace(value="S")
    path.touch()
    embedding = SimpleNamespace(
        name="token_embd.weight",
        shape=numpy.array([128, 50]),
        tensor_type=SimpleNamespace(name="F16"),
        n_bytes=12800,
    )
    given = {
        name: SimpleNamespace(parts=(), contents=lambda v=v: v) for name, v in fields().items()
    }

    def reader(path: Path) -> Any:
        return SimpleNamespace(fields=given, tensors=[embedding], byte_order=order.value)

    monkeypatch.setattr(gguf_file, "package", lambda: SimpleNamespace(GGUFReader=reader))
    with pytest.raises(FormatError, match="byte order of another machine"):
        gguf_file.GgufFile(path)
    order.value = "I"
    assert gguf_file.GgufFile(path).names() == ["model.embed_tokens.weight"]
