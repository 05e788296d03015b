"""The installed transformers: an error of one line where it is missing or too old."""

from __future__ import annotations

import importlib.metadata

FIRST = 5
"""The first major release whose loader lets a quantizer convert weights while it reads them."""


def check_installed() -> None:
    """Raise ImportError where transformers is missing, or older than `FIRST`."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"lowbit.hf needs transformers >= {FIRST}, which is not installed: pip install 'lowbit[hf]'"
        ) from error
    if int(version.split(".")[0]) < FIRST:
        raise ImportError(
            f"lowbit.hf needs transformers >= {FIRST}, and {version} is installed: pip install 'lowbit[hf]'"
        )
    try:
        import safetensors  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "lowbit.hf needs safetensors, which is not installed: pip install 'lowbit[hf]'"
        ) from error
