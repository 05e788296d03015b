"""Regular expressions that are matched without backtracking.

Python's `re` tries one way through an expression after another, and "(a+)+b" has 2^n ways through n letters. This
module follows all ways at once (Thompson, Communications of the ACM 11, 1968): a text of n letters takes at most n
times the steps of the expression. So an expression in a model folder cannot hang the process that reads it.

Python parses the expression. Back references, lookbehind, conditional and atomic groups,
possessive repetition and flags other than (?i) are refused, and so are expressions and texts that take too many steps.
"""

from __future__ import annotations

import functools
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
"""Steps that are taken for one text: about a tenth of a second."""

Test = Callable[[str], bool]
_CATEGORIES: dict[Any, Test] = {
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
    program = _compiled(pattern)
    return _Matching(pattern, program, text).reaches_end(0, 0, whole)


def is_refused(pattern: str) -> bool:
    """True if `matches` refuses this expression for every text."""
    try:
        _compiled(pattern)
    except PatternError:
        return True
    return False


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> list[tuple[Any, ...]]:
    if len(pattern) > MOST_LETTERS:
        raise PatternError(
            f"the expression {pattern[:40]!r}… has {len(pattern)} letters; accepted: {MOST_LETTERS}"
        )
    try:
        parsed = _parser.parse(pattern)
        flags = parsed.state.flags & ~re.UNICODE
        if flags & ~re.IGNORECASE:
            raise PatternError(f"the expression {pattern!r} has flags; accepted: (?i)")
        program = _Program(pattern, bool(flags))
        program.add(parsed)
        program.put("end")
    except re.error as error:
        raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
    except (RecursionError, OverflowError) as error:
        raise PatternError(f"the expression {pattern[:40]!r}… is nested too deep") from error
    return program.steps


# ---- expression -> steps ---------------------------------------------------------------------------------------------


class _Program:
    """The steps of an expression: (kind, …), followed one after another unless they name the next ones.

    "letter", test     a letter that passes the test
    "either", a, b     go on at both
    "at", kind         a place in the text
    "look", next, is_wanted     what stands between this step and `next` matches here, or does not; go on at `next`
    "end"              of the expression, or of what is looked for
    """

    def __init__(self, pattern: str, ignores_case: bool) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self._level = 0
        self._pattern, self._ignores_case = pattern, ignores_case

    def put(self, *step: Any) -> int:
        if len(self.steps) >= MOST_STEPS:
            raise PatternError(
                f"the expression {self._pattern[:40]!r} has more than {MOST_STEPS} steps; accepted: fewer repetitions"
            )
        self.steps.append(step)
        return len(self.steps) - 1

    def add(self, parts: Iterable[tuple[Any, Any]]) -> None:
        self._level += 1
        if self._level > MOST_LEVELS:
            raise RecursionError
        for kind, value in parts:
            if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
                self.put("letter", _test(kind, value, self._ignores_case))
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT):
                self._repeat(*value)
            elif kind is op.BRANCH:
                self._branch(value[1])
            elif kind is op.SUBPATTERN and not value[1] and not value[2]:
                self.add(value[3])
            elif kind is op.AT:
                self.put("at", value)
            elif kind in (op.ASSERT, op.ASSERT_NOT) and value[0] > 0:
                self._look(value[1], kind is op.ASSERT)
            else:
                raise PatternError(
                    f"the expression {self._pattern!r} has a {str(kind).lower()}, which may take for ever; accepted: "
                    "letters, classes, groups, alternatives, repetition, lookahead"
                )
        self._level -= 1

    def _branch(self, branches: list[Any]) -> None:
        exits = []
        for branch in branches[:-1]:
            fork = self.put("either", 0, 0)
            self.add(branch)
            exits.append(self.put("either", 0, 0))
            self.steps[fork] = ("either", fork + 1, len(self.steps))
        self.add(branches[-1])
        for place in exits:
            self.steps[place] = ("either", len(self.steps), len(self.steps))

    def _repeat(self, least: int, most: Any, body: Any) -> None:
        for _ in range(least):
            self.put("either", len(self.steps) + 1, len(self.steps) + 1)  # counts an empty body too
            self.add(body)
        if most is op.MAXREPEAT:
            fork = self.put("either", 0, 0)
            self.add(body)
            self.put("either", fork, fork)
            self.steps[fork] = ("either", fork + 1, len(self.steps))
            return
        forks = []
        for _ in range(most - least):
            forks.append(self.put("either", 0, 0))
            self.add(body)
        for fork in forks:
            self.steps[fork] = ("either", fork + 1, len(self.steps))

    def _look(self, body: Any, is_wanted: bool) -> None:
        place = self.put("look", 0, is_wanted)
        self.add(body)
        self.put("end")
        self.steps[place] = ("look", len(self.steps), is_wanted)


def _test(kind: Any, value: Any, ignores_case: bool) -> Test:
    if kind is op.ANY:
        return lambda letter: letter != "\n"
    if kind is op.LITERAL and not ignores_case:
        return chr(value).__eq__
    members = value if kind is op.IN else [(op.LITERAL, value)]
    is_negated = kind is op.NOT_LITERAL or members[0][0] is op.NEGATE
    tests = [_member(*entry) for entry in members if entry[0] is not op.NEGATE]

    def is_member(letter: str) -> bool:
        return any(test(letter) for test in tests)

    if not ignores_case:
        return lambda letter: is_member(letter) != is_negated
    return lambda letter: (
        any(map(is_member, {letter, letter.lower(), letter.upper()})) != is_negated
    )


def _member(kind: Any, value: Any) -> Test:
    if kind is op.LITERAL:
        return chr(value).__eq__
    if kind is op.RANGE:
        first, last = map(chr, value)
        return lambda letter: first <= letter <= last
    return _CATEGORIES[value]


# ---- steps -> an answer ----------------------------------------------------------------------------------------------


class _Matching:
    """One match of a text."""

    def __init__(self, pattern: str, program: list[tuple[Any, ...]], text: str) -> None:
        self._pattern, self._program, self._text, self._work = pattern, program, text, 0

    def reaches_end(self, step: int, begin: int, whole: bool) -> bool:
        """True if a way from `step` at letter `begin` reaches an end; `whole`: and the text ends there too."""
        places = {step}
        for at in range(begin, len(self._text) + 1):
            places, is_end = self._reached(places, at)
            is_last = at == len(self._text)
            if is_end and (is_last or not whole):
                return True
            if not places or is_last:
                break
            letter = self._text[at]
            places = {place + 1 for place in places if self._program[place][1](letter)}
        return False

    def _reached(self, places: set[int], at: int) -> tuple[set[int], bool]:
        """The places of letters that may come next, and True if an end is reached."""
        waiting, seen, letters, is_end = [*places], {*places}, set(), False
        while waiting:
            place = waiting.pop()
            kind, *values = self._program[place]
            following: tuple[int, ...] = ()
            if kind == "letter":
                letters.add(place)
            elif kind == "end":
                is_end = True
            elif kind == "either":
                following = (values[0], values[1])
            elif kind == "at":
                following = (place + 1,) if self._is_at(values[0], at) else ()
            elif self.reaches_end(place + 1, at, False) == values[1]:
                following = (values[0],)
            for one in following:
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        self._work += len(seen)
        if self._work > MOST_WORK:
            raise PatternError(
                f"the expression {self._pattern[:40]!r} takes too long for {self._text[:40]!r}; accepted: a shorter one"
            )
        return letters, is_end

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
