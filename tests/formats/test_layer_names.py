"""Which modules a pattern takes, by their names."""

from __future__ import annotations

import pytest

from lowbit.convert import names_outright, routers_among
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
    assert why_left_alone(ROUTER, pattern, router=True) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "model.layers.*",
        "model.*",
        "*.mlp.*",
        "*gate*",
        r"re:.*layers\.0\..*",
        "*.weight",
        "*e",
        "*.????",
        "*te",
        "*.g???",
    ],
)
def test_patterns_that_only_match_a_router(pattern: str) -> None:
    why = why_left_alone(ROUTER, pattern, router=True)
    assert why == "a router: a pattern that names it converts it"


def test_a_gate_is_a_router_beside_experts_only() -> None:
    names = {"0.mlp.gate.weight", "0.mlp.up.weight", "1.gate.weight", "1.experts.0.gate.weight"}
    names |= {"1.shared_experts.gate.weight", "2.router.layer.weight", "3.shared_expert_gate.bias"}
    found = {"1.gate.weight", "2.router.layer.weight", "3.shared_expert_gate.bias"}
    assert routers_among(names) == found
    assert routers_among(names, ["0.mlp"]) == {*found, "0.mlp.gate.weight"}


def test_embeddings_and_heads_are_spared_by_a_pattern_for_all_only() -> None:
    for layer, kind in ((HEAD, "the output head"), (EMBEDDING, "an embedding")):
        assert str(why_left_alone(layer, "*")).startswith(kind)
        assert str(why_left_alone(layer, None)).startswith(kind)
        assert why_left_alone(layer, "*m*") is None
    assert why_left_alone("model.layers.0.mlp.gate_proj", "*") is None
    assert str(why_left_alone("x", "*", embedding=True)).startswith("an embedding")
    assert str(why_left_alone("x", "*", head=True)).startswith("the output head")
