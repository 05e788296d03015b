"""Which modules a pattern takes, by their names."""

from __future__ import annotations

import pytest

from lowbit.convert import names_outright, routers_among
from lowbit.formats.layer_names import (
    heads_without_weights,
    is_embedding,
    is_head,
    why_left_alone,
)

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


@pytest.mark.parametrize(
    "layer",
    [
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        *("model.decoder.embed_tokens.3", "transformer.wte", "embeddings.xpath_embeddings.7"),
        *("char_embeddings.HashBucketCodepointEmbedder_5", "decoder.pos_emb", "iou_token"),
    ],
)
def test_embeddings_of_published_models(layer: str) -> None:
    assert is_embedding(layer) and not is_head(layer)


@pytest.mark.parametrize(
    "layer",
    [
        *("lm_head", "language_model.lm_head", "score", "classifier", "embed_out", "head"),
        *("cls.predictions.decoder", "decoder.cls.predictions.decoder", "predictions.decoder"),
        *("lm_head.decoder", "decoder", "pred_layer.proj", "lm_head.out_proj", "lm_loss"),
        *("vocab_projector", "generator_lm_head", "output_projection"),
    ],
)
def test_heads_of_published_models(layer: str) -> None:
    assert is_head(layer) and not is_embedding(layer)


@pytest.mark.parametrize(
    "layer",
    [
        *("encoder.embedding_hidden_mapping_in", "electra.embeddings_project", "model.decoder"),
        *("mobilebert.embeddings.embedding_transformation", "layers.0.attention.output"),
        *("bert.encoder.layer.0.output.dense", "lm_head.dense", "cls.predictions.transform.dense"),
        *("model.layers.0.mlp.head", "blocks.0.decoder"),
    ],
)
def test_linears_that_are_neither(layer: str) -> None:
    assert not is_embedding(layer) and not is_head(layer)


def test_heads_whose_weight_a_folder_lacks() -> None:
    """What lies beside a head shows its name."""
    for names, head in (
        (("bert.embeddings.word_embeddings.weight", "cls.predictions.transform.dense.weight"), 3),
        (("predictions.dense.weight",), 1),
        (("lm_head.dense.weight", "lm_head.bias"), 2),
        (("head.dense.weight", "decoder.bias"), 0),
        (("model.layers.0.mlp.up_proj.weight",), None),
    ):
        all_heads = (
            "decoder",
            "predictions.decoder",
            "lm_head.decoder",
            "cls.predictions.decoder",
        )
        expected = {"lm_head"} | ({all_heads[head]} if head is not None else set())
        assert heads_without_weights({}, names) == expected
    assert "proj_out" in heads_without_weights({"is_encoder_decoder": True}, [])
