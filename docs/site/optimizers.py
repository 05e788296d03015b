"""The docstrings of optimizers as `help()` shows them: their classes complete them with the options that all take.

mkdocstrings reads the sources, where a class such as `AdamW4bit` has one line.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class CompleteDocstrings(griffe.Extension):
    """Gives mkdocstrings the docstrings of the imported classes."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.path.startswith("lowbit.optim.") and cls.docstring is not None:
            made = getattr(importlib.import_module(cls.module.path), cls.name, None)
            if made is not None and made.__doc__:
                cls.docstring.value = inspect.cleandoc(made.__doc__)
