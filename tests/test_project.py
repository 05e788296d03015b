"""The files by which people pick the project up agree with each other and with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lowbit

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INCLUDED = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]


def checked(*tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/check_version.py", *tag]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("tag", [(), (f"v{lowbit.__version__}",)], ids=["files", "tag"])
def test_all_places_name_one_version(tag: tuple[str, ...]) -> None:
    done = checked(*tag)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"version {lowbit.__version__}\n"


def test_another_tag_is_refused() -> None:
    done = checked("v9.9.9")
    assert done.returncode == 1 and "the tag is 9.9.9" in done.stderr


def test_the_sdist_names_files_that_exist() -> None:
    assert all((ROOT / name).exists() for name in INCLUDED)
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CITATION.cff", ".github", "examples"):
        assert name in INCLUDED


def test_the_developers_have_no_addresses() -> None:
    assert PROJECT["project"]["authors"] == [{"name": "lowbit developers"}]
    for name in ("CITATION.cff", "SECURITY.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|\S@\S", text), name


def test_the_release_publishes_what_passed() -> None:
    """The job that publishes needs the one that checks the tag and runs .ci/run, and has no other permission."""
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    build, publish = text.split("\n  publish:\n")
    steps = ('.ci/check_version.py "$GITHUB_REF_NAME"', ".ci/run\n", "-m build\n")
    assert [build.index(step) for step in steps] == sorted(build.index(step) for step in steps)
    assert "needs: build" in publish and "id-token: write" in publish
    assert "id-token" not in build and "contents: read" in build


def test_the_setup_commands_are_those_of_the_readme() -> None:
    """CONTRIBUTING.md sets up and tests as the README does."""
    (line,) = re.findall(r"^(python3 -m venv .* && .* && .* -m pytest -n 2)$",
                         (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)  # fmt: skip
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    venv, install, run = line.split(" && ")
    assert f"{venv} && {install} " in text and f"\n{run} " in text
