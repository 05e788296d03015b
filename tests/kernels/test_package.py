"""Every op has the same parts: a module, a function and a torch op of one name, a README row, cases, a reference."""

from __future__ import annotations

import importlib
import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lowbit_kernels
from lowbit_kernels.runtime import compiling, launches
from lowbit_kernels.runtime.triton_runtime import jit
from tests.kernels.interpreted import in_new_process

FOLDER = Path(lowbit_kernels.__file__).parent
OPS = lowbit_kernels.__all__


def test_the_readme_and_the_package_list_every_op() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (FOLDER.parent / "README.md").read_text(), re.M)
    assert rows == lowbit_kernels.__all__
    sources = {p.stem: p.read_text() for p in FOLDER.rglob("*.py")}
    modules = {
        stem for stem, text in sources.items() if re.search(r"^(@|\w*_op = )op\(", text, re.M)
    }
    assert modules == set(lowbit_kernels.__all__)


def test_a_module_is_imported_at_its_first_use() -> None:
    code = """
import json, sys, lowbit_kernels as kernels
before = sorted(name for name in sys.modules if name.startswith("lowbit_kernels."))
kernels.round_rows.round_rows
print(json.dumps([before, "triton" in sys.modules, "lowbit_kernels.matmul.scaled_mm" in sys.modules]))
"""
    assert in_new_process(code)[::2] == [[], False]
    with pytest.raises(
        AttributeError, match=r"no attribute 'int4_linear'; its ops are .*'scaled_mm'"
    ):
        _ = lowbit_kernels.int4_linear  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", lowbit_kernels.__all__)
def test_no_function_hides_a_module(name: str) -> None:
    module = getattr(lowbit_kernels, name)
    assert isinstance(module, ModuleType) and module.__name__.endswith(f".{name}")
    assert inspect.isfunction(module.reference)


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_the_name_of_its_module(name: str) -> None:
    function = getattr(getattr(lowbit_kernels, name), name)
    assert inspect.isfunction(function) and function.__name__ == name and function.__doc__
    assert hasattr(torch.ops.lowbit, name)


OF_PARTS = ("linear_gradients", "linear_output")
"""Ops that are several others in one call, and report those."""


@pytest.mark.parametrize("name", OPS)
def test_an_op_reports_each_call_once(name: str) -> None:
    getattr(lowbit_kernels, name)
    for case in importlib.import_module(f"benchmarks.cases.{name}").CASES:
        if not case.large:
            arguments = case.arguments()
            with launches.counted() as calls:
                getattr(torch.ops.lowbit, name)(*arguments)
            reports = sum(n for (op, _), n in calls.items() if op == name)
            assert reports == (name not in OF_PARTS) and calls, case.name


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.cu")), ids=lambda p: p.name)
def test_a_kernel_and_its_launcher_share_a_stem(path: Path) -> None:
    assert path.with_suffix(".py").exists()


def test_triton_tells_that_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    told: list[str] = []

    def nothing(x):
        pass

    def shown(what: str) -> AbstractContextManager[object]:
        told.append(what)
        return nullcontext()

    monkeypatch.setattr(compiling, "shown", shown)
    monkeypatch.setattr(triton.JITFunction, "_do_compile", lambda self, key: told.append(key))
    for decorate in (jit, jit(do_not_specialize=["x"])):
        decorate(nothing)._do_compile("compiled")
    assert told == 2 * ["compiling a kernel for the GPU by Triton", "compiled"]
