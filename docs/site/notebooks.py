"""Notebooks as pages: each runs while the site is built, and its cells and outputs become Markdown.

The committed notebooks hold no outputs, so a page always shows what the code of the same commit prints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelManager
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient

SECONDS = 300


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
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(
        kernel_name="python3", transport="ipc"
    )  # no port that others can read
    NotebookClient(notebook, km=manager, timeout=SECONDS).execute()
    return "\n\n".join(part for cell in notebook.cells for part in cell_as_markdown(cell))


def cell_as_markdown(cell: Any) -> list[str]:
    """The source of a cell, and behind it what it printed."""
    if cell.cell_type == "markdown":
        return [cell.source]
    return [f"```python\n{cell.source}\n```", *(output_as_markdown(o) for o in cell.outputs)]


def output_as_markdown(output: Any) -> str:
    """A picture, or text in a block."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{data['image/png'].strip()})"
    text = output.text if output.output_type == "stream" else data["text/plain"]
    return f"```text\n{text.rstrip()}\n```"
