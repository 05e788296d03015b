"""A text as the windows of tokens that a model reads, to evaluate or to calibrate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.cli.language_model import tokenizer_of

_CHARACTERS, _SPARE = 8, 16
"""Characters that are read for a token at first, and tokens beyond those that are taken."""
_LONGEST = 2048
"""Tokens of a window unless the model takes fewer or --context says otherwise."""


def text_of(data: Path, size: int = -1) -> str:
    """The first `size` characters of a file; -1: all. Raises ValueError for a file that is not a text in UTF-8."""
    try:
        with data.open(encoding="utf-8") as file:
            return file.read(size)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{data} is not a text in UTF-8: {error.reason}; convert it first"
        ) from error
    except OSError as error:
        raise ValueError(
            f"--data {data} cannot be read: {error.strerror}; give a file of text"
        ) from error


def tokens_of(model: Path, data: Path, limit: int | None) -> Tensor:
    """The first `limit` tokens of the text `data` by the model's tokenizer: ids [N], int64, on the CPU. None: all.

    Raises ValueError for a text that is not UTF-8, as far as it is read, and for fewer than 2 tokens.
    """
    size = -1 if limit is None else _CHARACTERS * limit
    text, tokenizer = text_of(data, size), tokenizer_of(model)
    ids: list[int] = tokenizer(text)["input_ids"]
    # Where a part ends, its last tokens may differ from those of the whole text: read a few tokens more.
    while limit is not None and len(ids) < limit + _SPARE and len(text) == size:
        size *= 2
        text = text_of(data, size)
        ids = tokenizer(text)["input_ids"]
    if len(ids[:limit]) < 2:
        raise ValueError(f"{data} has {len(ids[:limit])} tokens; at least 2 are needed")
    return torch.tensor(ids[:limit])


def length_of(model: nn.Module, context: int | None) -> int:
    """Tokens of a window: `context`, or as many as the model takes, at most 2,048. Raises ValueError for a `context` of
    fewer than 2 tokens, or more than the model takes."""
    config: Any = model.config
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST
    if context is not None and not 2 <= context <= longest:
        raise ValueError(f"--context is {context}; this model takes 2 to {longest}")
    return min(longest, _LONGEST) if context is None else context


def windows_of(tokens: Tensor, length: int, batch: int = 1) -> list[Tensor]:
    """`tokens` [N] cut into windows of `length` T without overlap: [B, T] each, with B up to `batch`. What is left over
    makes a shorter window [1, T'] at the end, if it has at least two tokens."""
    whole = len(tokens) // length * length
    windows = list(tokens[:whole].view(-1, length).split(batch)) if whole else []
    rest = tokens[whole:]
    return [*windows, rest[None]] if len(rest) > 1 else windows
