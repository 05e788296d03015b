"""The installed torchtitan: its release, or an error that says what to install."""

from __future__ import annotations

from lowbit import optional


def installed_release() -> str:
    """ "0.2" or "0.3". Raises ImportError where torchtitan is missing, or of another release."""
    optional.check("lowbit.torchtitan needs", ["torchtitan"], "torchtitan")
    return ".".join(str(optional.version("torchtitan")).split(".")[:2])
