"""Every op has the same parts: a function in its module, a torch op, a row of the README, cases and a reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowbit_kernels

FOLDER = Path(lowbit_kernels.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if "LIBRARY.define(" in p.read_text())


def ops_of(module: ModuleType) -> list[str]:
    """The public functions of a module that are also torch ops."""
    return [
        name
        for name, member in vars(module).items()
        if inspect.isfunction(member)
        and member.__module__ == module.__name__
        and not name.startswith("_")
        and hasattr(torch.ops.lowbit, name)
    ]


OPS = [
    (stem, op)
    for stem in MODULES
    for op in ops_of(importlib.import_module(f"lowbit_kernels.{stem}"))
]


def test_the_readme_lists_every_op() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER.parent / "README.md").read_text(), re.M)
    assert sorted(rows) == sorted(op for _, op in OPS)
    assert {stem for stem, _ in OPS} == set(MODULES)


@pytest.mark.parametrize(("stem", "op"), OPS, ids=[op for _, op in OPS])
def test_an_op_and_its_module(stem: str, op: str) -> None:
    module = importlib.import_module(f"lowbit_kernels.{stem}")
    assert getattr(module, op).__doc__ and inspect.isfunction(module.reference)
    cases = (
        module if hasattr(module, "CASES") else importlib.import_module(f"benchmarks.cases.{stem}")
    )
    assert cases.CASES
