"""Pages of the site that lie outside of docs/, and links that work on the site and on the repository's web page.

The pages link each other by their places in the repository, such as `../benchmarks/LOG.md`. The site shows docs/ at its
root, README.md as its first page, and every other file that a page links to under its place in the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def in_site(path: str) -> str:
    """The place in the site of a file of the repository: both relative, with slashes. A notebook is a page there."""
    if path == "README.md":
        return "index.md"
    return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))


def in_repository(uri: str) -> str:
    """The inverse of `in_site`."""
    if uri == "index.md":
        return "README.md"
    names = (f"docs/{uri}", f"docs/{uri.removesuffix('.md')}.ipynb")
    return next((name for name in names if (ROOT / name).exists()), uri)


def linked(path: str) -> set[str]:
    """The files of the repository that a page links to, by the places in the repository."""
    text = FENCE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), t)) for t in LINK.findall(text)
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md and, one after the other, what the pages link to."""
    todo = {"README.md"} | {f"docs/{file.src_uri}" for file in files.documentation_pages()}
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        uri = in_site(path)
        if files.get_file_from_path(uri) is None and (ROOT / path).is_file():
            files.append(File.generated(config, uri, abs_src_path=os.fspath(ROOT / path)))
        if path.endswith(".md") and (ROOT / path).is_file():
            todo |= linked(path) - seen
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between places in the repository into links between places in the site."""
    folder = posixpath.dirname(in_repository(page.file.src_uri))

    def moved(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        return posixpath.relpath(in_site(path), posixpath.dirname(page.file.src_uri) or ".")

    parts = re.split(f"({FENCE.pattern})", markdown, flags=FENCE.flags)
    return "".join(p if p.startswith("```") else LINK.sub(moved, p) for p in parts)
