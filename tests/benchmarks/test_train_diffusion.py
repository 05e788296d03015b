"""The benchmark of training diffusion transformers, on tiny models and a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("peft")

from benchmarks.registry import Problem, Result, Row
from benchmarks.train_diffusion import KINDS, REFERENCE, TABLE, candidates

TINY = {
    "flux": {
        **{"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 32},
        **{"num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64},
        **{"in_channels": 16, "axes_dims_rope": (8, 12, 12), "guidance_embeds": True},
    },
    "dit": {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "sample_size": 8},
}


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("adapters", [True, False], ids=["LoRA", "all weights"])
def test_a_row(kind: str, adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate but torchao's steps, with the same first loss, since these layers are too small to convert."""
    monkeypatch.setattr("torch.nn.Module.compile", lambda *args, **kwargs: None)
    tiny = replace(KINDS[kind], sizes=TINY[kind], pictures=2, tokens=(16, 6))
    own = [c for c in candidates(tiny, adapters, "cpu") if "torchao" not in c.name]
    rows = [Row(c, TABLE.measure(c, 1)) for c in own]
    result = Result(Problem(kind, own, REFERENCE), rows)
    assert result.reference.candidate.convert is None
    assert len({row.measured.losses[0] for row in rows}) == 1
    for row in rows:
        assert row.measured.losses[1] != row.measured.losses[0]
        assert len(TABLE.cells(row, result, 1.0)) == len(TABLE.columns)
