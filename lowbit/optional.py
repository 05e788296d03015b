"""Optional packages: which is installed, if its release fits, and which extra of lowbit brings it.

The extras are those of lowbit's own metadata: of pyproject.toml in a source tree, else of what pip installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTED = {"torchtitan": (0, 3)}
"""Releases for which lowbit has an adapter, though no extra brings them: a user installs them for a later torch."""
_FOR_DEVELOPERS = {"docs", "test", "test-integrations"}
_LINE = re.compile(r"([\w.-]+)\s*(?:\[([\w,\s-]+)\])?\s*\(?([^;()]*)\)?\s*(?:;\s*(.*))?")
"""A requirement: its name, the extras in brackets, the releases, and the condition behind the semicolon."""


@dataclass(frozen=True)
class Package:
    """A package of an extra. releases: those that lowbit works with, as ">=5" or ">=0.2.2,<0.3"; "" for all."""

    name: str
    releases: str = ""

    def __str__(self) -> str:
        spaced = re.sub(r"(>=|<)", r"\1 ", self.releases).replace(",", ", ")
        return f"{self.name} {spaced}".rstrip()

    def version(self) -> str | None:
        """The version of the installed package; None: it is not installed."""
        return version(self.name)

    def obstacle(self) -> str | None:
        """Why lowbit cannot use the package, as the end of a sentence. None: it can."""
        found = self.version()
        if found is None:
            return "which is not installed"
        if release(found)[:2] == ADAPTED.get(self.name):
            return None
        for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", self.releases):
            if (release(found) >= release(bound)) != (sign == ">="):
                return f"and {found} is installed"
        return None


def version(name: str) -> str | None:
    """The version of the installed package of this name; None: it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_importable(module: str) -> bool:
    """True if Python finds this module, of whatever package: `onnxruntime` is also in onnxruntime-gpu."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def release(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: (0, 18, 0) of "0.18.0" and of "0.18"."""
    numbers = [int(n) for n in re.findall(r"\d+", version)[:3]]
    return (*numbers, *(0 for _ in range(3 - len(numbers))))


@functools.cache
def extras() -> dict[str, tuple[Package, ...]]:
    """The packages of each extra that a user installs, on this platform. Empty if lowbit has no metadata."""
    lines = {k: v for k, v in _lines().items() if k not in _FOR_DEVELOPERS}
    return {extra: tuple(dict.fromkeys(_packages(extra, lines))) for extra in lines}


def _lines() -> dict[str, list[str]]:
    """The requirements of each extra as they are written."""
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if project.is_file():
        import tomllib

        described = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if described.get("name") == "lowbit":
            return dict(described["optional-dependencies"])
    found: dict[str, list[str]] = {}
    try:
        about = importlib.metadata.distribution("lowbit")
    except importlib.metadata.PackageNotFoundError:
        return found
    for extra in about.metadata.get_all("Provides-Extra") or []:
        own = re.compile(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]")
        found[extra] = [line for line in about.requires or [] if own.search(line)]
    return found


def _packages(extra: str, lines: dict[str, list[str]]) -> Iterator[Package]:
    for line in lines.get(extra, []):
        match = _LINE.match(line)
        assert match is not None, line
        name, inner, releases, condition = match.groups()
        system = re.search(r"platform_system\s*==\s*['\"](\w+)['\"]", condition or "")
        if system is not None and system[1] != platform.system():
            continue
        if name == "lowbit":
            for other in (inner or "").split(","):
                yield from _packages(other.strip(), lines)
        else:
            yield Package(name, releases.replace(" ", ""))


def package(name: str, extra: str) -> Package:
    """The package `name` as the extra asks for it."""
    own = (p for p in extras().get(extra, ()) if _normal(p.name) == _normal(name))
    return next(own, Package(name))


def install(extra: str, upgrade: bool = False) -> str:
    return f"pip install {'--upgrade ' if upgrade else ''}'lowbit[{extra}]'"


def check(use: str, names: Iterable[str], extra: str, error: type[Exception] = ImportError) -> None:
    """Raise `error` if one of the packages is missing, or of a release that the extra does not allow.

    Args:
        use: what needs the packages, the beginning of the message: "the command line needs".
        names: of the packages, as pip knows them.
        extra: the extra of lowbit that brings the packages.
        error: the class of the exception.
    """
    for name in names:
        needed = package(name, extra)
        obstacle = needed.obstacle()
        if obstacle is not None:
            way_out = install(extra, upgrade=needed.version() is not None)
            raise error(f"{use} {needed}, {obstacle}: {way_out}")


def imported(module: str, use: str, extra: str, error: type[Exception] = ImportError) -> Any:
    """A module of an optional package, of any release. If it cannot be imported, raises `error`, as `check` does.

    Args: `module`, its dotted name; the others are those of `check`.
    """
    name = module.partition(".")[0]
    needed = package(name, extra)
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        missing = getattr(cause, "name", None) in (name, module)
        why = "which is not installed" if missing else f"which cannot be imported ({cause})"
        raise error(f"{use} {needed}, {why}: {install(extra)}") from cause


def bringing(module: str) -> tuple[str, str] | None:
    """The extra that brings a module, and the package of the extra that needs the module. None: no extra does.

    Packages that an installed package of the extra depends on count too.
    """
    wanted = _normal(module.partition(".")[0])
    for extra, packages in extras().items():
        for one in packages:
            if _normal(one.name) == wanted:
                return extra, one.name
    for extra, packages in extras().items():
        for one in packages:
            if one.version() is not None and wanted in _needs(one.name):
                return extra, one.name
    return None


def _needs(name: str) -> set[str]:
    """The packages that an installed package requires without extras of its own."""
    lines = importlib.metadata.requires(name) or []
    plain = (_LINE.match(line) for line in lines if "extra ==" not in line)
    return {_normal(found[1]) for found in plain if found is not None}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
