"""The page of the command line's commands: the help that each prints, taken from the commands themselves."""

from __future__ import annotations

import contextlib
import io
import os

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PAGE = "api/commands.md"
COLUMNS = "100"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add a section for each command."""
    if page.file.src_uri != PAGE:
        return markdown
    import typer

    from lowbit.cli.app import app

    names = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    sections = [f"## lowbit {name}\n\n```text\n{help_of(name)}\n```" for name in names]
    return "\n\n".join([markdown, *sections])


def help_of(name: str) -> str:
    """What `lowbit NAME --help` prints on a terminal of 100 columns."""
    from lowbit.cli import main

    os.environ["COLUMNS"] = COLUMNS
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([name, "--help"])
    if code != 0:
        raise RuntimeError(f"lowbit {name} --help ended with exit code {code}")
    return printed.getvalue().strip()
