"""Stacked experts are rounded a few at a time: the bits of all at once, and the memory of a few."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import GPTQ, Layer, Search, Step
from lowbit.inference.calibration import rounded_weight
from lowbit.tensor.core.base import LowbitTensor

COUNT, WIDTH, HIDDEN = 7, 40, 64


class OwnExperts(nn.Module):
    """Top-2 experts, [E, N, K], or [E, K, N] where `transposed` says so. The last one gets no token, some get few."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        shapes = [(COUNT, HIDDEN, WIDTH), (COUNT, WIDTH, HIDDEN)]
        self.is_transposed = transposed
        self.up, self.down = (
            nn.Parameter(torch.randn(e, *((k, n) if transposed else (n, k))) * k**-0.5)
            for e, n, k in shapes
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, found = x.reshape(-1, WIDTH), torch.zeros(x.numel() // WIDTH, WIDTH)
        for e in range(COUNT - 1):
            chosen = torch.arange(len(rows)) % (4 * e + 2) < 2
            up, down = (w[e].T if self.is_transposed else w[e] for w in (self.up, self.down))
            own = nn.functional.linear(nn.functional.linear(rows[chosen], up).relu(), down)
            found[chosen] = found[chosen] + own
        return x + found.view_as(x)


class Block(nn.Module):
    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.experts = OwnExperts(transposed)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


def build(transposed: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleList([Block(transposed)])[0]).to(dtype)


def inputs(count: int = 3) -> list[Tensor]:
    return [
        torch.randn(2, 33, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(count)
    ]


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, LowbitTensor)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("scheme", "steps"),
    [
        (lb.IntxWeightOnly(3, 32), [GPTQ()]),
        (lb.IntxWeightOnly(4, 32, "float_zero_point"), [Search()]),
        (lb.MXFP4WeightOnly(), [GPTQ(sweeps=1)]),
        (lb.Float8WeightOnly(), [Search(), GPTQ(scales="minmax")]),
        (lb.NVFP4WeightOnly(), [GPTQ()]),  # scales with a part in common: all at once
        (lb.IntxWeightOnly(3, 32), []),
    ],
    ids=str,
)
def test_the_bits_of_all_at_once(
    scheme: Any, steps: list[Step], transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reports = [], []
    held_out = {"held_out": inputs(5)[3:]} if steps else {}
    for most in (2**30, 2 * 4 * WIDTH * HIDDEN, 1):  # all, two and one at a time
        monkeypatch.setattr(rounded_weight, "MOST_AT_ONCE", most)
        model = build(transposed)
        reports.append(
            lb.calibrate(model, scheme, inputs(), lambda m, n: True, steps=steps, **held_out)
        )
        found.append(values(model))
    assert len(found[0]) == 2
    for own, report in zip(found[1:], reports[1:], strict=True):
        assert all(torch.equal(own[n], t) for n, t in found[0].items())
        for name, layer in report.layers.items():
            other = reports[0].layers[name]
            assert (layer.rows, layer.unreached) == (other.rows, other.unreached) and layer.rows
            assert layer.after == pytest.approx(other.after, rel=1e-12)
            assert layer.before == pytest.approx(other.before, rel=1e-12)
        assert [kept.kept for _, kept in report.held_out] == [
            k.kept for _, k in reports[0].held_out
        ]


def test_without_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (2**30, 1):
        monkeypatch.setattr(rounded_weight, "MOST_AT_ONCE", most)
        lb.calibrate(
            model := build(), lb.IntxWeightOnly(3, 32), None, lambda m, n: True, steps=[GPTQ()]
        )
        found.append(values(model))
    assert len(found[0]) == 2 and all(torch.equal(found[1][n], t) for n, t in found[0].items())


def test_the_memory_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16: what a step sees beside the stack is one expert in float32, and not seven."""

    class Counting(Step):
        def apply(self, layer: Layer) -> None:
            sizes.append(layer.weight.nbytes + layer.minmax()[0].nbytes)
            alive = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in gc.get_objects()
                if type(t) is Tensor
                and t.dtype is torch.float32
                and t.ndim == 3
                and t.device.type == "cpu"
            }
            held.append(sum(alive.values()))

    most: dict[int, int] = {}
    one = 4 * WIDTH * HIDDEN
    for limit in (2**30, 1):
        sizes: list[int] = []
        held: list[int] = []
        monkeypatch.setattr(rounded_weight, "MOST_AT_ONCE", limit)
        model = build(dtype=torch.bfloat16)
        given = [x.bfloat16() for x in inputs()]
        lb.calibrate(model, lb.IntxWeightOnly(3, 32), given, lambda m, n: True, steps=[Counting()])
        assert len(sizes) == (2 if limit > 1 else 2 * COUNT)
        most[limit] = max(held)
    assert most[2**30] >= COUNT * one and most[1] < 2 * one
