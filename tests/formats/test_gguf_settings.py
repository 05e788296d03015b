"""The settings of a GGUF file, without the package that reads it: what lowbit would compute otherwise is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit.formats import FormatError
from lowbit.formats.gguf import file as gguf_file
from lowbit.formats.gguf.llama import (
    check_layers,
    config_of,
    head_size,
    in_gguf,
    in_transformers,
    settings_of,
)
from lowbit.formats.gguf.rope import factors_of

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}


def fields(**changes: Any) -> dict[str, Any]:
    whole, floats, texts = settings_of(CONFIG)
    own = {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {"general.architecture": "llama", **whole, **floats, **texts, **own}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("rope", [None, LINEAR, LLAMA3], ids=["default", "linear", "llama3"])
def test_settings_come_back(kind: str, rope: dict[str, Any] | None) -> None:
    config = {**CONFIG, "model_type": kind, "num_key_value_heads": 2, "rope_parameters": rope}
    whole, floats, texts = settings_of(config)
    stored = {"general.architecture": kind, **whole, **floats, **texts}
    found = config_of(stored, {"output.weight"}, 50, factors_of(config, head_size(config)))
    assert {key: found[key] for key in CONFIG if key != "model_type"} == {
        key: value for key, value in CONFIG.items() if key != "model_type"
    }
    assert found["model_type"] == kind and found["head_dim"] == 32
    assert not found["tie_word_embeddings"] and found["num_key_value_heads"] == 2
    assert found.get("rope_parameters") == rope
    assert found["architectures"][0].lower() == f"{kind}forcausallm"


def test_the_factors_of_llama_3() -> None:
    """Of transformers' own rotary embeddings."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{**CONFIG, "rope_parameters": LLAMA3, "head_dim": 32})
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    plain = LLAMA3["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
    factors = factors_of({**CONFIG, "rope_parameters": LLAMA3}, 32)
    assert factors is not None and 1 == factors[0] < factors[8] < factors[-1] == 32
    torch.testing.assert_close(plain / factors, rotary.inv_freq, rtol=1e-5, atol=0)


def test_other_factors_are_refused() -> None:
    factors = factors_of({**CONFIG, "rope_parameters": LLAMA3}, 32)
    assert factors is not None
    for other in (factors.flip(0), factors[:4]):
        with pytest.raises(FormatError, match=r"not as those of Llama 3\.1"):
            config_of(fields(), (), 50, other)


def test_biases_and_norms_of_heads_have_names() -> None:
    for own, theirs in {
        "model.layers.3.self_attn.q_proj.bias": "blk.3.attn_q.bias",
        "model.layers.0.self_attn.k_norm.weight": "blk.0.attn_k_norm.weight",
        "model.layers.1.mlp.up_proj.bias": "blk.1.ffn_up.bias",
    }.items():
        assert in_gguf(own) == theirs and in_transformers(theirs) == own
    names = {"blk.0.attn_q.bias", "blk.0.attn_output.bias"}
    found = config_of(fields(), names, 50, None)
    assert found["attention_bias"] and not found["mlp_bias"]


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
    settings_of({**long, "sliding_window": 4096, "use_sliding_window": False})  # as Qwen2 has it
    assert not recwarn.list
    with pytest.warns(UserWarning, match="sliding_window 4096; llama.cpp attends to all tokens"):
        settings_of({**long, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
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
        config_of(fields(**changes), (), 50, None)


def test_another_byte_order_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package swaps the bytes of its numbers, and not those inside of blocks."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    monkeypatch.setattr(gguf_file, "package", lambda: None)
    with pytest.raises(FormatError, match="byte order of another machine"):
        gguf_file.GgufFile(path)


@pytest.mark.parametrize("count", [2, 10**9])
def test_another_number_of_layers_is_refused(count: int) -> None:
    """Otherwise so many would be built."""
    names = {"output.weight", "blk.0.attn_q.bias", f"blk.{count - 1}.attn_q.bias"}
    found = config_of(fields(block_count=count), names, 50, None)
    if count == 2:
        check_layers(found, names)
        return
    with pytest.raises(FormatError, match=r"block_count is 1000000000, .* those of 2 layers"):
        check_layers(found, names)


STRING = struct.pack("<Q", 1) + b"k"
HEADERS = {
    "fields": (struct.pack("<QQ", 0, 2**60), "1152921504606846976 fields"),
    "tensors": (struct.pack("<QQ", 2**60, 0), "1152921504606846976 tensors"),
    "a string": (struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60), "names 1152921504606846976"),
    "an array": (
        struct.pack("<QQ", 0, 1) + STRING + struct.pack("<IIQ", 9, 4, 2**60),
        "arrays have 1152921504606846976 elements",
    ),
    "a large array": (
        struct.pack("<QQ", 0, 1) + STRING + struct.pack("<IIQ", 9, 0, 2**23) + bytes(2**23),
        "arrays have 8388608 elements",
    ),
    "arrays of arrays": (
        struct.pack("<QQ", 0, 1) + STRING + struct.pack("<IIQ", 9, 9, 10),
        "of type 9",
    ),
    "a shape": (
        struct.pack("<QQ", 1, 0) + STRING + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0),
        "more than the file holds",
    ),
    "dimensions": (struct.pack("<QQ", 1, 0) + STRING + struct.pack("<I", 2**31), "dimensions"),
    "half a header": (b"\0", "cannot be read"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_lie_about_sizes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package would read them for ever, or in the memory of 300 bytes an element."""
    content, why = HEADERS[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + content)
    monkeypatch.setattr(gguf_file, "package", lambda: None)
    with pytest.raises(FormatError, match=why) as caught:
        lowbit.load_pretrained(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
