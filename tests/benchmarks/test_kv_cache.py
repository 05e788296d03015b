"""The benchmark of KV caches: its model computes a token over each cache; on a CPU with a small one."""

from __future__ import annotations

import pytest

from benchmarks.kv_cache import FORMATS, Candidate, Model, Shape

SMALL = Shape(2, 3, 64, 4, 2, 32, 128, 256, 512, "cpu")


@pytest.mark.parametrize("name", [*FORMATS, "bf16, math"])
def test_a_token_over_a_full_cache(name: str) -> None:
    caches, nbytes = Candidate(name, SMALL).made()
    tokens = Model(SMALL)(caches)
    assert tokens.shape == (3,) and tokens.min() >= 0 and tokens.max() < 512
    bits = {"int8": 17, "float8": 17, "int8 keys, int4 values": 13.5}.get(name, 32)
    assert nbytes == 2 * 3 * 2 * 64 * 32 * bits / 8
