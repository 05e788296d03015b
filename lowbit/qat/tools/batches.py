"""The forms of a batch that `lowbit.qat.report` and `lowbit.qat.train_blocks` take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a mapping of keyword arguments, a tuple or list of arguments, or one argument."""
    if isinstance(batch, Mapping):  # BatchEncoding of transformers is a UserDict, which is one
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
