#!/usr/bin/env python3
"""Check that a release's tag (v0.1.0), lowbit's version, CITATION.cff and CHANGELOG.md name the same version.

    .ci/check_version.py v0.1.0

It reads the files and imports nothing of lowbit. Without a tag it compares the files alone.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def found(path: str, pattern: str) -> str:
    """The first group of the first match in a file, or an error that names both."""
    match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        sys.exit(f"error: {path} has no line that matches {pattern}")
    return match[1]


def main(arguments: list[str]) -> None:
    version = found("lowbit/__init__.py", r'^__version__ = "(.+)"$')
    named = {
        "CITATION.cff": found("CITATION.cff", r"^version: (.+)$"),
        "the first release of CHANGELOG.md": found("CHANGELOG.md", r"^## \[?(\d[^\] ]*)"),
    }
    if arguments:
        named["the tag"] = arguments[0].removeprefix("v")
    for place, other in named.items():
        if other != version:
            sys.exit(
                f"error: {place} is {other}, and lowbit/__init__.py has {version}; make them equal"
            )
    print(f"version {version}")


if __name__ == "__main__":
    main(sys.argv[1:])
