"""A new file that appears whole, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lowbit.files import new_path
from lowbit.formats.base import FormatError


@contextmanager
def new_file(out: Path, overwrite: bool, format: str, suffix: str) -> Iterator[Path]:
    """A path for a new file, in a temporary folder beside `out`. At the end the file takes the place of `out`.

    Other files of that folder, such as the tensors of a large ONNX model, take places beside `out`. After an error
    nothing is left.

    Args:
        out: where the file goes.
        overwrite: replace files that exist.
        format: the name of the format, for messages.
        suffix: the end of the file's name.

    Raises FormatError if `out` has another suffix, exists and may not be replaced, or cannot be written.
    """
    if not out.parent.is_dir():
        raise FormatError(f"{out.parent} is not a folder; make it first")
    if out.is_dir():
        raise FormatError(f"{out} is a folder; {format} is one file, such as model{suffix}")
    if not out.name.endswith(suffix):
        raise FormatError(f"{format} is a file that ends in {suffix}, got {out.name}")
    _check_free(out, overwrite)
    try:
        with new_path.workplace(out) as place:
            folder = place / "files"
            folder.mkdir()
            try:
                yield folder / out.name
            except Exception as error:
                if (refusal := _refusal(folder)) is not None:
                    raise refusal from error
                raise
            beside = [path for path in folder.iterdir() if path.name != out.name]
            written = [*beside, folder / out.name]
            for path in written:  # again: another program may have written files meanwhile
                _check_free(out.parent / path.name, overwrite)
            new_path.put_files(written, out.parent)
    except OSError as error:
        raise FormatError(f"{out} cannot be written: {error.strerror or error}") from error


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


def _check_free(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise FormatError(f"{path} exists already; give another name, or overwrite=True")
