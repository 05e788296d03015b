"""The notebooks of docs/notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

for package in ("nbclient", "ipykernel", "mkdocs"):  # of the extra `docs`
    pytest.importorskip(package)
nbformat = pytest.importorskip("nbformat")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["convert", "qat", "train"]


@pytest.mark.pages
@pytest.mark.timeout(600)
def test_the_site_is_built_and_its_notebooks_run(tmp_path: Path) -> None:
    """`--strict` makes a warning an error; with `--quiet` it would see none. The variable stops a notice of the theme
    about later releases, which is not a warning."""
    for package in ("matplotlib", "safetensors", "typer", "rich"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in NOTEBOOKS:
        page = (tmp_path / "notebooks" / path.stem / "index.html").read_text()
        cells = nbformat.read(path, as_version=4).cells
        code = sum(cell.cell_type == "code" for cell in cells)
        assert "<h1" in page and "\x1b" not in page
        assert page.count('<div class="highlight">') > code  # outputs as text besides
        assert ("data:image/png;base64," in page) == (path.stem == "train")


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
