"""Every script of examples/ runs by itself, within seconds, and is short enough to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    """It checks itself by assertions, prints what it found, and leaves no files."""
    text = script.read_text(encoding="utf-8")
    if "from transformers import" in text:
        pytest.importorskip("transformers")
    done = forked.run(text, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
    assert not list(tmp_path.iterdir())


def test_examples_are_short_and_listed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for script in EXAMPLES:
        text = script.read_text(encoding="utf-8")
        assert 30 <= len(text.splitlines()) <= 60, script.name
        assert f"python examples/{script.name}\n" in text.partition('"""\n\nimport')[0] + "\n"
        assert f"[{script.name}]({script.name})" in page
