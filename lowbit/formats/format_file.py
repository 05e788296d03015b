"""A file of a format that appears whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowbit.files import new_path
from lowbit.formats.base import FormatError


@contextmanager
def format_file(out: Path, overwrite: bool, format: str, suffix: str) -> Iterator[Path]:
    """`lowbit.files.new_path.new_file` for a format of one file, with its refusals as FormatError.

    Args:
        out: where the file goes.
        overwrite: replace files that exist.
        format: the name of the format, for messages.
        suffix: the end of the file's name.

    Raises FormatError if `out` has another suffix, exists and may not be replaced, or cannot be written.
    """
    check_free_file(out, overwrite, format, suffix)

    def check_free(path: Path) -> None:
        _check_free(path, overwrite)

    try:
        # The check runs again at the end: another program may have written files meanwhile.
        with new_path.new_file(out, check_free) as path:
            try:
                yield path
            except Exception as error:
                if (refusal := _refusal(path.parent)) is not None:
                    raise refusal from error
                raise
    except OSError as error:
        raise FormatError(f"{out} cannot be written: {error.strerror or error}") from error


def check_free_file(out: Path, overwrite: bool, format: str, suffix: str) -> None:
    """Raise FormatError if `format_file` would, except for a file that cannot be written."""
    if not out.parent.is_dir():
        raise FormatError(f"{out.parent} is not a folder; make it first")
    if out.is_dir():
        raise FormatError(f"{out} is a folder; {format} is one file, such as model{suffix}")
    if not out.name.endswith(suffix):
        raise FormatError(f"{format} is a file that ends in {suffix}, got {out.name}")
    _check_free(out, overwrite)


def _check_free(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FormatError(f"{path} exists already; give another name, or overwrite=True")


def _refusal(folder: Path) -> OSError | None:
    """The system's error if the disk is full. The packages that write programs raise errors of their own for it, such
    as "unexpected pos"."""
    try:
        for path in (*folder.iterdir(), folder / "more"):
            if not path.is_dir():
                with path.open("ab") as file:
                    file.write(bytes(2**16))
    except OSError as error:
        return error
    return None
