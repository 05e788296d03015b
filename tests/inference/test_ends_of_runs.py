"""`lowbit.calibrate` runs the model no further than it has to, also where a block or a call is unusual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.inference import GPTQ, LearnedRounding
from lowbit.inference.calibration.inputs import Watch
from lowbit.inference.calibration.places import Place
from tests.inference.test_calibrate import INT4, same


class Passes(nn.Module):
    """A block that counts the runs beyond `two`, which it calls once more for batches of so many rows. It calls `three`
    as often as the batch has parts, and once more if `one` is rounded and `grows`. `catches`: what it does after an
    error."""

    grows, rows, catches = False, 0, ""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.three = nn.Linear(64, 64)
        self.calls = [0]

    def forward(self, x: Tensor, parts: int) -> Tensor:
        try:
            y = self.two(self.one(x).relu())
        except Exception as error:
            if not self.catches:
                raise
            if self.catches == "raises":
                raise RuntimeError("no product") from error
            y = self.two(self.one(x).relu())
        self.calls[0] += 1
        parts += self.grows and type(self.one.weight) is not nn.Parameter
        if len(x) == self.rows:
            y = y + self.two(x)
        return x + sum(self.three(y.tanh() + i) for i in range(parts))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Passes() for _ in range(2))

    def forward(self, x: Tensor, parts: int) -> Tensor:
        for block in self.blocks:
            x = block(x, parts)
        return x


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("asymmetric", [0.0, 1.0])
def test_a_run_ends_with_the_last_product_that_it_waits_for(
    asymmetric: float, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches call `three` once, three times and never, so the first one does not say how many there are."""
    batches = [
        {"x": torch.randn(9, 64, generator=torch.Generator().manual_seed(n)), "parts": n}
        for n in (1, 3, 0)
    ]
    monkeypatch.setattr(Passes, "grows", grows)
    early, whole = Chain(), Chain()
    steps = [GPTQ(asymmetric=asymmetric)]
    report = lb.calibrate(early, INT4, batches, blocks=early.blocks, steps=steps)
    ends = Watch.__init__

    def runs_on(self: Watch, *arguments: object) -> None:
        ends(self, *arguments[:3], None, *arguments[4:])

    monkeypatch.setattr(Watch, "__init__", runs_on)
    lb.calibrate(whole, INT4, batches, blocks=whole.blocks, steps=steps)
    assert same(early, whole)
    assert report.layers["blocks.1.three.weight"].rows == 9 * (7 if grows else 4)
    # One run finds the groups, three see `three`, and three go on to the next block. Without a second stream, three
    # count the products of all groups.
    found = [model.blocks[1].calls[0] for model in (early, whole)]
    assert found == [7 if asymmetric else 10, 13]


@pytest.mark.parametrize("learns", [False, True])
def test_the_stream_in_high_precision_runs_whole_once_a_block(
    learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block counts the products for those that are like it; what the last run gives goes to the next one."""
    whole: list[int] = []
    forward = Passes.forward

    def ran(self: Passes, x: Tensor, parts: int) -> Tensor:
        y = forward(self, x, parts)
        whole.append(self.number)
        return y

    batches = [{"x": torch.randn(9, 64), "parts": 2} for _ in range(3)]
    models = [Chain(), Chain()]
    steps = [GPTQ(), *([LearnedRounding(0)] if learns else [])]
    for model in models:
        for i, block in enumerate(model.blocks):
            block.number = i
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "forward", ran)
        report = lb.calibrate(models[0], INT4, batches, blocks=models[0].blocks, steps=steps)
    # Three runs capture the inputs, one finds the groups, three count, three and three go on to the next block.
    losses = 3 * learns
    assert whole.count(0) == 3 + 1 + 3 + 3 + 3 + losses
    assert whole.count(1) == 1 + 3 + 3 + losses
    assert not any("another number" in note for note in report.notes)
    with monkeypatch.context() as patch:
        patch.setattr(Place, "_foresee", lambda *_: None)
        lb.calibrate(models[1], INT4, batches, blocks=models[1].blocks, steps=steps)
    assert same(*models)


@pytest.mark.parametrize("asymmetric", [0.0, 1.0])
def test_a_block_that_multiplies_more_often_than_the_one_before_it_is_named(
    asymmetric: float,
) -> None:
    model = Chain()
    model.blocks[1].rows = 7
    batches = [{"x": torch.randn(rows, 64), "parts": 1} for rows in (9, 7)]
    report = lb.calibrate(
        model, INT4, batches, blocks=model.blocks, steps=[GPTQ(asymmetric=asymmetric)]
    )
    assert report.layers["blocks.1.two.weight"].rows == (16 if asymmetric else 23)
    found = [note for note in report.notes if note.startswith("blocks.1.two.weight: a batch")]
    assert len(found) == bool(asymmetric)


class Readers(nn.Module):
    """Three linears of one input. `chains`: the last one also multiplies what the first one gives."""

    chains = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.d = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        y = first + self.b(x) + self.c(x)
        y = y + self.c(first.tanh()) if self.chains else y
        return x + self.d(y.tanh())


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("asymmetric", [0.0, 1.0])
def test_outputs_that_nobody_waits_for_are_not_computed(
    asymmetric: float, chains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Readers, "chains", chains)
    batches = [torch.randn(50, 64) for _ in range(3)]
    models, zeros = [], {True: [], False: []}
    begin = Watch.__init__
    for skips in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*(Readers() for _ in range(2)))
        found = zeros[skips]
        model[1].b.register_forward_hook(lambda m, x, y, found=found: found.append(not y.any()))

        def watched(self: Watch, *given: object, skips: bool = skips) -> None:
            begin(self, *(given if skips else given[:5]))

        with monkeypatch.context() as patch:
            patch.setattr(Watch, "__init__", watched)
            steps = [GPTQ(asymmetric=asymmetric)]
            lb.calibrate(model, INT4, batches, steps=steps, blocks=list(model))
        models.append(model)
    assert same(*models) and not any(zeros[False])
    # In one stream the first run counts products; in two the block before has counted them, for both.
    assert sum(zeros[True]) == (0 if chains or not asymmetric else 2 * 3)


def test_a_model_that_catches_the_end_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises another error, or computes the products again by another way."""
    batches = [{"x": torch.randn(9, 64), "parts": 1}] * 2
    reports = []
    for how in ("", "raises", "again"):
        monkeypatch.setattr(Passes, "catches", how)
        model = Chain()
        reports.append(lb.calibrate(model, INT4, batches, blocks=model.blocks, steps=[GPTQ()]))
    wanted, *found = ({n: (r.rows, r.after) for n, r in x.layers.items()} for x in reports)
    assert found == [wanted, wanted]


def test_patches_are_made_of_the_weights_that_are_next_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Conv1d(32, 32, 3, padding=1) for _ in range(3)))
    made, unfold = [], F.unfold
    monkeypatch.setattr(F, "unfold", lambda *a, **kw: made.append(1) or unfold(*a, **kw))
    batches = [torch.randn(1, 32, 9) for _ in range(2)]
    lb.calibrate(
        model,
        INT4,
        batches,
        lambda m, _: isinstance(m, nn.Conv1d),
        blocks=[],
        steps=[GPTQ(asymmetric=0)],
    )
    # once to find the groups, and once for each batch
    assert len(made) == 3 * (1 + 2)
