"""The installed torchtitan: its release, or an error that says what to install."""

from __future__ import annotations

import importlib.metadata

SUPPORTED = ("0.2.2", "0.3.0")
"""The releases that lowbit was tried with. A later patch of the same minor release is accepted."""


def installed_release() -> str:
    """ "0.2" or "0.3". Raises ImportError where torchtitan is missing, or of another release."""
    accepted = " or ".join(SUPPORTED)
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"lowbit.torchtitan needs torchtitan {accepted}, which is not installed: pip install 'lowbit[torchtitan]'"
        ) from error
    release = ".".join(version.split(".")[:2])
    if release not in {".".join(known.split(".")[:2]) for known in SUPPORTED}:
        raise ImportError(
            f"lowbit.torchtitan works with torchtitan {accepted}, and {version} is installed, whose interface differs: "
            f"pip install 'torchtitan=={SUPPORTED[0]}'"
        )
    return release
