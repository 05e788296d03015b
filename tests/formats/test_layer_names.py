"""Which modules a pattern takes, by their names."""

from __future__ import annotations

import pytest

from lowbit.convert import names_outright
from lowbit.formats.layer_names import why_left_alone

ROUTER, HEAD, EMBEDDING = "model.layers.0.mlp.gate", "lm_head", "model.embed_tokens"


@pytest.mark.parametrize(
    "pattern",
    [
        *("*.mlp.gate", "*gate", ROUTER, f"{ROUTER}.weight", "*.gate.weight"),
        *(r"re:.*\.gate", r"re:.*\.gate\.weight", r"re:.*mlp\.(gate|up_proj)"),
    ],
)
def test_patterns_that_name_a_router(pattern: str) -> None:
    assert names_outright(pattern, ROUTER)
    assert why_left_alone(ROUTER, pattern) is None


@pytest.mark.parametrize(
    "pattern",
    ["*", "model.layers.*", "model.*", "*.mlp.*", "*gate*", r"re:.*layers\.0\..*", "*.weight"],
)
def test_patterns_that_only_match_a_router(pattern: str) -> None:
    assert why_left_alone(ROUTER, pattern) == "a router: a pattern that names it converts it"


def test_embeddings_and_heads_are_spared_by_a_pattern_for_all_only() -> None:
    for layer, kind in ((HEAD, "the output head"), (EMBEDDING, "an embedding")):
        assert str(why_left_alone(layer, "*")).startswith(kind)
        assert str(why_left_alone(layer, None)).startswith(kind)
        assert why_left_alone(layer, "*m*") is None
    assert why_left_alone("model.layers.0.mlp.gate_proj", "*") is None
    assert str(why_left_alone("x", "*", embedding=True)).startswith("an embedding")
    assert str(why_left_alone("x", "*", head=True)).startswith("the output head")
