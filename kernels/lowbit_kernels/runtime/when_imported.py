"""Calls a function once a module of another package is imported, by whom and whenever that may be."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_Call = Callable[[ModuleType], object]


def when_imported(name: str, call: _Call) -> None:
    """`call` with the module of this name: now if it is imported already, else at the end of its import."""
    if sys.modules.get(name) is not None:
        call(importlib.import_module(name))  # waits for a thread that still imports it
    else:
        _FINDER.calls.setdefault(name, []).append(call)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)


class _Finder(MetaPathFinder):
    """One for all modules, since Python asks it at each import. A search for a module alone changes nothing."""

    def __init__(self) -> None:
        self.calls: dict[str, list[_Call]] = {}
        self._asked: set[str] = set()
        """The names that the other finders are asked for at this time, in any thread."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.calls or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.discard(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def then_call(module: ModuleType) -> None:
                execute(module)
                for call in self.calls.pop(name, ()):
                    call(module)
                if not self.calls and self in sys.meta_path:
                    sys.meta_path.remove(self)

            loader.exec_module = then_call
        return spec


_FINDER = _Finder()
