"""The comparison of losses under torchtitan: differences, table, report and mistakes; no training."""

from __future__ import annotations

import json

import pytest

from recipes.command_line import UserError
from recipes.torchtitan import compare


def record(run: str, losses: list[float], seed: int = 0) -> dict:
    return {
        "run": run,
        "seed": seed,
        "options": compare.RUNS[run],
        "losses": losses,
        "tokens_s": 1000.0,
        "peak_gib": 12.5,
        "seconds": 1.0,
    }


REFERENCE = [10.0 - i / 100 for i in range(400)]


def test_differences_are_paired_by_step():
    """A constant distance has no spread, however much the loss itself changes."""
    found = compare.block_differences([loss + 0.25 for loss in REFERENCE], REFERENCE)
    assert len(found) == compare.BLOCKS
    assert found == pytest.approx([0.25] * compare.BLOCKS)


@pytest.mark.parametrize("steps", [1, 2, 7, 41])
def test_short_runs(steps):
    found = compare.block_differences([1.0] * steps, [0.5] * steps)
    assert found and found == pytest.approx([0.5] * len(found))


def test_only_the_last_quarter_counts():
    losses = [100.0] * 300 + REFERENCE[300:]
    assert compare.block_differences(losses, REFERENCE) == pytest.approx([0.0] * compare.BLOCKS)


def test_the_table_has_an_interval():
    noisy = [loss + 0.01 * (-1) ** (i // 10) for i, loss in enumerate(REFERENCE)]
    made = compare.table([record("bf16", REFERENCE), record("int8", noisy)])
    rows = {line.split("|")[1].strip(): line for line in made.splitlines()[2:]}
    assert set(rows) == {"bf16", "int8"}
    assert "+0.0000" in rows["int8"] and "± 0.0075" in rows["int8"]
    assert "±" not in rows["bf16"]
    assert "1,000" in rows["int8"] and "12.5" in rows["int8"]


def test_the_reference_is_the_mean_of_both_runs_in_bfloat16():
    higher = [loss + 0.5 for loss in REFERENCE]
    runs = [record("bf16", REFERENCE), record("bf16-again", higher), record("int8", higher)]
    rows = {line.split("|")[1].strip(): line for line in compare.table(runs).splitlines()[2:]}
    assert "-0.2500" in rows["bf16"] and "+0.2500 (+3.70%)" in rows["int8"]
    assert compare.reference_losses(runs[:1]) == {0: REFERENCE}


def test_the_report_is_written(tmp_path, capsys):
    runs = [record("bf16", REFERENCE), record("AdamW4bit", REFERENCE)]
    content = {"settings": {"steps": 400}, "runs": runs}
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert compare.main(["--out", str(tmp_path), "--report"]) == 0
    assert "AdamW4bit" in (tmp_path / "report.md").read_text()
    assert "AdamW4bit" in capsys.readouterr().out


def test_a_run_is_a_torchrun_with_its_options(tmp_path):
    given, extra = compare.parse(["--processes", "4", "--", "--compile.no-enable"])
    line = compare.command("int8", 3, tmp_path, given, extra)
    assert "--nproc-per-node=4" in line and line[-1] == "--compile.no-enable"
    assert line[line.index("--lowbit.train") + 1] == "int8(always=True)"
    assert line[line.index("--debug.seed") + 1] == "3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "bf16,int5"], r"there is no run 'int5'; accepted: bf16, bf16-again, int8"),
        (["--seeds", "a"], r"--seeds a: numbers with commas are accepted"),
        (["--report", "--out", "nowhere"], r"nowhere holds no results.json; train first"),
    ],
)
def test_mistakes(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        compare.run(options)


def test_other_settings_need_another_folder(tmp_path):
    content = {"settings": {"steps": 5}, "runs": []}
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"holds runs with .*; give another --out"):
        compare.run(["--out", str(tmp_path)])
