"""Schemes as options name them: --scheme int4 --group-size 128 --layers 'lm_head=int8'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lowbit.convert import Plan
from lowbit.schemes import lines
from lowbit.schemes.scheme import Scheme

DEFAULT = "int4"
"""What --scheme is where it is not given."""
_NONE = "none"
_ALL = "*"


def chosen(
    scheme: str, group_size: int | None, layers: Sequence[str] = (), plan: Path | None = None
) -> Scheme | dict[str, Scheme | None]:
    """The scheme for all layers, or patterns to schemes where `layers` names some.

    Args:
        scheme: a name of `lowbit.schemes.lines`, also with options: "int4(group_size=32)".
        group_size: the option of that name, if given separately.
        plan: a file of `lowbit.Plan`, which stands for all others.
        layers: "PATTERN=SCHEME" or "PATTERN=none" each; the first that matches decides.

    Raises ValueError for a plan beside others; an unknown name, options that the scheme refuses, an entry without
    "=", a pattern that is given twice, and "*", which is the pattern of `scheme`.
    """
    if plan is not None:
        if scheme != DEFAULT or group_size is not None or layers:
            raise ValueError(
                f"--plan {plan} has the scheme of each weight; leave out --scheme, --group-size and --layers, or edit "
                "the file"
            )
        return _read(plan)
    name, options = lines.parsed(scheme, "scheme", "int4(group_size=32)")
    if group_size is not None:
        options["group_size"] = group_size
    for_all = lines.scheme_of(name, options)
    if not layers:
        return for_all
    patterns: dict[str, Scheme | None] = {}
    for entry in layers:
        pattern, equals, own = entry.partition("=")
        if not equals or not pattern or not own:
            raise ValueError(
                f"--layers {entry!r} has no PATTERN=SCHEME; accepted: 'lm_head=int8', '*.down_proj=none'"
            )
        if pattern == _ALL:
            raise ValueError(
                f"--layers {entry!r} is for all layers, as --scheme is; give --scheme alone, or name some layers: "
                "'lm_head=int8', '*.down_proj=none'"
            )
        if pattern in patterns:
            raise ValueError(f"--layers {entry!r}: it is given twice; give each pattern once")
        patterns[pattern] = None if own.lower() == _NONE else lines.scheme(own)
    return {**patterns, _ALL: for_all}


def _read(path: Path) -> Plan:
    try:
        return Plan.load(path)
    except OSError as error:
        raise ValueError(f"--plan {path} cannot be read: {error.strerror}") from error
