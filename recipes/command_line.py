"""The command lines of the recipes: mistakes in one line, exit statuses, and `--set NAME=VALUE`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any

from lowbit.formats import FormatError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
    int | None: ((int, NoneType), "a whole number or None"),
    tuple[int, ...]: ((tuple,), "whole numbers with commas"),
}
"""By type hint: types of accepted values, and their name for people."""


class UserError(Exception):
    """A mistake that the user can correct. The program prints it as one line and exits with status 2."""


def exit_status(program: Callable[[], None]) -> int:
    """Run `program`: 0 when it returns, 2 after an error that the user can correct, 130 after Ctrl-C."""
    try:
        program()
    except KeyboardInterrupt as stop:
        print(f"interrupted: {stop}" if str(stop) else "interrupted")
        return EXIT_INTERRUPTED
    except (UserError, FormatError, OSError) as error:  # OSError: a full disk, a read-only folder
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def parser_of(
    module: str, description: str, presets: Iterable[str], about_presets: str = ""
) -> argparse.ArgumentParser:
    """A parser of the arguments that all recipes with presets take: --preset, --data, and --set.

    Args:
        module: the recipe's module under `recipes`.
        description: one sentence for --help.
        presets: accepted names of --preset.
        about_presets: said of them in --help, before the default.
    """
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{module}", description=description)
    add = parser.add_argument
    add(
        "--preset", choices=tuple(presets), help=f"{about_presets}default: gpu with CUDA, else tiny"
    )
    add("--data", type=Path, metavar="FILE_OR_FOLDER",
        help="your own UTF-8 text (default: the preset's corpus)")  # fmt: skip
    add("--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="change a setting, e.g. --set steps=2000 --set model.dim=192 (see training.py)")  # fmt: skip
    return parser


def add_choice_of_runs(parser: argparse.ArgumentParser, known: Iterable[str]) -> None:
    """Add --runs and --seeds, which `chosen_names` and `chosen_seeds` read."""
    about = f"of {', '.join(known)} (default: all)"
    parser.add_argument("--runs", default="", metavar="NAME,NAME", help=about)
    parser.add_argument("--seeds", default="0,1,2", help="default: 0,1,2")


def chosen_names(names: str, known: Iterable[str]) -> list[str]:
    """A list of names with commas (--runs), all that are known for "". UserError for an unknown one."""
    accepted = list(known)
    chosen = [name.strip() for name in names.split(",")] if names else accepted
    for name in chosen:
        if name not in accepted:
            raise UserError(
                f"--runs {names}: there is no run {name!r}; accepted: {', '.join(accepted)}"
            )
    return chosen


def chosen_seeds(seeds: str) -> list[int]:
    """The seeds of a list of whole numbers with commas. UserError for anything else."""
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise UserError(
            f"--seeds {seeds}: expected whole numbers with commas, as in 0,1,2"
        ) from error


def override(config: Any, assignments: list[str]) -> Any:
    """A copy of a dataclass with `name=value` texts applied; `model.name=value` changes its field `model`.

    UserError names a field that does not exist, or a value that the field does not accept.
    """
    changes: dict[str, Any] = {}
    model_changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        has_model = "model" in typing.get_type_hints(type(config))
        inside = has_model and name.startswith("model.")
        kinds = typing.get_type_hints(type(config.model if inside else config))
        known = {("model." if inside else "") + n: kind for n, kind in kinds.items()}
        known = {n: kind for n, kind in known.items() if n not in ("model", "preset")}
        if not equals or name not in known:
            names = ", ".join(known) + (", or model.NAME" if has_model and not inside else "")
            raise UserError(f"--set {assignment}: expected NAME=VALUE with NAME one of {names}")
        target = model_changes if inside else changes
        target[name.removeprefix("model.")] = parse_value(assignment, text, known[name])
    try:
        if model_changes:
            changes["model"] = dataclasses.replace(config.model, **model_changes)
    except ValueError as error:
        raise UserError(str(error)) from error
    return dataclasses.replace(config, **changes)


def parse_value(assignment: str, text: str, kind: Any) -> Any:
    """`text` as a value of the type hint `kind`."""
    if kind is str:
        return text
    if kind is bool:
        word = text.strip().lower()
        if word not in (*_YES, *_NO):
            raise UserError(f"--set {assignment}: the value is {text!r}; accepted: true or false")
        return word in _YES
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    types, spoken = _KINDS[kind]
    if types == (tuple,) and isinstance(value, int):
        value = (value,)
    if not isinstance(value, types) or isinstance(value, bool):
        raise UserError(f"--set {assignment}: the value is {text!r}; accepted: {spoken}")
    return value
