"""The installed typer and rich: an error of one line where one is missing or too old."""

from __future__ import annotations

import importlib.metadata
import re

FIRST = {"typer": (0, 15), "rich": (13, 0)}
"""The first release of each that the command line runs with."""


def check_installed() -> None:
    """Raise ImportError where a package of the extra `cli` is missing, or older than `FIRST`."""
    for package, first in FIRST.items():
        needed = f"the command line needs {package} >= {'.'.join(map(str, first))}"
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise ImportError(
                f"{needed}, which is not installed: pip install 'lowbit[cli]'"
            ) from error
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < first:
            raise ImportError(
                f"{needed}, and {version} is installed: pip install --upgrade 'lowbit[cli]'"
            )
