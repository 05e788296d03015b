"""The commands of the README and of docs/: programs parse their options, and what a command names exists.

tests/cli runs the commands of `lowbit`, tests/test_readme.py installs nothing but checks the README's two commands and
runs the tests of the tutorial, tests/recipes and tests/integrations run the recipes with smaller settings.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = {"lowbit": "tests/cli/test_examples.py", ".ci/run": ".github/workflows/ci.yml"}
"""Programs whose commands are run as they stand, and the file that does so."""
SHELLS = ("bash", "console", "sh", "shell")


def commands(page: Path) -> Iterator[str]:
    """Lines of blocks for a shell, joined where they go on, and `python -m …` within a text."""
    text = page.read_text(encoding="utf-8")
    for tag, block in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if tag in SHELLS:
            lines = block.replace("\\\n", " ").splitlines()
            yield from (part for line in lines for part in line.split(" && ") if part.strip())
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`((?:python -m|torchrun|pip install)\s[^`]+)`", prose)
    yield from (" ".join(command.split()) for command in found)


EACH = sorted({(command, page.stem) for page in PAGES for command in commands(page)})


class Parsed(Exception):
    """The program took its options."""


def test_commands_are_found() -> None:
    programs = {shlex.split(command, comments=True)[0] for command, _ in EACH}
    assert {"lowbit", "python", "torchrun", "pip", ".ci/run"} <= programs


@pytest.mark.parametrize(("command", "page"), EACH)
def test_a_command_is_right(command: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command, comments=True)
    program = program.removeprefix(".venv/bin/")
    if program in RUN_ELSEWHERE:
        assert program in (ROOT / RUN_ELSEWHERE[program]).read_text(encoding="utf-8")
        assert program == "lowbit" or (ROOT / program).stat().st_mode & 0o100
    elif program == "pip":
        installs(words)
    elif program in ("python", "torchrun"):
        at = words.index("-m")
        check_module(words[at + 1], words[at + 2 :], monkeypatch)
    else:
        assert (program, words) in [
            ("python3", ["-m", "venv", ".venv"]),
            ("pre-commit", ["install"]),
        ]


def installs(words: list[str]) -> None:
    """`pip install` names extras of lowbit that exist."""
    named = [re.fullmatch(r"(?:lowbit|\.)\[([\w,-]+)\]", word) for word in words]
    extras = [extra for match in named if match for extra in match[1].split(",")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert extras and set(extras) <= settings["project"]["optional-dependencies"].keys()


def check_module(module: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program parse its options, and stop it then."""
    if module == "pytest":
        return check_pytest(options)
    if not options or module == "mkdocs":  # a program that a text names, or one of another package
        assert importlib.util.find_spec(module) is not None or module == "mkdocs"
        return None
    files = [options[i + 1] for i, option in enumerate(options) if option.endswith("config_file")]
    assert all((ROOT / name).exists() for name in files if "/" in name)
    if module in ("torchtitan.train", "recipes.torchtitan.train"):  # torchtitan parses these itself
        tested = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests/integrations").glob("*.py"))
        assert "recipes.torchtitan.train" in tested
        return None
    if module.startswith("recipes.torchtitan"):
        pytest.importorskip("torchtitan")
    monkeypatch.setattr(sys, "argv", [module, *options])
    stop_after_parsing(monkeypatch)
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def stop_after_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both methods of ArgumentParser raise `Parsed` where they would return to the program."""
    known = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        raise Parsed(known(self, *args, **kwargs))

    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        _, rest = known(self, *args, **kwargs)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)


def check_pytest(options: list[str]) -> None:
    """Markers exist, and a named file is one that tests/test_readme.py runs."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = {m.split(":")[0] for m in settings["tool"]["pytest"]["ini_options"]["markers"]}
    for option in options:
        if " and " in option:
            assert set(re.findall(r"\w+", option)) - {"and", "not", "or"} <= known
        elif option.endswith(".py"):
            assert f'"{Path(option).stem}"' in (ROOT / "tests/test_readme.py").read_text("utf-8")
        else:
            assert option in ("-q", "-n", "2", "-m")
