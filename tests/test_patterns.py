"""The matcher without backtracking agrees with Python's, and ends soon where that one does not."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit.convert import patterns
from lowbit.convert.patterns import PatternError, matches

WRITTEN = [
    r".*self_attn\.(q|k|v|o)_proj$",
    r"model\.layers\.\d+\.mlp\..*",
    r"^(?!.*(shared_expert|lm_head)).*$",
    r"(?i).*LM_HEAD",
    r"(?i)[^k]m_h[^f-h]ad",
    r"(?i)[^l]m_head",
    r"(?i)[^\Wl]M_.*",
    r".*layers\.(0|[1-3]\d|\d{2,})\..*(gate|up)_proj",
    r".*\.experts\.[0-9]+\.w[123]",
    r".*(?<!x)proj",
    r"lm_head|.*\bmlp\b.*",
    r"^$",
    r"",
    r"[^a-l]odel",
    r"(?=.*q_proj)model(?!x)\S*",
    r"(a|b)*?c{0,2}\Z",
    r".*\.\w+\.\D+$",
    r"-?model[.]layers[.]1[.]",
]
NAMES = [
    *("model.layers.0.self_attn.q_proj", "model.layers.10.mlp.gate_proj", "lm_head", "LM_Head"),
    *("model.layers.1.mlp.experts.17.w2", "model.layers.33.mlp.up_proj", "abcc", "abccc", "", "\n"),
    *("model.layers.3.mlp.shared_expert.up_proj", "model.embed_tokens", "model.x_proj", "mlp"),
]


@pytest.mark.parametrize("pattern", WRITTEN)
def test_it_agrees_with_python(pattern: str) -> None:
    if "(?<" in pattern:
        with pytest.raises(PatternError, match="may take for ever; accepted: letters, classes"):
            matches(pattern, "a")
        return
    for name in NAMES:
        assert matches(pattern, name) == bool(re.match(pattern, name)), name
        assert matches(pattern, name, whole=True) == bool(re.fullmatch(pattern, name)), name


ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "^", "$", r"\b", "1"])


def larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}?", "{2,}"])
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(parts, repeats).map("(?:{0[0]}){0[1]}".format),
        parts.map("(?={})".format),
        parts.map("(?!{})".format),
    )


@settings(max_examples=300)
@given(pattern=st.recursive(ATOMS, larger, max_leaves=8), text=st.text("ab1.\n", max_size=8))
def test_it_agrees_with_python_for_any_expression(pattern: str, text: str) -> None:
    assert matches(pattern, text) == bool(re.match(pattern, text))
    assert matches(pattern, text, whole=True) == bool(re.fullmatch(pattern, text))


SLOW = {
    "nested": (r"(a+)+b", "a" * 200),
    "alternatives": (r"(a|a)*b", "a" * 200),
    "many stars": (".*" * 30 + "x", "a" * 200),
    "optional": ("a?" * 100 + "a" * 100 + "b", "a" * 100),
    "nested lookahead": ("(?=.*" * 20 + "x" + ")" * 20, "a" * 300),
}


@pytest.mark.parametrize("case", SLOW)
def test_it_ends_soon(case: str) -> None:
    pattern, text = SLOW[case]
    start = time.process_time()
    try:
        assert not matches(pattern, text)
    except PatternError as error:
        assert "takes too long" in str(error) and case == "nested lookahead"
    assert time.process_time() - start < 5


REFUSED = {
    "wrong": ("(a", "is not a regular expression"),
    "a back reference": (r"(a)\1", "has a groupref, which may take for ever"),
    "possessive": ("a++b", "has a possessive_repeat"),
    "an atomic group": ("(?>a)b", "has a atomic_group"),
    "another flag": ("(?s)a", r"has flags; accepted: \(\?i\)"),
    "an inner flag": ("(?i:a)", "has a subpattern"),
    "long": ("a" * 3000, "has 3000 letters; accepted: 2000"),
    "deep": ("(" * 900 + ")" * 900, "is nested too deep"),
    "large": ("(a{1000}){1000}", "more than 5000 steps"),
    "large and empty": ("((){2000}){2000}", "more than 5000 steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(case: str) -> None:
    pattern, why = REFUSED[case]
    with pytest.raises(PatternError, match=why):
        matches(pattern, "a" * 50)


def test_an_expression_is_compiled_once() -> None:
    patterns._compiled.cache_clear()
    for i in range(3):
        assert matches(r"layers\.\d", f"layers.{i}")
    assert patterns._compiled.cache_info().misses == 1
