"""Tests with other libraries, where they are installed (extra `test-integrations`); no model comes from a hub."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _accelerate_forgets() -> Iterator[None]:
    """accelerate keeps its state in the process: without a reset, one test's choices would bind the next test."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
