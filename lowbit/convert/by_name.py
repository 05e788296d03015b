"""Schemes that patterns choose by the names of weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from lowbit.convert.patterns import is_refused
from lowbit.convert.patterns import matches as matches_expression
from lowbit.schemes.scheme import Scheme
from lowbit.schemes.training import TrainingScheme

_ACCEPTED: dict[type, tuple[str, str, str]] = {
    Scheme: ("a Scheme", "Scheme", "lowbit.Int4WeightOnly(group_size=128)"),
    TrainingScheme: ("a training scheme", "training scheme", "lowbit.train.Int8MixedPrecision()"),
}
"""How messages name a kind of schemes, with an example."""
NEEDS_CALIBRATION = (
    "a static activation needs a calibration: load the model, call lowbit.calibrate and lowbit.quantize_, and "
    "lowbit.export the result"
)


def check_schemes(schemes: Any, kind: type) -> None:
    """Raise TypeError unless `schemes` is one of `kind`, or a dict of patterns to one of `kind` or None."""
    by_pattern = isinstance(schemes, Mapping)
    for scheme in schemes.values() if by_pattern else [schemes]:
        if not (isinstance(scheme, kind) or (scheme is None and by_pattern)):
            one, name, example = _ACCEPTED[kind]
            raise TypeError(
                f"unknown scheme {scheme!r}; accepted: {one}, e.g. {example}, or a dict of name patterns to a {name} "
                f"or None, e.g. {{'lm_head': None, '*': {example}}}{_remedy(scheme)}"
            )
    for pattern in schemes if by_pattern else ():
        check_pattern(pattern)


def has_static(schemes: Any) -> bool:
    """True if one of the schemes, a `Scheme` or a dict of patterns to one or None, has a static activation."""
    given = schemes.values() if isinstance(schemes, Mapping) else (schemes,)
    return any(scheme is not None and scheme.is_static for scheme in given)


def check_pattern(pattern: Any) -> None:
    """Raise TypeError unless `pattern` is a str, ValueError if "re:" precedes what is not a regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, got {pattern!r}")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


def check_runs(patterns: Iterable[str], where: str) -> None:
    """Raise ValueError for an expression of a file, called `where`, whose match may never end."""
    refused = [p for p in patterns if p.startswith("re:") and is_refused(p[3:])]
    if refused:
        raise ValueError(
            f"{refused[0]!r:.80} of {where} is an expression that lowbit does not run; accepted: fewer "
            "repetitions, and none inside of another"
        )


def _remedy(scheme: Any) -> str:
    """The end of the message about an object that is not a scheme of the kind that a flow takes."""
    if isinstance(scheme, Scheme):
        return ". A Scheme is for lowbit.quantize_ and lowbit.qat.prepare_"
    if isinstance(scheme, TrainingScheme):
        return ". A training scheme is for lowbit.train.prepare_"
    name = getattr(scheme, "__name__", None)
    return f". To make one, call it: {name}()" if name and callable(scheme) else ""


def first_match(patterns: Iterable[str], *names: str) -> str | None:
    """The pattern that decides on a weight with these names: the first that matches one of them."""
    return next((p for p in patterns if any(matches(p, name) for name in names)), None)


def unused(
    patterns: Mapping[str, Any], used: Collection[str], leaves_alone: Callable[[str], bool]
) -> list[str]:
    """The patterns that do nothing. One that gives None to what stays in high precision anyway is not among them.

    Args:
        patterns: with the scheme or None of each.
        used: the patterns that chose a weight.
        leaves_alone: returns whether a pattern that gives None is the first that matches some name.
    """
    return [p for p, s in patterns.items() if p not in used and not (s is None and leaves_alone(p))]


def of_unused(patterns: list[str], names: list[str]) -> str:
    """The message about patterns that do nothing. `names`: a few that weights have."""
    return f"the patterns {patterns} chose no weight (a pattern before them may match first); names end like {names}"


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name: a regular expression behind "re:", else as `fnmatch` does."""
    if pattern.startswith("re:"):
        expression = pattern[3:]
        if is_refused(expression):  # a user's own
            return re.fullmatch(expression, name) is not None
        return matches_expression(expression, name, whole=True)
    return fnmatchcase(name, pattern)


def names_outright(pattern: str, layer: str) -> bool:
    """True if a pattern that matches `layer`, or its weight, names this module: it matches no longer name, and none
    with other letters in one half of the module's own part of the name."""
    path, dot, own = layer.rpartition(".")
    size = len(own)
    others = "".join("y" if letter == "x" else "x" for letter in own)
    half = (size + 1) // 2
    similar = (
        f"{own}_",
        f"{others[:half]}{own[half:]}",
        f"{own[: size - half]}{others[size - half :]}",
    )
    names = (f"{path}{dot}{name}" for name in similar)
    return not any(matches(pattern, n) or matches(pattern, f"{n}.weight") for n in names)
