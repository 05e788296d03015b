"""Calls a function once a module of another package is imported, by whom and whenever that may be."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any


def when_imported(name: str, call: Callable[[ModuleType], object]) -> None:
    """`call` with the module of this name: now if it is imported already, else at the end of its import."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder(MetaPathFinder):
    """A search for the module alone changes nothing."""

    def __init__(self, name: str, call: Callable[[ModuleType], object]) -> None:
        self._name, self._call = name, call
        self._asks = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name or self._asks:
            return None
        self._asks = True  # the other finders
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asks = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def then_call(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._call(module)

            loader.exec_module = then_call
        return spec
