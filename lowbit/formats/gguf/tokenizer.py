"""The tokenizer of a GGUF file, from the tokenizer.json of a folder.

| kind of tokenizer.json                | tokenizer.ggml.model | what decides the merges   |
|---------------------------------------|----------------------|---------------------------|
| byte-level BPE (Llama 3, Qwen)        | gpt2                 | tokenizer.ggml.merges     |
| SentencePiece's BPE with bytes as a fallback (Llama 2, Mistral) | llama | tokenizer.ggml.scores |

llama.cpp first joins the neighbours whose joined token has the highest score. The score of a token is minus the place
of the first merge in tokenizer.json that makes it. A token that no merge makes has the lowest score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.formats.base import FormatError
from lowbit.formats.folder import read_json
from lowbit.formats.gguf.llama import given

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
_SPLITS = {"(?i:'s|'t|'re|'ve|'m|'ll|'d)": "llama-bpe", "|\\p{N}|": "qwen2"}
"""A part of the pre-tokenizer's pattern, and llama.cpp's name of that pre-tokenizer."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"
"""The letter that SentencePiece writes in place of a space."""


def add_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any], gguf: Any) -> None:
    """Add the tokenizer of `folder` to a `gguf.GGUFWriter`. Rows of the embedding without a token get an unused token.

    Args: `config`, that of the model; `gguf`, the package. Raises FormatError if the folder has no tokenizer.json of
    the kinds in the module's table.
    """
    path = folder / "tokenizer.json"
    found = read_json(path) if path.is_file() else {}
    model = found.get("model") or {}
    if model.get("type") != "BPE" or not model.get("merges"):
        raise FormatError(
            "llama.cpp needs a tokenizer, and lowbit writes byte-level BPE ones and SentencePiece's BPE: give a "
            "tokenizer.json with merges beside the model, or tokenizer="
        )
    is_sentencepiece = bool(model.get("byte_fallback"))
    size = int(given(config, "vocab_size"))
    tokens = _tokens(found, size, is_sentencepiece)
    listed = [tokens.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    if is_sentencepiece:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(model, [text for text, _ in listed]))
        writer.add_add_space_prefix(_begins_with_space(found))
    else:
        pattern = json.dumps(found.get("pre_tokenizer"), ensure_ascii=False)
        kinds = (name for part, name in _SPLITS.items() if json.dumps(part)[1:-1] in pattern)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(next(kinds, "gpt-2"))
    writer.add_token_list([text for text, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    special = gguf.SpecialVocab(folder, load_merges=not is_sentencepiece, n_vocab=size)
    special.add_to_gguf(writer, quiet=True)


def _tokens(
    found: Mapping[str, Any], size: int, is_sentencepiece: bool
) -> dict[int, tuple[str, int]]:
    """Text and type of each token by its number. Raises FormatError for a number beyond the vocabulary."""
    model = found["model"]
    tokens = {i: (text, NORMAL) for text, i in model["vocab"].items()}
    if is_sentencepiece:
        tokens = {i: (t, BYTE if _BYTE.fullmatch(t) else kind) for i, (t, kind) in tokens.items()}
    for entry in found.get("added_tokens", ()):
        kind = CONTROL if entry.get("special") else USER_DEFINED
        tokens[entry["id"]] = (entry["content"], kind)
    if is_sentencepiece and model.get("unk_token") in model["vocab"]:
        tokens[model["vocab"][model["unk_token"]]] = (model["unk_token"], UNKNOWN)
    if max(tokens) >= size:
        raise FormatError(
            f"its tokenizer has the token {max(tokens)}, and its vocabulary is {size}"
        )
    return tokens


def _scores(model: Mapping[str, Any], texts: list[str]) -> list[float]:
    places: dict[str, int] = {}
    for place, merge in enumerate(model["merges"]):
        text = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
        places.setdefault(text, place)
    return [-float(places.get(text, len(model["merges"]))) for text in texts]


def _begins_with_space(found: Mapping[str, Any]) -> bool:
    """True if the tokenizer puts a space before a text."""
    before, normal = found.get("pre_tokenizer") or {}, found.get("normalizer") or {}
    steps = normal.get("normalizers", [normal])
    prepends = any(s.get("type") == "Prepend" and s.get("prepend") == SPACE for s in steps)
    return prepends or before.get("prepend_scheme", "never") != "never"
