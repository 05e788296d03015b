"""The pairs of the invariant mode: what is drawn, and that a pair which differs is counted."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import invariance
from lowbit.testing.launch import launch


def test_pairs_cover_every_width_and_device() -> None:
    pairs = invariance.drawn([*invariance.MODELS], 1000, ["cpu", "cuda"])
    assert len(set(pairs)) == 1000
    for model in invariance.MODELS:
        for width in invariance.WIDTHS:
            own = {p.device for p in pairs if (p.model, p.width) == (model, width)}
            assert own == {"cpu", "cuda"}
    assert all(p.cuts == tuple(sorted(p.cuts)) for p in pairs)


@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_pair_that_differs_is_counted(width: int) -> None:
    name = "llama-float32"
    pairs = [p for p in invariance.drawn([name], 40, ["cpu"]) if p.width == width][:4]
    pool, model = invariance.pool_of(name), invariance.small_model("llama", torch.float32)
    invariance.invariant_(model)
    used = {p.own for p in pairs}
    alone = {i: invariance.logits_of(model, [pool[i]], 0, True, []) for i in used}
    changed = pairs[1].own
    alone[changed] += 1e-3
    expected = [p.own != changed for p in pairs]
    if width == 1:
        assert invariance.run_pairs(0, 1, pairs, {name: alone}) == expected
    else:
        assert launch(invariance.run_pairs, width, pairs, {name: alone}) == [expected] * width
