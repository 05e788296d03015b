"""The stage on which tests plant cache entries: for this process's user, and for one without root's rights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.planted import AS_ROOT, ME, SOMEBODY, Stage, staged


@pytest.fixture(params=[ME, pytest.param(SOMEBODY, marks=AS_ROOT)], ids=["self", "somebody"])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("LOWBIT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with staged(request.param) as made:
        yield made
