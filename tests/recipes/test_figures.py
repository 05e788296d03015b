"""Labels of the quick start's picture do not overlap, and all its bars can be seen."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
from recipes import figures


@pytest.mark.parametrize("int4_qat", [11.87, 11.80], ids=["worse", "better-than-high"])
def test_labels_are_apart_and_bars_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, int4_qat: float
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(figures.plt, "close", kept.append)
    values = {"high": 11.84, "int4-rtn": 12.1, "int4-qat": int4_qat, "int3-rtn": 13.9}
    values |= {"int3-qat": 12.1, "int2-rtn": 131.2, "int2-qat": 13.4}
    notes = dict.fromkeys((4, 3, 2), "100% recovered")
    figures.draw_perplexities(tmp_path / "drawn.png", values, notes)
    drawn = kept[0]
    monkeypatch.undo()
    drawn.canvas.draw()
    axis = drawn.axes[1]
    texts = [*axis.texts, *axis.get_xticklabels()]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    assert len(boxes) == 9
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    heights = [bar.get_window_extent().height / drawn.dpi * 72 for bar in axis.patches]
    assert len(heights) == 6 and min(heights) > 5  # points
    figures.plt.close(drawn)
