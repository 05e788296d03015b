"""Calibration of a folder by several processes, with batches held out, and of experts on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit as lb
from lowbit.files.on_disk import zeros_on_disk
from lowbit.formats import FormatError
from lowbit.inference import AWQ, GPTQ, Layer, Search, Step
from lowbit.inference.calibration.large import Streamed
from lowbit.inference.calibration.run import Run
from lowbit.testing import launch

transformers = pytest.importorskip("transformers")
from tests.integrations.test_calibrate_folder import (  # noqa: E402
    EXPERTS,
    INT3,
    KINDS,
    assert_same,
    batches,
    held_bytes,
    left_beside,
    save,
    state,
    without_head,
)

SHARES = (([0], [1, 2]), ([], [0, 1]))


def of_ranks(rank: int, world: int, place: str, kind: str, share: int, at: int) -> dict[str, Any]:
    """Calibrate a folder and a model in memory by the same batches. The first call ends after `at` places."""
    _, _, scheme, steps = KINDS[kind]
    given = [*batches(), *batches(7)]
    own = [given[i] for i in SHARES[share][rank]]
    folder, out = Path(place) / "model", Path(place) / "out"
    options: dict[str, Any] = {"steps": steps, "group": torch.distributed.group.WORLD}
    options |= {"kv_cache": "float8", "method": "minmax"} if kind in ("static", "tied") else {}
    finish, told = Streamed.finish, []
    with pytest.MonkeyPatch.context() as patch:

        def finished(memory: Streamed, name: str) -> None:
            finish(memory, name)
            told.append(name)
            if len(told) == at:
                raise OSError("stopped")

        patch.setattr(Streamed, "finish", finished)
        if at:
            with pytest.raises((FormatError, RuntimeError), match="stopped"):
                lb.calibrate(folder, scheme, own, out=out, format="lowbit", **options)
        told.clear()
        at = 0
        report = lb.calibrate(folder, scheme, own, out=out, format="lowbit", **options)
    model = lb.load_pretrained(folder)
    expected = lb.calibrate(
        model, scheme, own, None if isinstance(scheme, dict) else without_head, **options
    )
    assert_same(lb.load_pretrained(out), model)
    assert report.learned == expected.learned and report.written is not None
    assert {n: (x.rows, x.after) for n, x in report.layers.items()} == {
        n: (x.rows, x.after) for n, x in expected.layers.items()
    }
    return {"told": told, "state": state(model), "path": report.written.path}


@pytest.mark.parametrize(
    ("kind", "share", "at"),
    [("llama", 0, 2), ("tied", 1, 2), ("static", 0, 0), ("one block", 0, 0)],
)
def test_processes_calibrate_a_folder(kind: str, share: int, at: int, tmp_path: Path) -> None:
    """To the bits of a model in the memory of each; the first one writes, and a call that ended goes on."""
    name, changes, *_ = KINDS[kind]
    save(tmp_path / "model", name, **changes)
    first, second = launch(of_ranks, 2, str(tmp_path), kind, share, at)
    assert first["told"] == second["told"] and first["path"] == str(tmp_path / "out")
    assert all(torch.equal(value, second["state"][n]) for n, value in first["state"].items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out"]


def of_other_folders(rank: int, world: int, place: str) -> str:
    with pytest.raises((RuntimeError, ValueError)) as found:
        lb.calibrate(
            Path(place) / str(rank),
            INT3,
            batches(),
            out=Path(place) / "out",
            group=torch.distributed.group.WORLD,
        )
    return str(found.value)


def test_processes_with_other_folders_are_refused(tmp_path: Path) -> None:
    for rank, size in enumerate((1, 2)):
        save(tmp_path / str(rank), tie_word_embeddings=size == 2)
    messages = launch(of_other_folders, 2, str(tmp_path))
    assert "rank 1 has another folder than rank 0" in messages[0]
    assert left_beside(tmp_path / "out") in ([], [".out.lowbit-calibration"])


class RuinOne(Search):
    """Searched scales, far too small ones in one block."""

    def apply(self, layer: Layer) -> None:
        super().apply(layer)
        assert layer.qparams is not None
        scale, zero = layer.qparams
        layer.qparams = scale / (16 if "layers.1." in layer.name else 1), zero


def test_batches_held_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits and the losses of memory, also in a call that goes on after a kill."""
    folder, finish = save(tmp_path / "model"), Streamed.finish
    few = batches()
    options: dict[str, Any] = {"steps": [RuinOne()], "held_out": batches(5)}

    def dying(memory: Streamed, name: str) -> None:
        finish(memory, name)
        if name == "1":
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamed, "finish", dying)
    with pytest.raises(KeyboardInterrupt):
        lb.calibrate(folder, INT3, few, out=tmp_path / "out", format="lowbit", **options)
    monkeypatch.undo()
    with pytest.raises(FormatError, match="another list of batches"):
        lb.calibrate(folder, INT3, few, out=tmp_path / "out", steps=options["steps"])
    report = lb.calibrate(folder, INT3, few, out=tmp_path / "out", format="lowbit", **options)
    model = lb.load_pretrained(folder)
    expected = lb.calibrate(model, INT3, few, without_head, **options)
    assert_same(lb.load_pretrained(tmp_path / "out"), model)
    *places, (whole, of_model) = expected.held_out  # a folder is never whole in memory
    assert report.held_out == places and report.layers.keys() == expected.layers.keys()
    assert whole == "the model" and of_model.kept
    assert {losses.kept for _, losses in report.held_out} >= {False}
    methods = {n: x.method for n, x in report.layers.items()}
    assert methods == {n: x.method for n, x in expected.layers.items()}


MANY = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 16}
MANY |= {"num_hidden_layers": 2}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "steps"),
    [
        ("Qwen3Moe", EXPERTS, [GPTQ()]),
        ("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 2}, [GPTQ(asymmetric=0)]),
        ("GptOss", OSS, [GPTQ(asymmetric=0)]),
        ("Qwen3Moe", EXPERTS, [AWQ(grid=2), Search()]),
    ],
    ids=["qwen", "mixtral", "gpt-oss, stored as stacks", "folded"],
)
def test_experts_on_disk_give_the_same_bits(
    kind: str, changes: dict[str, Any], steps: list[Step], tmp_path: Path
) -> None:
    folder, places = save(tmp_path / "model", kind, **changes), {}
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for name, cache in (("memory", "cpu"), ("disk", tmp_path)):
        options: dict[str, Any] = {"steps": steps, "format": "lowbit", "cache": cache}
        lb.calibrate(folder, INT3, batches(), out=tmp_path / name, **options)
        places[name] = lb.load_pretrained(tmp_path / name)
    assert_same(places["disk"], places["memory"])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "memory", "model"]


def test_a_full_disk_is_told_of(tmp_path: Path) -> None:
    """Before a write ends the process."""
    with pytest.raises(OSError, match="no room for a tensor of 1152921504606846976 bytes"):
        zeros_on_disk(tmp_path, (2**30, 2**28), torch.float32)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("step", [Search(), GPTQ()], ids=["search", "gptq"])
def test_a_few_experts_are_in_memory(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache on disk: a block without its 16 experts, the experts in low bits, and what the step makes of one
    expert at a time. Otherwise more than all of them."""
    folder = save(tmp_path / "model", "Qwen3Moe", **MANY)
    stacks = 4 * 16 * 3 * 96 * 64  # bytes of a block's experts
    monkeypatch.setattr("lowbit.inference.calibration.rounded_weight.MOST_AT_ONCE", 1)
    stepped, peaks = Run._stepped, {}
    for name, cache in (("memory", "cpu"), ("disk", tmp_path)):
        found, seen, before = [0], [], held_bytes()

        def counted(run: Run, target: Any, layer: Any, *given: Any) -> Any:
            if target.weight.ndim == 3:
                seen.append(target.fqn)  # noqa: B023
                if len(seen) % 16 == 0:  # noqa: B023  # the last of a stack, beside all others
                    found.append(held_bytes() - before)  # noqa: B023
            return stepped(run, target, layer, *given)

        monkeypatch.setattr(Run, "_stepped", counted)
        short = [{"input_ids": batch["input_ids"][:1, :8]} for batch in batches()]
        out, options = tmp_path / name, {"steps": [step], "cache": cache}
        lb.calibrate(folder, INT3, short, out=out, format="lowbit", **options)
        assert len(seen) == 2 * 2 * 16
        peaks[name] = max(found)
    # router, attention, embedding
    beside = 4 * (16 * 64 + 64 * (4 + 2 + 2) * 16 + 64 * 64 + 96 * 64)
    low = stacks * 5 // 32  # int3 in groups of 32, and parts of them before they are joined
    assert peaks["disk"] < 2 * beside + 2 * low + 3 * 4 * 192 * 64, (peaks, stacks)
    assert peaks["memory"] > stacks + (4 * 16 * 64 * 64 if isinstance(step, GPTQ) else 0)
