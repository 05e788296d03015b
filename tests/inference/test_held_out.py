"""Batches held out of `lowbit.calibrate`: where min-max rounding does better on them, it stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import AWQ, GPTQ, Layer, LearnedRounding, Prune24, Rotate, Search, Step
from lowbit.inference.calibration.held_out import HeldOutLosses
from lowbit.tensor.core.base import LowbitTensor

INT3 = lb.IntxWeightOnly(3, 32)
SCHEMES = {
    "int3": INT3,
    "int3, values": lb.IntxWeightOnly(3, 32, "float_zero_point"),
    "float8": lb.Float8WeightOnly(),
    "nvfp4": lb.NVFP4WeightOnly(),
    "static": lb.Int8StaticActivationInt8Weight(),
}


class Ruin(Step):
    """Scales that are far too small."""

    def apply(self, layer: Layer) -> None:
        scale, zero = layer.minmax()
        layer.qparams = scale / 16, zero


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(40, 96), nn.Linear(96, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.up_proj(x).relu())


class Stack(nn.Module):
    """An embedding, three blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 40)
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build() -> Stack:
    """With embeddings so small that the head's softmax is not nearly 1 at the token itself."""
    torch.manual_seed(0)
    model = Stack()
    model.embedding.weight.data *= 0.2
    return model


def tokens(seed: int, rows: int = 4, length: int = 33) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(seed))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {
        n: p.dequantize() if isinstance(p, LowbitTensor) else p.detach()
        for n, p in model.named_parameters()
    }


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    own, other = values(a), values(b)
    return [n for n in own if not torch.equal(own[n], other[n])]


@pytest.mark.parametrize("blocks", ["found", "none"])
@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_worse_is_rounded_by_min_max(name: str, blocks: str) -> None:
    """To the bits of a call without steps, with the error of min-max in the report."""
    model, rounded = build(), build()
    given: dict[str, Any] = {} if blocks == "found" else {"blocks": []}
    seen, other = [tokens(0), tokens(1)], [tokens(2), tokens(3, 1, 5)]
    report = lb.calibrate(model, SCHEMES[name], seen, steps=[Ruin()], held_out=other, **given)
    lb.calibrate(rounded, SCHEMES[name], seen, steps=[], **given)
    assert differing(model, rounded) == []
    names = [place for place, _ in report.held_out]
    blockwise = ["before the blocks", "block 0", "block 1", "block 2"]
    assert names == (["the model"] if blocks == "none" else blockwise), names
    for _, losses in report.held_out:
        assert losses.found > losses.minmax > 0 and not losses.kept
    for layer in report.layers.values():
        assert layer.method == "Ruin, then min-max" and layer.after == layer.before
    assert report.notes == [
        "2 of 4 batches were held out; min-max rounding is better on them in "
        + ("the model" if blocks == "none" else "4 places (before the blocks, block 0, block 1, …)")
        + ", and stays there"
    ]
    assert "which is kept" in str(report) and str(report).count("Ruin, then min-max") == 7


@pytest.mark.parametrize(
    "steps",
    [
        [Search()],
        [AWQ(grid=3), Search()],
        [GPTQ()],
        [GPTQ(asymmetric=0)],
        [Prune24(), GPTQ()],
        [Rotate(folded=False), GPTQ()],
    ],
    ids=str,
)
def test_what_is_better_stays(steps: list[Step]) -> None:
    """With the bits of a call without batches held out, which no step and no static scale sees."""
    seen = [tokens(seed) for seed in range(6)]
    scheme = lb.IntxWeightOnly(3, 32, "symmetric")
    model, alone = build(), build()
    report = lb.calibrate(model, scheme, seen, steps=steps, held_out=[tokens(9, 64)])
    expected = lb.calibrate(alone, scheme, seen, steps=steps)
    assert differing(model, alone) == [] and expected.held_out == []
    assert [place for place, _ in report.held_out][4:] == ["the model"]
    assert all(losses.kept for _, losses in report.held_out)
    assert report.notes[-1].startswith("1 of 7 batches were held out; the steps are nowhere worse")
    assert {n: x.rows for n, x in report.layers.items()} == {
        n: x.rows for n, x in expected.layers.items()
    }


@pytest.mark.parametrize("wrong", [(0, 1, 2), (1,)], ids=str)
def test_the_model_loses_no_more_than_by_min_max(wrong: tuple[int, ...]) -> None:
    """The first channel is small in each block, and the head reads little else. With scales of it that are far too
    small the error of a block is less than by min-max, and the divergence of the model is greater."""

    class OfSome(Step):
        def apply(self, layer: Layer) -> None:
            Search().apply(layer)
            assert layer.qparams is not None
            scale, zero = layer.qparams
            if layer.name in {f"layers.{i}.down_proj.weight" for i in wrong}:
                scale = scale.index_fill(0, torch.tensor([0]), 1e-6)
            layer.qparams = scale, zero

    model, rounded = (read_by_one_channel(build()) for _ in range(2))
    scheme = {"layers.*": lb.IntxWeightOnly(4, 32, "symmetric")}
    seen, other = [tokens(0), tokens(1)], [tokens(2), tokens(3)]
    with torch.no_grad():
        plain = [read_by_one_channel(build())(ids).log_softmax(-1) for ids in other]
    report = lb.calibrate(model, scheme, seen, steps=[OfSome()], held_out=other)
    lb.quantize_(rounded, scheme, scales="minmax")
    *blocks, (place, losses) = report.held_out
    assert place == "the model" and not losses.kept and all(own.kept for _, own in blocks), report
    back = {name for name, layer in report.layers.items() if layer.method.endswith("min-max")}
    assert back and set(differing(model, rounded)) == report.layers.keys() - back
    lost = []
    for one in (model, rounded):
        with torch.no_grad():
            found = [one(ids).log_softmax(-1) for ids in other]
        pairs = zip(plain, found, strict=True)
        lost.append(sum(float((p.exp() * (p - q)).sum()) for p, q in pairs))
    assert lost[0] <= lost[1] * (1 + 1e-5)
    of_back = {name.replace("layers.", "block ").rsplit(".", 2)[0] for name in back}
    assert losses.back == tuple(sorted(of_back)) and losses.left is not None
    assert losses.left <= losses.minmax < losses.found
    assert f"with min-max in {', '.join(losses.back)} {losses.left:.3e}, which is kept" in str(
        report
    )
    where = f"for the whole model in {', '.join(losses.back)}, and stays there"
    assert report.notes[-1].endswith(f"min-max rounding is better on them {where}")


def read_by_one_channel(model: Stack) -> Stack:
    with torch.no_grad():
        model.head = nn.Linear(40, 50, bias=False)
        model.head.weight.copy_(torch.randn(50, 40, generator=torch.Generator().manual_seed(1)))
        model.head.weight *= 1e-3
        model.head.weight[:, 0] *= 1e5
        model.embedding.weight[:, 0] *= 1e-2
        for layer in model.layers:
            layer.down_proj.weight[0] *= 1e-2
    return model


def test_gptq_on_a_few_tokens() -> None:
    """Four tokens for Hessians of 40 and 96 inputs: what fits them is worse for others than min-max rounding."""
    model, rounded, scheme = build(), build(), lb.IntxWeightOnly(2, 32)
    few, other = [tokens(0, 1, 4)], [tokens(seed) for seed in (7, 8)]
    step = GPTQ(damping=1e-4)
    report = lb.calibrate(model, scheme, few, steps=[step], held_out=other)
    lb.quantize_(rounded, scheme, scales="minmax")
    assert not all(losses.kept for _, losses in report.held_out), report

    assert report.held_out[0][0] == "before the blocks"  # the embedding that is tied to the head
    for place, losses in report.held_out[1:]:
        if not losses.kept:
            own, other_own = (m.layers[int(place[-1])] for m in (model, rounded))
            assert differing(own, other_own) == [], place


def test_what_is_refused() -> None:
    model, other = build(), [tokens(1)]
    for steps in ([], [LearnedRounding()], [Search(), LearnedRounding(over="model")]):
        with pytest.raises(ValueError, match="held_out is for steps on layers"):
            lb.calibrate(model, INT3, [tokens(0)], steps=steps, held_out=other)
    with pytest.raises(TypeError, match="held_out: not read"):
        lb.calibrate(model, INT3, steps=[GPTQ()], held_out=other)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="held_out: not read"):
        lb.calibrate(model, INT3, held_out=other)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="held_out must be a list of batches, got one Tensor"):
        lb.calibrate(model, INT3, [tokens(0)], held_out=tokens(1))
    masked = {"ids": tokens(1), "attention_mask": torch.zeros(4, 33)}
    for nothing in ([masked], [tokens(1, 0)]):
        with pytest.raises(
            ValueError, match=r"held_out has 1 batches, none of .* \[\] to hold out none"
        ):
            lb.calibrate(model, INT3, [tokens(0)], held_out=nothing)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_one_batch_in_eight_is_held_out() -> None:
    """Of eight and more, unless `held_out` says otherwise or learned rounding holds out sequences itself."""
    given = [tokens(seed, 2, 7) for seed in range(17)]
    models = [build() for _ in range(4)]
    reports = [
        lb.calibrate(models[0], INT3, given, steps=[Search()]),
        lb.calibrate(models[1], INT3, given[:15], steps=[Search()], held_out=given[15:]),
        lb.calibrate(models[2], INT3, given, steps=[Search()], held_out=[]),
        lb.calibrate(models[3], INT3, given, steps=[Search(), LearnedRounding(steps=1)]),
    ]
    rows = [report.layers["layers.0.up_proj.weight"].rows for report in reports]
    assert rows == [15 * 14, 15 * 14, 17 * 14, 17 * 14]
    assert differing(models[0], models[1]) == [] and reports[0].held_out == reports[1].held_out
    assert len(reports[0].held_out) == 5 and not reports[2].held_out and not reports[3].held_out
    few = lb.calibrate(build(), INT3, given[:7], steps=[Search()])
    assert few.layers["layers.0.up_proj.weight"].rows == 7 * 14 and few.held_out == []


def test_the_report_tells_of_what_stays() -> None:
    """The error and the zeros of min-max rounding after pruning and rotation, not those before."""
    scheme = lb.IntxWeightOnly(4, 32, "symmetric")
    for step in (Prune24(), Rotate(folded=False)):
        seen, other = [tokens(0), tokens(1)], [tokens(2)]
        report = lb.calibrate(build(), scheme, seen, steps=[step, Ruin()], held_out=other)
        alone = lb.calibrate(build(), scheme, seen, steps=[step])
        name = "layers.0.up_proj.weight"
        found, wanted = report.layers[name], alone.layers[name]
        assert found.method.endswith("then min-max") and wanted.after > 1.5 * wanted.before
        assert found.after == pytest.approx(wanted.after, rel=1e-6) and found.zeros == wanted.zeros
        assert str(found) in str(report)


def test_a_loss_that_is_not_a_number_is_not_the_better_one() -> None:
    nan = float("nan")
    assert not HeldOutLosses(minmax=1.0, found=nan).kept
    assert HeldOutLosses(minmax=nan, found=1.0).kept and HeldOutLosses(1.0, 1.0).kept
    assert "nothing is compared" in str(HeldOutLosses(nan, nan))


def test_a_model_with_one_output() -> None:
    """Whose softmax is 1, so that a divergence would tell nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    given = [torch.randn(16, 32) for _ in range(8)]
    report = lb.calibrate(model, INT3, given, steps=[Ruin()])
    assert [losses.kept for _, losses in report.held_out] == [False]


def test_blocks_without_weights_are_not_compared() -> None:
    def is_last(module: nn.Module, name: str) -> bool:
        return name.startswith("layers.2")

    report = lb.calibrate(
        build(), INT3, [tokens(0)], is_last, steps=[Search()], held_out=[tokens(1)]
    )
    assert [place for place, _ in report.held_out] == ["block 2", "the model"]


class Named(Stack):
    """Gives its output as `made` says."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, ids: Tensor) -> Any:
        return self.made(super().forward(ids))


@pytest.mark.parametrize("blocks", [None, []])
@pytest.mark.parametrize(
    "made",
    [
        lambda y: {"text": "no tensor", "parts": [("name", y)], "other": None},
        lambda y: SimpleNamespace(scores=y),
        lambda y: {"ids": y.argmax(-1), "scores": y},
        lambda y: {"cost": y.mean(), "scores": y},
    ],
)
def test_outputs_of_other_names_are_compared(made: Any, blocks: Any) -> None:
    torch.manual_seed(0)
    report = lb.calibrate(Named(made), INT3, [tokens(i) for i in range(8)], blocks=blocks)
    name, losses = report.held_out[-1]
    assert name == "the model" and 0 < losses.found <= losses.minmax


@pytest.mark.parametrize("blocks", [None, []])
@pytest.mark.parametrize("made", [lambda y: None, lambda y: {"ids": y.argmax(-1)}, Tensor.long])
def test_outputs_without_floats_are_left_out_and_named(made: Any, blocks: Any) -> None:
    torch.manual_seed(0)
    model = Named(made)
    report = lb.calibrate(model, INT3, [tokens(i) for i in range(8)], blocks=blocks)
    assert [name for name, _ in report.held_out] == (
        [] if blocks == [] else [f"block {i}" for i in range(3)]
    )
    alone = "nothing was" if blocks == [] else "its blocks alone were"
    assert f"hold no floats, so that {alone} compared" in str(report)
    assert isinstance(model.layers[0].up_proj.weight, LowbitTensor)


def test_a_loss_before_logits_is_not_what_is_compared() -> None:
    found = []
    for made in (lambda y: y, lambda y: (y.mean(), y)):
        torch.manual_seed(0)
        found.append(lb.calibrate(Named(made), INT3, [tokens(i) for i in range(8)]).held_out)
    assert found[0] == found[1]
