"""Regular expressions of files, matched by Python's `re` unless the match may take for ever.

`re` tries one way through an expression after another, and "(a+)+b" has 2^n ways through n letters. So an expression in
a model folder could hang the process that reads it. This module counts the ways first, and refuses an expression with
too many:

    a repetition of letters that may end in several places      n + r over r of r such repetitions, one after another
    alternatives                                                the sum of theirs
    any other repetition, up to m times                         (m + 1) · (those of one time)^m
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MOST_BITS = 30.0
"""log2 of the ways that are tried for one text: seconds."""
USUAL_LETTERS = 80
"""Letters of a name, for an expression that is judged without one."""
MOST_LETTERS = 2000
"""Letters of an expression."""
Parts = Iterable[tuple[Any, Any]]
"""A parsed expression: the kind and the value of each part."""
_LETTERS = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)


class PatternError(ValueError):
    """An expression that cannot be matched here, and why."""


def matches(pattern: str, text: str, whole: bool = False) -> bool:
    """True if the expression matches `text` from its beginning, as `re.match`; `whole`: to its end, as `re.fullmatch`.

    Raises PatternError for an expression that is wrong or has too many ways through the text.
    """
    if _bits_of(pattern, len(text)) > MOST_BITS:
        raise PatternError(
            f"the expression {pattern[:40]!r} may take too long for {text[:40]!r}; accepted: fewer repetitions, and "
            "none inside of another"
        )
    return bool(re.fullmatch(pattern, text) if whole else re.match(pattern, text))


def is_refused(pattern: str) -> bool:
    """True if `matches` refuses this expression for a text of `USUAL_LETTERS`."""
    try:
        return _bits_of(pattern, USUAL_LETTERS) > MOST_BITS
    except PatternError:
        return True


@functools.lru_cache(maxsize=10_000)
def _bits_of(pattern: str, letters: int) -> float:
    """log2 of the ways through an expression and a text of so many letters."""
    if len(pattern) > MOST_LETTERS:
        raise PatternError(
            f"the expression {pattern[:40]!r}… has {len(pattern)} letters; accepted: {MOST_LETTERS}"
        )
    try:
        re.compile(pattern)
        return _bits(_parser.parse(pattern), letters)
    except re.error as error:
        raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
    except (RecursionError, OverflowError) as error:
        raise PatternError(f"the expression {pattern[:40]!r}… is nested too deep") from error


def _bits(parts: Parts, letters: int) -> float:
    bits, repetitions = 0.0, 0
    for kind, value in parts:
        if kind in _REPEATS:
            least, most, body = value
            most = max(least, letters if most is op.MAXREPEAT else min(most, letters))
            if [part for part, _ in body] in [[letter] for letter in _LETTERS]:
                repetitions += most > least
            else:
                bits += math.log2(most + 1) + most * _bits(body, letters)
        elif kind is op.BRANCH:
            bits += math.log2(sum(2.0 ** min(_bits(each, letters), 1000) for each in value[1]))
        elif kind is op.SUBPATTERN:
            bits += _bits(value[3], letters)
        elif kind in (op.ASSERT, op.ASSERT_NOT):
            bits += _bits(value[1], letters)
        elif kind is op.ATOMIC_GROUP:
            bits += _bits(value, letters)
        elif kind is op.GROUPREF_EXISTS:
            bits += _bits(value[1], letters) + _bits(value[2] or (), letters)
    return bits + math.log2(math.comb(letters + repetitions, repetitions))
