"""A text as the windows of tokens that a model reads, to evaluate or to calibrate it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.cli.language_model import tokenizer_of

_LONGEST = 2048
"""Tokens of a window unless the model takes fewer or --context says otherwise."""


def tokens_of(model: Path, data: Path, limit: int | None) -> Tensor:
    """The first `limit` tokens of the text `data` by the model's tokenizer: ids [N], int64, on the CPU.

    Raises ValueError for a text that is not UTF-8, and for fewer than 2 tokens.
    """
    try:
        text = data.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{data} is not a text in UTF-8: {error.reason}; convert it first"
        ) from error
    except OSError as error:
        raise ValueError(
            f"--data {data} cannot be read: {error.strerror}; give a file of text"
        ) from error
    ids: list[int] = tokenizer_of(model)(text)["input_ids"]
    if len(ids[:limit]) < 2:
        raise ValueError(f"{data} has {len(ids[:limit])} tokens; at least 2 are needed")
    return torch.tensor(ids[:limit])


def windows_of(tokens: Tensor, model: nn.Module, context: int | None) -> list[Tensor]:
    """`tokens` [N] cut into [1, T] each, without overlap. The last window may be shorter, and has at least two tokens.

    T is `context`, or as many tokens as the model takes, at most 2,048. Raises ValueError for a `context` of fewer than
    2 tokens, or more than the model takes.
    """
    config: Any = model.config
    longest = getattr(config, "max_position_embeddings", None) or _LONGEST
    if context is not None and not 2 <= context <= longest:
        raise ValueError(f"--context is {context}; this model takes 2 to {longest}")
    length = min(longest, _LONGEST) if context is None else context
    return [part[None] for part in tokens.split(length) if len(part) > 1]
