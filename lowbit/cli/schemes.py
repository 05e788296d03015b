"""Schemes as options name them: --scheme int4 --group-size 128 --layers 'lm_head=int8'."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit.interop import config_lines
from lowbit.schemes.scheme import Scheme

_NONE = "none"
_ALL = "*"


def chosen(
    scheme: str, group_size: int | None, layers: Sequence[str]
) -> Scheme | dict[str, Scheme | None]:
    """The scheme for all layers, or patterns to schemes where `layers` names some.

    Args:
        scheme: a name of `lowbit.interop.config_lines`, also with options: "int4(group_size=32)".
        group_size: the option of that name, if given separately.
        layers: "PATTERN=SCHEME" or "PATTERN=none" each; the first that matches decides.

    Raises ValueError for an unknown name, options that the scheme refuses, an entry without "=", a pattern that is
    given twice, and "*", which is the pattern of `scheme`.
    """
    name, options = config_lines.parsed(scheme, "scheme", "int4(group_size=32)")
    if group_size is not None:
        options["group_size"] = group_size
    for_all = config_lines.scheme_of(name, options)
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
        patterns[pattern] = None if own.lower() == _NONE else config_lines.scheme(own)
    return {**patterns, _ALL: for_all}
