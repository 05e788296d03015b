"""Every op is found alike: a function of the package, a torch op, a row of the README, cases and a reference."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import lowbit_kernels

FOLDER = Path(lowbit_kernels.__file__).parent


def test_the_readme_lists_every_op() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER.parent / "README.md").read_text(), re.M)
    assert sorted(rows) == lowbit_kernels.__all__
    modules = {p.stem for p in FOLDER.glob("*.py") if "LIBRARY.define(" in p.read_text()}
    functions = [getattr(lowbit_kernels, name) for name in lowbit_kernels.__all__]
    assert {f.__module__ for f in functions} == {f"lowbit_kernels.{stem}" for stem in modules}


@pytest.mark.parametrize("name", lowbit_kernels.__all__)
def test_an_op_and_its_module(name: str) -> None:
    function = getattr(lowbit_kernels, name)
    assert inspect.isfunction(function) and function.__name__ == name and function.__doc__
    assert hasattr(torch.ops.lowbit, name)
    module = importlib.import_module(function.__module__)
    assert getattr(module, name) is function
    assert module.CASES and inspect.isfunction(module.reference)
