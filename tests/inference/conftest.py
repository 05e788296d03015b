"""What the tests of quantized inference share."""

from __future__ import annotations

import pytest


@pytest.fixture
def least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales stay as a search leaves them: no factor is in (0, 0]."""
    monkeypatch.setattr("lowbit.numerics.gain.LARGEST", 0.0)
