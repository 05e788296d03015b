"""Functions that are called once another package's module is imported."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

from lowbit_kernels.runtime.when_imported import when_imported


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
