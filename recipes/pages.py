"""A report as report.md, and as report.html with its figures inside."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

from markdown_it import MarkdownIt

from recipes.runs import write_text

STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 62rem; margin: 2.5rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 2.4rem; font-size: 1.25rem; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .92rem; margin: .8rem 0; }
th, td { padding: .35rem .8rem; border-bottom: 1px solid #dfe3e8; font-variant-numeric: tabular-nums; }
img { max-width: 100%; } pre { background: #f5f7f9; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; }
"""


def write(folder: Path, markdown: str) -> None:
    """Write `report.md`, which refers to figures in `folder`, and `report.html`."""
    write_text(folder / "report.md", markdown)
    write_text(folder / "report.html", to_html(folder, markdown))


def to_html(folder: Path, markdown: str) -> str:
    """One file with everything in it. Raw HTML in the text is escaped: models may write it."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    title = markdown.splitlines()[0].removeprefix("# ")

    def inside(match: re.Match[str]) -> str:
        image = base64.b64encode((folder / match[1]).read_bytes()).decode()
        return f'<img src="data:image/png;base64,{image}"'

    body = re.sub(r'<img src="([\w.-]+)"', inside, parser.render(markdown))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}</body></html>\n"
    )


def table(header: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> str:
    """A Markdown table; the columns `left` are aligned left, the others right."""
    alignment = ["---" if i in left else "---:" for i in range(len(header))]
    lines = ([cell.replace("|", "\\|") for cell in row] for row in [header, alignment, *rows])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def code(text: str) -> str:
    """A fenced block of Python, with a fence that is not in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}python\n{text}\n{fence}"


def size(count: int) -> str:
    """Bytes in powers of 1000."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"


def peak_memory() -> str:
    """The most memory that this process has held."""
    if sys.platform == "win32":
        return "memory not measured on Windows"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return f"{peak / 2**30:.2f} GiB at most"
