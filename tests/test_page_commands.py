"""The commands of the README and of docs/: programs parse their options, and what a command names exists.

They stop there, because the commands install packages, or train for minutes or on several GPUs. tests/cli runs the
commands of `lowbit`. tests/test_readme.py checks the README's two commands and runs the tests of the tutorial.
tests/recipes and tests/integrations run the recipes with smaller settings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import PAGES, ROOT

RUN_ELSEWHERE = {
    "lowbit": ("tests/cli/test_examples.py", "lowbit"),
    ".ci/run": (".github/workflows/ci.yml", ".ci/run"),
    "g++": ("tests/formats/test_programs.py", "-std=c++20"),
    "./main": ("tests/formats/test_programs.py", "main.cpp"),
}
"""Programs whose commands are run as they stand, or with the compiler of the machine; the file that does so."""
NOT_RUN = {"vllm": "tests/integrations/test_vllm_engine.py"}
"""Programs that the tests do not install, and the file that runs their engine where somebody did."""
SHELLS = ("bash", "console")
BLOCKS = {
    "bash": "tests/test_page_commands.py",
    "cpp": "tests/formats/test_programs.py",
    "console": "tests/test_page_commands.py",
    "py": "tests/integrations/test_launchers.py",
    "python": "tests/test_readme.py",
    "text": "tests/test_readme.py",
    "toml": "tests/integrations/test_torchtitan_settings.py",
    "yaml": "tests/integrations/test_axolotl.py",
}
"""The languages of blocks, and the file that runs them. It compares those of `text` with what the Python prints."""
DIAGRAMS = {"docs/design.md"}
"""Pages whose blocks without a language are drawings."""


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


def texts() -> dict[str, str]:
    """Every page of the site that a person wrote, and the texts between the cells of notebooks."""
    paths = [ROOT / "README.md", ROOT / "kernels/README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in paths}
    for path in (ROOT / "docs").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        shown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        found[str(path.relative_to(ROOT))] = "\n".join(shown)
    return found


@pytest.mark.parametrize(("name", "text"), texts().items(), ids=texts().keys())
def test_a_test_runs_every_block(name: str, text: str) -> None:
    """A fence is a line of three backticks and a language. The tests do not find any other, such as an indented one."""
    fences = re.findall(r"^[ \t>]*(?:```|~~~).*$", text, re.MULTILINE)
    opened = fences[::2]
    assert set(fences[1::2]) <= {"```"}
    allowed = {f"```{kind}" for kind in BLOCKS} | ({"```"} if name in DIAGRAMS else set())
    assert set(opened) <= allowed
    assert ROOT / name in PAGES or not opened, (
        "the tests run the blocks of the pages that tests/test_readme.py lists"
    )


@pytest.mark.parametrize(("kind", "path"), BLOCKS.items())
def test_the_file_that_runs_blocks_names_their_language(kind: str, path: str) -> None:
    assert re.search(f'"(```)?{kind}\\b', (ROOT / path).read_text(encoding="utf-8"))


class Parsed(Exception):
    """The program took its options."""


def test_commands_are_found() -> None:
    programs = {shlex.split(command, comments=True)[0] for command, _ in EACH}
    assert {"lowbit", "python", "torchrun", "pip", ".ci/run"} <= programs


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import of package:RuntimeWarning")
@pytest.mark.parametrize(("command", "page"), EACH)
def test_a_command_is_right(command: str, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_by = re.fullmatch(r"\w+=\$\((.*)\)", command)  # a variable of the shell
    program, *words = shlex.split(set_by[1] if set_by else command, comments=True)
    program = program.removeprefix(".venv/bin/")
    if program in RUN_ELSEWHERE:
        path, word = RUN_ELSEWHERE[program]
        assert word in (ROOT / path).read_text(encoding="utf-8")
        assert program != ".ci/run" or (ROOT / program).stat().st_mode & 0o100
    elif program in NOT_RUN:
        assert (ROOT / NOT_RUN[program]).exists()
    elif program == "pip":
        installs(words)
    elif program == "hf":  # downloads what a snippet of the page reads, which tests make
        (path,) = [p for p in PAGES if p.stem == page]
        assert words[0] == "download" and f'"{words[-1]}"' in path.read_text(encoding="utf-8")
    elif program in ("python", "torchrun") and words[0] == "-c":
        compile(words[1], "page", "exec")
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
    if module == "mkdocs":
        name, *rest = options
        program = pytest.importorskip("mkdocs.__main__").cli
        program.commands[name].make_context(name, rest)  # parses the options
        return None
    if not options:  # a program that a text names
        assert importlib.util.find_spec(module) is not None
        return None
    files = [options[i + 1] for i, option in enumerate(options) if option.endswith("config_file")]
    assert all((ROOT / name).exists() for name in files if "/" in name)
    if module in ("torchtitan.train", "recipes.torchtitan.train"):  # torchtitan parses these itself
        tested = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests/integrations").glob("*.py"))
        assert "recipes.torchtitan.train" in tested
        return None
    if module.startswith("recipes.torchtitan"):
        pytest.importorskip("torchtitan")
    if module.startswith(("recipes.packed", "recipes.one_card")):
        pytest.importorskip("transformers")
        if module != "recipes.one_card":
            pytest.importorskip("peft")
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
    known = {re.split("[:(]", m)[0] for m in settings["tool"]["pytest"]["ini_options"]["markers"]}
    for option in options:
        if " and " in option:
            assert set(re.findall(r"\w+", option)) - {"and", "not", "or"} <= known
        elif option.endswith(".py"):
            assert f'"{Path(option).stem}"' in (ROOT / "tests/test_readme.py").read_text("utf-8")
        else:
            assert option in ("-q", "-n", "2", "-m") or option in known
