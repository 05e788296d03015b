"""Calls at the import of a module, by any thread."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType

import pytest

from lowbit_kernels.runtime import when_imported as own
from lowbit_kernels.runtime.when_imported import when_imported


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of two modules that nobody has imported."""
    names = ["watched_one", "watched_two"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("import time\n\ntime.sleep(0.2)\nmade = 1\n")
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        del sys.modules[name]  # restored by the line before, to what it was: nothing
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own, "_FINDER", own._Finder())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.invalidate_caches()
    return names


def test_a_call_at_the_end_of_the_import_or_now(modules: list[str]) -> None:
    seen: list[int] = []
    when_imported(modules[0], lambda module: seen.append(module.made))
    assert importlib.util.find_spec(modules[0]) is not None and seen == []
    importlib.import_module(modules[0])
    when_imported(modules[0], lambda module: seen.append(module.made + 1))
    assert seen == [1, 2] and own._FINDER not in sys.meta_path


def test_a_module_that_another_thread_still_imports(modules: list[str]) -> None:
    seen: list[int] = []
    thread = threading.Thread(target=importlib.import_module, args=modules[1:])
    thread.start()
    while modules[1] not in sys.modules:
        time.sleep(0.001)
    when_imported(modules[1], lambda module: seen.append(module.made))
    thread.join(10)
    assert seen == [1]


class ImportsFirst(MetaPathFinder):
    """Imports a module when it is asked for another one, as a second thread may do at that time."""

    def __init__(self, asked: str, first: str) -> None:
        self.asked, self.first = asked, first

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == self.asked:
            importlib.import_module(self.first)


def test_a_module_imported_while_another_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    names = "searched_by_test", "imported_by_test"
    for name in names:
        (tmp_path / f"{name}.py").write_text("")
        when_imported(name, lambda module: found.append(module.__name__))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        sys, "meta_path", [*sys.meta_path[:1], ImportsFirst(*names), *sys.meta_path[1:]]
    )
    for name in names:
        importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
    assert sorted(found) == sorted(names)
