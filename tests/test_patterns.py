"""Expressions of files are matched as Python matches them, and soon, or refused."""

from __future__ import annotations

import re
import time

import pytest

from lowbit.convert.patterns import PatternError, is_refused, matches

WRITTEN = [
    r".*self_attn\.(q|k|v|o)_proj$",
    r"model\.layers\.\d+\.mlp\..*",
    r"^(?!.*(shared_expert|lm_head)).*$",
    r"(?i).*LM_HEAD",
    r".*layers\.(0|[1-3]\d|\d{2,})\..*(gate|up)_proj",
    r".*layers\.\d+\.mlp\.experts\.\d+\..*",
    r".*(?<!x)proj",
    r"lm_head|.*\bmlp\b.*",
    r"(model\.)?layers\.(\d+\.){1,2}.*",
    r"",
]
NAMES = [
    *("model.layers.0.self_attn.q_proj", "model.layers.10.mlp.gate_proj", "lm_head", "LM_Head"),
    *("model.layers.1.mlp.experts.17.w2", "model.layers.33.mlp.up_proj", "abcc", "", "\n"),
    "model.language_model.layers.33.mlp.shared_expert.experts.101.gate_and_up_projection",
]


@pytest.mark.parametrize("pattern", WRITTEN)
def test_it_agrees_with_python(pattern: str) -> None:
    assert not is_refused(pattern)
    for name in NAMES:
        assert matches(pattern, name) == bool(re.match(pattern, name)), name
        assert matches(pattern, name, whole=True) == bool(re.fullmatch(pattern, name)), name


SLOW = {
    "nested": (r"(a+)+b", "a" * 200),
    "alternatives": (r"(a|a)*b", "a" * 200),
    "many stars": (".*" * 30 + "x", "a" * 200),
    "optional": ("a?" * 100 + "a" * 100 + "b", "a" * 100),
    "nested lookahead": ("(?=.*" * 20 + "x" + ")" * 20, "a" * 300),
    "large": ("(a{1000}b?){1000}", "a" * 50),
    "large and empty": ("((){2000}){2000}", ""),
    "in alternatives": ("(?:x|" + ".*" * 20 + "y)", "a" * 200),
    "a condition": ("(a)?(?(1)" + ".*" * 20 + "y|b)", "a" * 200),
}


@pytest.mark.parametrize("case", SLOW)
def test_what_may_take_for_ever_is_refused(case: str) -> None:
    pattern, text = SLOW[case]
    with pytest.raises(PatternError, match=r"may take too long .*accepted: fewer repetitions"):
        matches(pattern, text)
    assert is_refused(pattern)


def test_what_is_accepted_ends_soon() -> None:
    start = time.process_time()
    assert not matches(".*" * 3 + "x", "a" * 200)
    assert not matches("(a*b?){2}x", "a" * 100)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("pattern", "why"),
    [("(a", "is not a regular expression"), ("a" * 3000, "has 3000 letters; accepted: 2000")],
)
def test_what_is_wrong_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why):
        matches(pattern, "a" * 50)
