"""Which weights of a model of transformers are quantized while its folder is read."""

from __future__ import annotations

from typing import Any

from torch import nn

from lowbit.convert import Choice, Owner, stacked
from lowbit.formats.layer_names import is_head, why_left_alone
from lowbit.tensor.frozen.conv_tensor import CONVOLUTIONS


class FolderChoice(Choice):
    """The rule for a model of transformers that is quantized while it is read: "*" also leaves the output head alone,
    and another pattern takes the head and the embeddings that it matches.

    Args:
        model: with its weights or without.
        experts: True lets "*" take the stacked weights of experts.
    """

    def __init__(self, model: Any, experts: bool) -> None:
        super().__init__(model)
        self.experts = experts
        heads = getattr(model, "get_output_embeddings", None)
        self.has_heads = heads is not None  # models of diffusers have none
        self.head = None if heads is None else heads()

    def why_left(self, owner: Owner, layer: str, pattern: str | None) -> str | None:
        module, attribute, _ = owner
        if not self.experts and attribute in stacked(module, layer):
            return "of experts, and experts=False"
        if isinstance(module, CONVOLUTIONS):
            return "a convolution: lowbit.quantize_ converts it, after the load"
        is_embedding = isinstance(module, nn.Embedding)
        computes_logits = module is self.head or (self.has_heads and is_head(layer))
        if attribute == "weight" and (is_embedding or computes_logits):
            return why_left_alone(layer, pattern, embedding=is_embedding, head=computes_logits)
        return super().why_left(owner, layer, pattern)
