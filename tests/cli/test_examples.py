"""Every example of the help texts and of the pages runs. tests/integrations runs those of transformers."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lowbit.cli import main
from tests.cli.examples import (
    PAGES,
    beside_pages,
    command_of,
    needs_transformers,
    of_help,
    of_page,
)

HELP = of_help()
ALONE = [line for line in beside_pages() if not needs_transformers(line)]


@pytest.mark.parametrize("line", ALONE)
def test_examples_of_the_help_run(line: str, home: Path) -> None:
    if "--out model-int4" not in line:
        assert main(["quantize", "model", "--out", "model-int4"]) == 0
    assert main(shlex.split(line)[1:]) == 0


def test_every_command_shows_its_examples(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole, on one line each, so that they can be copied."""
    from lowbit.cli.app import app

    names = [command.name for command in app.registered_commands]
    assert {*names} == {command_of(line) for line in HELP}
    for name in names:
        assert main([str(name), "--help"]) == 0
        shown = capsys.readouterr().out.splitlines()
        own = [line for line in HELP if command_of(line) == name]
        assert own == [line.strip() for line in shown if line.startswith("    lowbit ")]


def test_the_page_shows_every_command() -> None:
    assert {command_of(line) for line in of_page()} == {command_of(line) for line in HELP}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, home: Path) -> None:
    for line in of_page(page):
        if not needs_transformers(line):
            assert main(shlex.split(line)[1:]) == 0, line
