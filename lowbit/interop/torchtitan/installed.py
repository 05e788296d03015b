"""The installed torchtitan: its release, or an error that says what to install."""

from __future__ import annotations

from lowbit import optional

LATER = "0.3"
"""The release that has an adapter but is not in the extra, because it does not train with torch 2.13."""


def installed_release() -> str:
    """ "0.2" or "0.3". Raises ImportError if torchtitan is missing, or of another release."""
    release = ".".join((optional.version("torchtitan") or "").split(".")[:2])
    if release != LATER:
        optional.check("lowbit.torchtitan needs", ["torchtitan"], "torchtitan")
    return release
