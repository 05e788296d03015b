"""A folder as a language model of transformers, with its tokenizer."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lowbit.formats.base import FormatError
from lowbit.formats.building import built
from lowbit.formats.folder import Folder, of_the_hub
from lowbit.formats.gguf.file import GgufFile
from lowbit.formats.reading import load_pretrained, opened


def load(path: Path, device: str) -> nn.Module:
    """The model, in evaluation mode. Raises ImportError without the extra `hf`, FormatError as `load_pretrained`."""
    with _quiet():
        model = load_pretrained(path, device=device)
    if not hasattr(model, "generate"):
        raise FormatError(
            f"{path} is a {type(model).__name__}, which generates no text; accepted: causal language models. In "
            "Python lowbit.calibrate and lowbit.evaluate take others, with batches of your own"
        )
    return model


def skeleton(folder: Folder | GgufFile) -> nn.Module:
    """The model without its weights. Raises ImportError without the extra `hf`, FormatError as `load_pretrained`."""
    with _quiet():
        return built(folder)


def check(path: Path) -> Folder | GgufFile:
    """The headers of a folder or GGUF file, read before the import of transformers, which takes seconds.

    Raises FormatError if the path is not a model, or a damaged one.
    """
    if not path.exists():
        raise FormatError(
            f"{path} does not exist; give a folder with config.json, or a GGUF file{of_the_hub(path)}"
        )
    return opened(path)


def tokenizer_of(path: Path) -> Any:
    """The tokenizer in the folder or GGUF file. Raises FormatError if neither has one."""
    # Otherwise transformers asks whether it may run code of the folder.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if path.is_file():
        options["gguf_file"] = path.name
    folder = path.parent if path.is_file() else path
    with _quiet():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # transformers raises many classes, with texts of several lines
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            if isinstance(error, LookupError):  # whose text is the key alone
                reason = f"{type(error).__name__} {reason}"
            raise FormatError(
                f"{path} has no tokenizer that transformers reads: copy that of the original ({reason})"
            ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Show only errors and lowbit's own bars. transformers imports packages that log what they lack.

    Raises ImportError without the extra `hf`.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        importlib.import_module("lowbit.hf")  # checks packages before it imports transformers
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield
    finally:
        logging.disable(before)
