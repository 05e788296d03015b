"""Groups that become 0 since no smaller scale can be stored: the report says how many."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.convert import underflow
from lowbit.formats import grid
from lowbit.formats.gguf.format import gguf_scheme
from lowbit.inference import GPTQ, LearnedRounding, Prune24, Rotate, Search
from lowbit.tensor.frozen.affine_tensor import AffineTensor

F16 = torch.float16
SCHEMES = {
    **{kind: gguf_scheme(kind) for kind in ("Q4_0", "Q4_1", "Q5_1", "Q8_0")},
    **{kind: gguf_scheme(kind) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
    "gptq": grid("gptq", lb.IntxWeightOnly(4, 32, "asymmetric")),
    "awq": grid("awq", lb.IntxWeightOnly(4, 32, "asymmetric")),
    "rows": lb.IntxWeightOnly(8, scale_dtype=F16),
    "int1": lb.IntxWeightOnly(1, 32, "half_integer", scale_dtype=F16),
    "int2": lb.IntxWeightOnly(2, 32, "float_zero_point", scale_dtype=F16),
    "nvfp4": lb.NVFP4WeightOnly(),
    "double": lb.NF4WeightOnly(double_quantization=True),
    "mxfp4": lb.MXFP4WeightOnly(),
    "mxfp8": lb.MXFP8WeightOnly(),
    "bfloat16": lb.IntxWeightOnly(4, 32, scale_dtype=torch.bfloat16),
}


class Experts(nn.Module):
    def __init__(self, stack: Tensor) -> None:
        super().__init__()
        self.up = nn.Parameter(stack)


def linear(inputs: int = 300, tiny: float = 1e-12) -> nn.Sequential:
    """37 outputs: 35 are tiny, one is not, one is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 37, bias=False))
    with torch.no_grad():
        model[0].weight[:35] *= tiny
        model[0].weight[35] = 0
    return model


def counted(note: str) -> tuple[int, int]:
    reason = r"scales in (\w+) (start at|are up to \S+ apart)"
    found = re.search(rf"; (\d+) of (\d+) groups became 0, since {reason}", note)
    assert found is not None, note
    return int(found[1]), int(found[2])


def became_zero(before: Tensor, after: Tensor, group: int) -> int:
    """Groups along the last dimension, counted one by one."""
    return sum(
        bool((own != 0).any()) and not bool((new != 0).any())
        for row, made in zip(before.flatten(0, -2), after.flatten(0, -2), strict=True)
        for own, new in zip(row.split(group), made.split(group), strict=True)
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_the_report_counts_groups_that_became_zero(name: str) -> None:
    is_wide = name in ("mxfp4", "mxfp8", "bfloat16")  # down to 2^-126: below are subnormal numbers
    model = linear(512 if name[0] == "Q" else 300, 1e-42 if is_wide else 1e-12)
    before = model[0].weight.detach().clone()
    (entry,) = lb.quantize_(model, SCHEMES[name]).entries
    shape = model[0].weight.shape
    group = SCHEMES[name].weight.block_size(shape)[-1]
    count, total = counted(entry.note)
    assert count == became_zero(before, model[0].weight.dequantize(), group) > 30
    assert total == 37 * -(-shape[-1] // group)


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_is_said_where_scales_represent_all(name: str) -> None:
    """Also not of rows that were 0 before, whose scales are the smallest ones."""
    model = linear(512 if name[0] == "Q" else 300, 1.0)
    (entry,) = lb.quantize_(model, SCHEMES[name]).entries
    assert "became 0" not in entry.note


@pytest.mark.parametrize("tiny", [1e-12, 1e-4, 1e-3])
@pytest.mark.parametrize("few", [3, 30])
def test_tiny_groups_among_scales_around_their_mean(few: int, tiny: float) -> None:
    """Double quantization stores a scale near 0 as one that is too large, or as one below 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 37, bias=False))
    model[0].weight.data[:few] *= tiny
    before = model[0].weight.detach().clone()
    (entry,) = lb.quantize_(model, SCHEMES["double"]).entries
    lost = became_zero(before, model[0].weight.dequantize(), 64)
    assert (lost > 0) is (tiny < 1e-3)
    assert counted(entry.note) == (lost, 37 * 8) if lost else "became 0" not in entry.note


def test_weights_are_read_only_where_a_scale_is_at_its_smallest() -> None:
    made = AffineTensor.quantized(torch.randn(37, 300), SCHEMES["Q8_0"])
    other: Any = object()
    assert underflow(other, made) is None


def test_stacks_convolutions_tiles_and_tied_weights() -> None:
    scheme = SCHEMES["Q4_0"]
    model, stack = nn.Module(), torch.randn(3, 37, 70) * torch.tensor([1, 1e-12, 0])[:, None, None]
    model.experts = Experts(stack)
    model.conv = nn.Conv2d(5, 7, 3, bias=False)
    model.table = nn.Embedding(37, 70, padding_idx=0)
    model.head = nn.Linear(70, 37, bias=False)
    model.head.weight = model.table.weight
    with torch.no_grad():
        model.conv.weight[3:] *= 1e-12
        model.table.weight[-2:] *= 1e-12
    tiles = replace(scheme, weight=replace(scheme.weight, granularity=lb.PerBlock(16, 32)))
    model.tiles = nn.Linear(70, 37, bias=False)
    nn.init.constant_(model.tiles.weight, 1e-12)
    schemes = {
        "experts.up": scheme,
        "conv": scheme,
        "table": scheme,
        "head": scheme,
        "tiles": tiles,
    }
    notes = {e.fqn: e.note for e in lb.quantize_(model, schemes).entries}
    assert counted(notes["experts.up"]) == (37 * 3, 3 * 37 * 3)
    assert counted(notes["conv.weight"]) == (4 * 2, 7 * 2)
    assert counted(notes["table.weight"]) == (2 * 3, 37 * 3)
    assert counted(notes["tiles.weight"]) == (3 * 3, 3 * 3)
    assert notes["head.weight"] == "tied to table.weight"


@pytest.mark.parametrize(
    "steps",
    [
        [Search()],
        [GPTQ()],
        [GPTQ(), LearnedRounding(2)],
        [LearnedRounding(2, over="model")],
        [Prune24(), GPTQ()],
        [Prune24(compressed=False), LearnedRounding(2)],
        [Rotate(folded=False), GPTQ()],
    ],
    ids=lambda steps: " ".join(step.method for step in steps),
)
def test_calibration_counts_them(steps: list[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 9, bias=False))
    model[0].weight.data[:12] *= 1e-12
    scheme = lb.IntxWeightOnly(4, 32, "symmetric", scale_dtype=F16)
    batches = [torch.randn(16, 64) for _ in range(2)]
    report = lb.calibrate(model, scheme, batches, steps=steps)
    first, second = report.entries
    assert counted(first.note) == (24, 80) and "became 0" not in second.note
    assert "24 of 80 groups became 0" in str(report)


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_qat_counts_them(scales: Any) -> None:
    model = linear()
    lb.qat.prepare_(model, SCHEMES["Q4_0"], scales=scales)
    (entry,) = lb.qat.convert_(model).entries
    assert counted(entry.note) == (35 * 10, 37 * 10)
