"""An exception as one line that a user of the command line can act on."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lowbit import optional

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the command failed; it was called wrongly; the user stopped it."""

_EXPECTED = (ValueError, TypeError, ImportError, OSError, NotImplementedError)
"""The exceptions that lowbit raises with a message that names the way out."""

_OPTIONS = {
    "call lowbit.quantize_ first, or give a folder and scheme=": "call `lowbit quantize` first",
    "give a tokenizer.json with merges beside the model, or tokenizer=": (
        "put a tokenizer.json with merges beside the model"
    ),
    "needs batches, calibrate(model, scheme, batches, steps=…)": "needs --data TEXT or --data sampled",
    "overwrite=True": "--overwrite",
    "max_shard_size is": "--max-shard-size is",
    "lossy=True": "--lossy",
    'format="lowbit"': "--format lowbit",
    "scheme=": "--scheme",
}
"""Words in messages of the Python interface → the words of the command line."""


def exit_code(error: Exception) -> int:
    return MISUSED if _is_of_parser(error) else FAILED


def one_line(error: Exception, arguments: Sequence[str] = ()) -> str:
    """The message on one line. `arguments`: those of the command, which complete the parser's messages."""
    if _is_of_parser(error):
        return _of_parser(error, arguments)
    text = _joined(str(error))
    if isinstance(error, ModuleNotFoundError) and text.startswith("No module named"):
        text = _of_missing(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = _in_options(text)
    if (isinstance(error, _EXPECTED) or _is_full_gpu(error)) and text:
        return text
    return f"{type(error).__name__}: {text}; `--debug` shows where, please report it"


@contextmanager
def warnings_on_one_line() -> Iterator[None]:
    """Show warnings of lowbit and others without the line of Python that raised them."""
    before = warnings.formatwarning

    def one_line_of(message: Any, category: type[Warning], *where: Any, **line: Any) -> str:
        kind = "warning" if category is UserWarning else category.__name__
        return f"lowbit: {kind}: {_in_options(_joined(str(message)))}\n"

    warnings.formatwarning = one_line_of
    try:
        yield
    finally:
        warnings.formatwarning = before


def _in_options(text: str) -> str:
    for python, option in _OPTIONS.items():
        text = text.replace(python, option)
    return text


def _of_parser(error: Any, arguments: Sequence[str]) -> str:
    """typer's message, the value that typer got, and the command whose help says more."""
    text = _joined(error.format_message())
    option = re.match(r"Invalid value for '(--[\w-]+)'", text)
    got = None if option is None else _value_of(option[1], arguments)
    if got is not None and repr(got) not in text:
        text = f"{text}, got {got!r}"
    command = "lowbit"
    if error.ctx is not None:
        command = error.ctx.command_path
    elif arguments and not arguments[0].startswith("-"):
        command = f"lowbit {arguments[0]}"
    return f"{text} (`{command} --help` says more)"


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    for name, following in zip(arguments, [*arguments[1:], None], strict=True):
        if name == option:
            return following
        if name.startswith(f"{option}="):
            return name.removeprefix(f"{option}=")
    return None


def _of_missing(error: ModuleNotFoundError) -> str:
    """Name the extra that brings the module that Python did not find."""
    name = str(error.name).partition(".")[0]
    brought = optional.bringing(name)
    if brought is None:
        return f"{name} is not installed; `--debug` shows what needs it"
    extra, package = brought
    needs = "" if package == name else f", which {package} needs"
    return f"{name} is not installed{needs}: {optional.install(extra)}"


def _is_full_gpu(error: Exception) -> bool:
    """True for torch's OutOfMemoryError, which only a process that imported torch can raise."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _is_of_parser(error: Exception) -> bool:
    """True if typer raised `error` for the arguments. typer's releases have these classes in different modules."""
    return hasattr(error, "format_message")


def _joined(text: str) -> str:
    return " ".join(text.split())
