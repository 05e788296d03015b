"""Notebooks as pages: each runs while the site is built, and its cells and outputs become Markdown.

The committed notebooks hold no outputs, so a page always shows what the code of the same commit prints.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120
"""How long a cell may run. A whole notebook takes a part of it on one core."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make a page of every notebook."""
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        files.remove(file)
        path = Path(file.abs_src_path or "")
        page = File.generated(
            config, file.src_uri[: -len(".ipynb")] + ".md", content=rendered(path)
        )
        files.append(page)
    return files


def rendered(path: Path) -> str:
    """Run a notebook and return it as Markdown."""
    return "\n\n".join(part for cell in executed(path).cells for part in cell_as_markdown(cell))


def executed(path: Path) -> Any:
    """Run a notebook in a new folder, with the lowbit of this tree. An error of a cell is raised.

    The kernel talks through sockets in that folder, so that it opens no port that other users can read.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            nbformat.read(path, as_version=4),
            kernel_name="python3",
            timeout=SECONDS,
            resources={"metadata": {"path": folder}},
        )
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{folder}/kernel"
        return client.execute(env=environment)


def cell_as_markdown(cell: Any) -> list[str]:
    """The source of a cell, and behind it what it printed."""
    if cell.cell_type == "markdown":
        return [cell.source]
    printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    shown = [o.data for o in cell.outputs if o.output_type in ("display_data", "execute_result")]
    pictures = [data["image/png"].strip() for data in shown if "image/png" in data]
    texts = [data["text/plain"] for data in shown if "image/png" not in data]
    text = COLORS.sub("", "\n".join([printed, *texts])).strip("\n")
    parts = [f"```python\n{cell.source}\n```", f"```text\n{text}\n```" if text else ""]
    return [*filter(None, parts), *(f"![output](data:image/png;base64,{p})" for p in pictures)]
