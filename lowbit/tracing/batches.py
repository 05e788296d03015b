"""Batches, as the flows that run a model over data take them, and the mode in which the model runs on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a mapping of keyword arguments, a tuple or list of arguments, or one argument."""
    if isinstance(batch, Mapping):  # BatchEncoding of transformers is a UserDict, which is one
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The context in which the model runs in eval mode. Afterwards each module has the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
