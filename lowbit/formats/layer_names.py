"""What the names of modules say: which are embeddings, output heads and routers, and which of them a pattern takes.

A bare scheme and the pattern "*" mean the linears of the blocks: they leave embeddings, the output head and routers
alone. Any other pattern takes the embeddings and the head that it matches. Only a pattern that names a router outright,
such as "*.mlp.gate", takes it. "model.layers.*" does not mean the router, whose errors change which experts run.
"""

from __future__ import annotations

from lowbit.convert import matches

_EMBEDDINGS = {"wte", "wpe", "shared", "word_embeddings", "position_embeddings"}
_HEADS = {"lm_head", "embed_out", "output", "score", "classifier"}
_ROUTERS = {"gate", "router", "shared_expert_gate"}


def is_embedding(layer: str) -> bool:
    """Whether a module of this name is an embedding, by the names that published models give them."""
    last = layer.rpartition(".")[2]
    return ("embed" in last and last != "embed_out") or last in _EMBEDDINGS


def is_head(layer: str) -> bool:
    """Whether it computes the logits."""
    return layer.rpartition(".")[2] in _HEADS and layer.count(".") <= 1


def is_router(layer: str) -> bool:
    """Whether it chooses experts."""
    return layer.rpartition(".")[2] in _ROUTERS


def names_outright(pattern: str, layer: str) -> bool:
    """Whether a pattern that matches `layer`, or its weight, names this module: it matches no longer name."""
    longer = f"{layer}_"
    return not (matches(pattern, longer) or matches(pattern, f"{longer}.weight"))


def why_left_alone(
    layer: str, pattern: str | None, embedding: bool = False, head: bool = False
) -> str | None:
    """Why the pattern that matches `layer`, or its weight, does not take it; None where it does.

    Args:
        pattern: None where no pattern matches. Then the answer is that for "*".
        embedding: whether the module is an embedding, beyond what its name says; `head` likewise.
    """
    everything = pattern is None or pattern == "*"
    if is_router(layer) and (everything or not names_outright(pattern or "*", layer)):
        kind = "a router"
    elif everything and (embedding or is_embedding(layer)):
        kind = "an embedding"
    elif everything and (head or is_head(layer)):
        kind = "the output head"
    else:
        return None
    return f"{kind}: a pattern that names it quantizes it"
