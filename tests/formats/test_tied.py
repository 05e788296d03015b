"""A tied weight that a folder stores twice: one weight where both are equal, two where they differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowbit
from lowbit import Int4WeightOnly, Int8WeightOnly
from lowbit.formats import FormatError
from tests.formats.models import TOKENS, build, plain_folder

INT8, INT4 = Int8WeightOnly(), Int4WeightOnly(64)
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "unsaid": {},
    "of its language model": {"text_config": {"tie_word_embeddings": True}},
}
PATTERNS = {
    "embedding": {"embed_tokens": INT8, "*": INT4},
    "head": {"lm_head": INT8, "*": INT4},
    "both": {"embed_tokens": INT8, "lm_head": INT8, "*": INT4},
    "head, and nothing else": {"lm_head": INT8, "*": None},
}
WRITABLE = [name for name in lowbit.formats.names() if name not in ("aoti", "executorch", "onnx")]


def stored_twice(path: Path, differ: bool = False, **config: Any) -> Path:
    model = build(tied=True)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    state[HEAD] = state[HEAD] * (1 + differ)
    return plain_folder(path, state, **config)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_equal_ones_are_one_weight_quantized_once(patterns, config, tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", **config)
    report = lowbit.export(folder, tmp_path / "out", "lowbit", scheme=patterns)
    assert EMBEDDING in report.converted and HEAD not in {e.fqn for e in report.entries}
    assert f"tied to {HEAD}" in str(report)
    tied = lowbit.load_pretrained(tmp_path / "out", build(1, tied=True))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert type(tied.lm_head.weight) is lowbit.AffineTensor
    expected = build(tied=True)
    chosen = {"embed_tokens": INT8, "lm_head": INT8, "*": patterns["*"]}
    lowbit.quantize_(expected, chosen, lambda m, name: isinstance(m, nn.Linear | nn.Embedding))
    assert torch.equal(tied(TOKENS), expected(TOKENS))


def test_a_module_that_does_not_tie_takes_both(tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    model = lowbit.load_pretrained(folder, build(1))
    assert torch.equal(model.lm_head.weight, build().embed_tokens.weight)
    assert torch.equal(model(TOKENS), build(tied=True)(TOKENS))


@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize("pattern", ["embed_tokens", "lm_head"])
def test_every_format_holds_it_or_says_why_not(format: str, pattern: str, tmp_path: Path) -> None:
    if format == "gguf":
        pytest.skip("holds Llamas; tests/integrations/test_tied.py writes one")
    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    scheme = {pattern: INT8, "*": None}
    if format == "lowbit":
        assert lowbit.export(folder, tmp_path / "out", format, scheme=scheme).converted
        return
    with pytest.raises(FormatError, match=f"{EMBEDDING}: it is the weight of an embedding.*tied"):
        lowbit.export(folder, tmp_path / "out", format, scheme=scheme)


def test_lossy_stores_it_plainly_once(tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    scheme = {"lm_head": INT8, "*": INT4}
    report = lowbit.export(folder, tmp_path / "out", scheme=scheme, lossy=True)
    assert "stored plainly" in report.left[EMBEDDING]
    model = lowbit.load_pretrained(tmp_path / "out", build(1, tied=True))
    assert type(model.lm_head.weight) is nn.Parameter and HEAD not in str(report.converted)


@pytest.mark.parametrize(
    "patterns",
    [
        {"embed_tokens": INT8, "lm_head": INT4, "*": INT4},
        {"embed_tokens": INT8, "lm_head": None, "*": INT4},
    ],
    ids=["two schemes", "a scheme and None"],
)
def test_patterns_that_differ_are_refused(patterns, tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    with pytest.raises(
        FormatError, match=r"are one tied weight, but the patterns differ.*give both"
    ):
        lowbit.export(folder, tmp_path / "out", "lowbit", scheme=patterns)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
def test_different_ones_stay_two(patterns, config, tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", differ=True, **config)
    lowbit.export(folder, tmp_path / "out", "lowbit", scheme=patterns)
    written = config_of(tmp_path / "out")
    assert (written.get("text_config") or written)["tie_word_embeddings"] is False
    model = lowbit.load_pretrained(tmp_path / "out", build(1))
    plain = lowbit.load_pretrained(folder, build(1))
    for name in (HEAD, EMBEDDING):
        layer, own = name.rpartition(".")[0], model.get_parameter(name)
        assert isinstance(own, lowbit.AffineTensor) == (layer in patterns)
        values = own.dequantize() if layer in patterns else own
        expected = plain.get_parameter(name)
        assert (values - expected).norm() < 0.02 * expected.norm()
    with pytest.raises(FormatError, match=r"two different tensors.*ties them to one"):
        lowbit.load_pretrained(tmp_path / "out", build(1, tied=True))


def test_a_low_bit_weight_beside_its_plain_copy_is_two_tensors(tmp_path: Path) -> None:
    """lowbit wrote such folders."""
    from safetensors.torch import load_file, save_file

    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    lowbit.export(folder, tmp_path / "out", "lowbit", scheme=PATTERNS["embedding"])
    [file] = (tmp_path / "out").glob("*.safetensors")
    head = build(tied=True).lm_head.weight.detach().clone()
    save_file({**load_file(file), HEAD: head}, file, {"format": "pt"})
    model = lowbit.load_pretrained(tmp_path / "out", build(1))
    assert torch.equal(model.lm_head.weight, head)
    assert type(model.embed_tokens.weight) is lowbit.AffineTensor


@pytest.mark.parametrize("stored", ["twice", "once"])
def test_none_for_a_tied_head(stored: str, tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain", tie_word_embeddings=True)
    if stored == "once":
        state = {n: t for n, t in build(tied=True).state_dict().items() if n != HEAD}
        folder = plain_folder(tmp_path / "once", state, tie_word_embeddings=True)
    report = lowbit.export(folder, tmp_path / "out", scheme={"lm_head": None, "*": INT4})
    assert sorted(report.converted) == ["down_proj.weight", "up_proj.weight"]


@pytest.mark.parametrize("copies", [("encoder.embed_tokens",), ("decoder.embed_tokens", "lm_head")])
def test_further_names_of_a_shared_embedding(copies: tuple[str, ...], tmp_path: Path) -> None:
    shared = torch.randn(50, 128, dtype=torch.bfloat16)
    state = {f"{name}.weight": shared for name in ("shared", *copies)}
    folder = plain_folder(tmp_path / "plain", state, tie_word_embeddings=True)
    report = lowbit.export(folder, tmp_path / "out", "lowbit", scheme={f"{copies[0]}": INT8})
    assert report.converted == ["shared.weight"] and len(report.entries) == 1
