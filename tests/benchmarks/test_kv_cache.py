"""The benchmark of KV caches builds each of its models; on a CPU with a small one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.kv_cache import FORMATS, PLAIN, Model

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.mark.parametrize("name", [*FORMATS, PLAIN, "bf16, transformers' sdpa"])
def test_a_token_over_a_full_cache(name: str) -> None:
    model, cache = Model(name, 2, 64, 2, tuple(SHAPE.items()), "cpu").made()
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    first = torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        logits = model(
            first,
            past_key_values=cache,
            attention_mask=mask,
            position_ids=torch.full_like(first, 63),
        ).logits
    assert logits.isfinite().all() and cache.get_seq_length() == 64
