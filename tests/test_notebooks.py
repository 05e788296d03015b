"""The notebooks of docs/notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

for package in ("nbclient", "ipykernel", "mkdocs"):  # of the extra `docs`
    pytest.importorskip(package)
nbformat = pytest.importorskip("nbformat")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """docs/site/notebooks.py, which runs the notebooks for the site. mkdocs loads it by its path too."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs/site/notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["convert", "qat", "train"]


@pytest.mark.pages
@each_notebook
def test_a_notebook_runs(path: Path, pages: ModuleType) -> None:
    for package in ("matplotlib", "safetensors", "typer", "rich"):
        pytest.importorskip(package)
    shown = pages.rendered(path)  # raises for a cell that raises
    assert shown.startswith("# ")
    assert "```python\n" in shown and "```text\n" in shown and "\x1b" not in shown
    assert ("data:image/png;base64," in shown) == (path.stem != "qat")


@each_notebook
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    """A diff shows what a person changed, and no output is older than the code."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]


@each_notebook
def test_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links
    assert not [link for link in links if not (FOLDER / link).exists()]
