"""Regular expressions that are matched without backtracking.

Python's `re` tries one way through an expression after another, and "(a+)+b" has 2^n ways through n letters. This
module follows all ways at once: each part of an expression maps the set of places where it may begin to the set of
places where it may end. So an expression in a model folder cannot hang the process that reads it.

Python parses the expression. Back references, lookbehind, conditional and atomic groups,
possessive repetition and flags other than (?i) are refused, and so are expressions and texts that take too many steps.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MOST_LETTERS = 2000
MOST_STEPS = 5000
"""Steps of an expression. A repetition {n} counts n times."""
MOST_LEVELS = 100
"""Levels of parentheses and repetitions."""
MOST_WORK = 500_000
"""Places that are visited for one text: about a tenth of a second."""

Parts = Iterable[tuple[Any, Any]]
"""A parsed expression: the kind and the value of each part."""
_LETTERS = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT)
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_WORD: lambda letter: letter.isalnum() or letter == "_",
    op.CATEGORY_NOT_DIGIT: lambda letter: not letter.isdecimal(),
    op.CATEGORY_NOT_SPACE: lambda letter: not letter.isspace(),
    op.CATEGORY_NOT_WORD: lambda letter: not (letter.isalnum() or letter == "_"),
}


class PatternError(ValueError):
    """An expression that cannot be matched here, and why."""


def matches(pattern: str, text: str, whole: bool = False) -> bool:
    """True if the expression matches `text` from its beginning, as `re.match`; `whole`: to its end, as `re.fullmatch`.

    Raises PatternError for an expression that is wrong or refused (see the module), and if the match takes too long.
    """
    parts, ignores_case = _compiled(pattern)
    ends = _Matching(pattern, text, ignores_case).ends(parts, {0})
    return len(text) in ends if whole else bool(ends)


def is_refused(pattern: str) -> bool:
    """True if `matches` refuses this expression for every text."""
    try:
        _compiled(pattern)
    except PatternError:
        return True
    return False


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> tuple[Parts, bool]:
    """The parts of an expression, and True if it ignores case."""
    if len(pattern) > MOST_LETTERS:
        raise PatternError(
            f"the expression {pattern[:40]!r}… has {len(pattern)} letters; accepted: {MOST_LETTERS}"
        )
    try:
        parsed = _parser.parse(pattern)
        flags = parsed.state.flags & ~re.UNICODE
        if flags & ~re.IGNORECASE:
            raise PatternError(f"the expression {pattern!r} has flags; accepted: (?i)")
        if _steps(pattern, parsed) > MOST_STEPS:
            raise PatternError(
                f"the expression {pattern[:40]!r} has more than {MOST_STEPS} steps; accepted: fewer repetitions"
            )
    except re.error as error:
        raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
    except (RecursionError, OverflowError) as error:
        raise PatternError(f"the expression {pattern[:40]!r}… is nested too deep") from error
    return parsed, bool(flags)


def _steps(pattern: str, parts: Parts, level: int = 1) -> int:
    """The steps of an expression. Raises PatternError for a part that is refused."""
    if level > MOST_LEVELS:
        raise RecursionError
    count = 1
    for kind, value in parts:
        if kind in _LETTERS or kind is op.AT:
            count += 1
        elif kind in _REPEATS:
            least, most, body = value
            times = least + 1 if most is op.MAXREPEAT else most
            count += times * _steps(pattern, body, level + 1)
        elif kind is op.BRANCH:
            count += sum(_steps(pattern, branch, level + 1) for branch in value[1])
        elif kind is op.SUBPATTERN and not value[1] and not value[2]:
            count += _steps(pattern, value[3], level + 1)
        elif kind in (op.ASSERT, op.ASSERT_NOT) and value[0] > 0:
            count += _steps(pattern, value[1], level + 1)
        else:
            raise PatternError(
                f"the expression {pattern!r} has a {str(kind).lower()}, which may take for ever; accepted: "
                "letters, classes, groups, alternatives, repetition, lookahead"
            )
    return count


class _Matching:
    """One match of a text. A place is the number of letters before it."""

    def __init__(self, pattern: str, text: str, ignores_case: bool) -> None:
        self._pattern, self._text, self._work = pattern, text, 0
        self._ignores_case = ignores_case

    def ends(self, parts: Parts, places: set[int]) -> set[int]:
        """Where these parts, one after another, may end if they begin at one of `places`."""
        for kind, value in parts:
            if not places:
                break
            self._work += 1 + len(places)
            if self._work > MOST_WORK:
                raise PatternError(
                    f"the expression {self._pattern[:40]!r} takes too long for {self._text[:40]!r}; accepted: a "
                    "shorter one"
                )
            places = self._after(kind, value, places)
        return places

    def _after(self, kind: Any, value: Any, places: set[int]) -> set[int]:
        if kind in _LETTERS:
            return {at + 1 for at in places if self._has_letter(kind, value, at)}
        if kind in _REPEATS:
            least, most, body = value
            return self._repeated(least, most, body, places)
        if kind is op.BRANCH:
            return set().union(*(self.ends(branch, places) for branch in value[1]))
        if kind is op.SUBPATTERN:
            return self.ends(value[3], places)
        if kind is op.AT:
            return {at for at in places if self._is_at(value, at)}
        is_wanted = kind is op.ASSERT
        return {at for at in places if bool(self.ends(value[1], {at})) == is_wanted}

    def _repeated(self, least: int, most: Any, body: Any, places: set[int]) -> set[int]:
        for _ in range(least):
            places = self.ends(body, places)
        found, new, left = places, places, math.inf if most is op.MAXREPEAT else most - least
        while new and left:
            new = self.ends(body, new) - found
            found, left = found | new, left - 1
        return found

    def _has_letter(self, kind: Any, value: Any, at: int) -> bool:
        if at == len(self._text):
            return False
        letter = self._text[at]
        if kind is op.ANY:
            return letter != "\n"
        if kind is op.LITERAL and not self._ignores_case:
            return letter == chr(value)
        members = value if kind is op.IN else [(op.LITERAL, value)]
        is_negated = kind is op.NOT_LITERAL or members[0][0] is op.NEGATE
        same = {letter, letter.lower(), letter.upper()} if self._ignores_case else {letter}
        return any(_is_member(one, *entry) for entry in members for one in same) != is_negated

    def _is_at(self, kind: Any, at: int) -> bool:
        text = self._text
        if kind in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return at == 0
        if kind is op.AT_END_STRING:
            return at == len(text)
        if kind is op.AT_END:
            return text[at:] in ("", "\n")
        is_word = _CATEGORIES[op.CATEGORY_WORD]
        before, after = (at > 0 and is_word(text[at - 1])), at < len(text) and is_word(text[at])
        return (before != after) == (kind is op.AT_BOUNDARY)


def _is_member(letter: str, kind: Any, value: Any) -> bool:
    """True if a member of a class is this letter, or has it; not for the member that negates the class."""
    if kind is op.NEGATE:
        return False
    if kind is op.LITERAL:
        return letter == chr(value)
    if kind is op.RANGE:
        return chr(value[0]) <= letter <= chr(value[1])
    return _CATEGORIES[value](letter)
