"""The tables of docs/coming-from.md: calls of others exist where the package is installed, ours run in the docs."""

from __future__ import annotations

import functools
import importlib
import inspect
import re

import pytest

from tests.test_readme import ALONE, PAGES, ROOT, blocks, prose

PAGE = ROOT / "docs/coming-from.md"
LIBRARIES = ("torchao", "bitsandbytes", "llm-compressor", "GPTQModel", "unsloth")
NAMES = {"bnb": "bitsandbytes"}
"""How the page abbreviates a package."""


@functools.cache
def rows() -> list[tuple[str, str]]:
    """The cells of all tables, without their headings."""
    lines = [line for line in prose(PAGE).splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return [(left, right) for left, right in cells if left not in LIBRARIES]


def calls(cell: str, name: str) -> list[str]:
    """What matches the expression within backticks."""
    return [found for code in re.findall(r"`([^`]+)`", cell) for found in re.findall(name, code)]


OURS = sorted(
    {n for _, right in rows() for n in calls(right, r"\blowbit(?:\.\w+)+|\b[A-Z]\w+(?=\()")}
)
THEIRS = sorted({n for left, _ in rows() for n in calls(left, r"\b(?:torchao|bnb)(?:\.\w+)+")})


def found(name: str, package: str) -> object:
    """The object that a dotted name means."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join((package, *parts[1:end])))
        except ImportError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise AssertionError(name)


def test_every_library_has_a_table() -> None:
    headings = re.findall(r"^\| ([\w-]+) \| lowbit \|$", prose(PAGE), re.MULTILINE)
    assert {*headings} == {*LIBRARIES} and len(rows()) > 60


@pytest.mark.parametrize("name", OURS)
def test_our_calls_run_in_the_docs(name: str) -> None:
    """In a block of some page, all of which run in another test."""
    code = "\n".join(block for page in PAGES for block in blocks(page, "python"))
    last = name.rpartition(".")[2]
    assert re.search(rf"\b{last}\b", code), name
    full = name if name.startswith("lowbit.") else f"lowbit.{name}"
    if not name.startswith(tuple(ALONE)) and name != "LowbitConfig":
        assert found(full, "lowbit") is not None


@pytest.mark.parametrize("name", THEIRS)
def test_their_calls_exist(name: str) -> None:
    package = NAMES.get(name.partition(".")[0], name.partition(".")[0])
    pytest.importorskip(package)
    assert found(name, package) is not None


def test_the_calls_of_gptqmodel_exist() -> None:
    gptqmodel = pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    left = " ".join(left for left, _ in rows())
    assert "GPTQModel.load(" in left and "model.quantize(" in left and "model.save(" in left
    assert callable(gptqmodel.GPTQModel.load)
    known = inspect.signature(gptqmodel.QuantizeConfig.__init__).parameters
    fields = getattr(gptqmodel.QuantizeConfig, "__dataclass_fields__", {})
    for setting in re.findall(r"QuantizeConfig\((\w+)=", left):
        assert setting in known or setting in fields, setting
