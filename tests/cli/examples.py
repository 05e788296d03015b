"""The examples of the help texts and of the pages, as lines of a shell."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs"


def of_help() -> list[str]:
    """Read off the sources, so that this works without typer."""
    found = []
    for path in sorted((ROOT / "lowbit/cli").glob("*.py")):
        for block in re.findall(
            r"    Examples:\n((?:      lowbit .*\n)+)", path.read_text("utf-8")
        ):
            found += [line.strip() for line in block.splitlines()]
    return found


def of_page(name: str = "command-line") -> list[str]:
    """In order; a later one works on what an earlier one wrote."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("lowbit ")]


NAMES = [str(p.relative_to(FOLDER).with_suffix("")) for p in sorted(FOLDER.rglob("*.md"))]
PAGES = [name for name in NAMES if of_page(name)]
"""The pages that show commands of lowbit in blocks of bash."""


def beside_pages() -> list[str]:
    """The examples of the help texts that no page has: the tests run those of a page with the page."""
    on_pages = {line for page in PAGES for line in of_page(page)}
    return [line for line in of_help() if line not in on_pages]


def needs_transformers(line: str) -> bool:
    options = ("--data", "--method", "estimate model/config.json", "inspect model.gguf")
    return command_of(line) in ("eval", "generate") or any(one in line for one in options)


def command_of(line: str) -> str:
    return line.split()[1]
