"""A tied weight that a folder of transformers stores twice, as granite's folders do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit
from lowbit import Int8WeightOnly
from tests.integrations.models import by_compressed_tensors, llama, loaded, logits

pytest.importorskip("transformers")
INT8 = Int8WeightOnly()
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PATTERNS = {
    "head": {"lm_head": INT8, "*": INT8},
    "embedding": {"*.embed_tokens": INT8, "*": INT8},
    "both": {"lm_head": INT8, "*.embed_tokens": INT8, "*": INT8},
    "head left alone": {"lm_head": None, "*": INT8},
}


def stored_twice(path: Path, differ: bool = False, **changes: Any) -> Path:
    from safetensors.torch import load_file, save_file

    llama(tie_word_embeddings=True, **changes).save_pretrained(path)
    state = load_file(path / "model.safetensors")
    state[HEAD] = state[EMBEDDING] * (1 + differ)
    save_file(state, path / "model.safetensors", {"format": "pt"})
    return path


def is_low(model: Any) -> list[bool]:
    weights = model.lm_head.weight, model.model.embed_tokens.weight
    return [isinstance(weight, lowbit.AffineTensor) for weight in weights]


@pytest.mark.parametrize("differ", [False, True], ids=["equal", "different"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_loaders(pattern: str, differ: bool, tmp_path: Path) -> None:
    """They agree to the bit, tie equal ones, and keep different ones apart."""
    import lowbit.hf

    folder = stored_twice(tmp_path / "plain", differ)
    expected = logits(loaded(folder, torch.float32))
    assert torch.equal(logits(lowbit.load_pretrained(folder)), expected)
    lowbit.export(folder, tmp_path / "out", "lowbit", scheme=PATTERNS[pattern])
    on_the_way = loaded(
        folder, torch.float32, quantization_config=lowbit.hf.LowbitConfig(PATTERNS[pattern])
    )
    models = [
        lowbit.load_pretrained(tmp_path / "out"),
        loaded(tmp_path / "out", torch.float32),
        on_the_way,
    ]
    named = [pattern in ("head", "both"), pattern in ("embedding", "both")]
    low = named if differ else [any(named)] * 2
    for model in models[:2]:
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differ
        assert is_low(model) == low
        assert torch.equal(logits(model), logits(models[0]))
        assert (logits(model) - expected).norm() < 0.03 * expected.norm()
    assert (on_the_way.lm_head.weight is on_the_way.model.embed_tokens.weight) is not differ
    # while it loads, transformers does not say yet whether the two tensors differ
    assert is_low(on_the_way) == [any(named)] * 2
    if not differ:
        assert torch.equal(logits(on_the_way), logits(models[0]))


def test_compressed_tensors(tmp_path: Path) -> None:
    folder = stored_twice(tmp_path / "plain")
    with pytest.raises(lowbit.formats.FormatError, match=r"weight of an embedding.*tied"):
        lowbit.export(folder, tmp_path / "no", scheme=PATTERNS["head"])
    report = lowbit.export(folder, tmp_path / "out", scheme=PATTERNS["head"], lossy=True)
    assert "stored plainly" in report.left[EMBEDDING]
    found = lowbit.load_pretrained(tmp_path / "out")
    assert torch.equal(
        logits(by_compressed_tensors(tmp_path / "out", torch.float32)), logits(found)
    )
    lowbit.export(stored_twice(tmp_path / "two", True), tmp_path / "2", scheme=PATTERNS["head"])
    found = lowbit.load_pretrained(tmp_path / "2")
    assert is_low(found) == [True, False]
    assert torch.equal(logits(by_compressed_tensors(tmp_path / "2", torch.float32)), logits(found))


def test_a_low_bit_embedding_beside_its_plain_copy(tmp_path: Path) -> None:
    """lowbit wrote such folders, which ended in "torch.equal of AffineTensor and Parameter"."""
    from safetensors.torch import load_file, save_file

    folder = stored_twice(tmp_path / "plain")
    lowbit.export(folder, tmp_path / "out", "lowbit", scheme=PATTERNS["embedding"])
    state = load_file(tmp_path / "out/model.safetensors")
    state[HEAD] = load_file(folder / "model.safetensors")[HEAD].clone()
    save_file(state, tmp_path / "out/model.safetensors", {"format": "pt"})
    models = [lowbit.load_pretrained(tmp_path / "out"), loaded(tmp_path / "out", torch.float32)]
    assert [is_low(model) for model in models] == [[False, True]] * 2
    assert torch.equal(*map(logits, models))


def test_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.formats.test_gguf import tokenizer

    folder = tokenizer(stored_twice(tmp_path / "plain", vocab_size=300))
    scheme = lowbit.Int8WeightOnly(32)
    patterns = {"lm_head": scheme, "*": scheme}
    lowbit.export(folder, tmp_path / "model.gguf", "gguf", scheme=patterns)
    assert HEAD not in dict(lowbit.formats.tensors(tmp_path / "model.gguf"))
    found = lowbit.load_pretrained(tmp_path / "model.gguf")
    assert found.lm_head.weight is found.model.embed_tokens.weight and is_low(found) == [True] * 2
    expected = logits(lowbit.load_pretrained(folder))
    assert (logits(found) - expected).norm() < 0.03 * expected.norm()
