"""The notebooks of docs/notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 60
"""How long a cell may run; the whole notebook takes a part of it on one core."""

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["convert", "qat", "train"]


@each_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    for package in ("matplotlib", "safetensors", "typer", "rich"):
        pytest.importorskip(package)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        kernel_name="python3",
        timeout=SECONDS,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.create_kernel_manager().transport = "ipc"  # no port that others can read
    client.execute(env=environment)  # raises for a cell that raises


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
