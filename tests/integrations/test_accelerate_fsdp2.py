"""accelerate's FSDP2 plugin with low-bit weights and states: the steps of one process, and an exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from lowbit.testing import launch
from tests.integrations.accelerate_fsdp2 import STEPS, WAYS, batch, made, optimizer_of, run, whole
from tests.schemes import relative_error
from tests.tensor.cases import same_bits

pytest.importorskip("accelerate")


IN_CODES = ("int8 weight", "frozen")
"""Their entries of a state dict are parts. accelerate's cpu_ram_efficient_loading sends entries with the names of
parameters only."""
EACH = [(way, False) for way in WAYS]
ONE_SENDS = [(way, True) for way in WAYS if way not in IN_CODES]


@pytest.mark.parametrize(
    ("way", "efficient"),
    EACH + ONE_SENDS,
    ids=lambda v: v if isinstance(v, str) else f"one_sends={v}",
)
def test_training_saving_and_resuming(way: str, efficient: bool, tmp_path: Path) -> None:
    ranks = launch(run, 2, way, efficient, str(tmp_path / "state"))
    alone = made(way)
    optimizer = optimizer_of(alone)
    for step in range(2 * STEPS):
        x = batch(step)
        (alone(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    expected = whole(alone)
    for found in ranks:
        assert found["sharded"] == 4
        assert found["trained"] == found["in optimizer"]
        for name, value in expected.items():
            assert same_bits(found["resumed"][name], found["first"][name]), name
            if value.is_floating_point():
                assert relative_error(found["first"][name], value) < 0.02, name
