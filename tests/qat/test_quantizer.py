"""A quantizer of one's own is one class, and a lookup knows the scales that siblings share."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import Spec, qat
from lowbit.tensor.trained.quantizers import Quantizer, Scales


@dataclass(frozen=True)
class NarrowRange(Quantizer):
    """Values beyond three quarters of the range clip."""

    name: ClassVar[str] = "narrow"

    def qparams(self, values: Tensor, spec: Spec, scales: Scales) -> tuple[Tensor, Tensor | None]:
        scale, zero_point = super().qparams(values, spec, scales)
        return scale * 0.75, zero_point


@pytest.mark.parametrize(
    "scheme", [lowbit.Int4WeightOnly(16), lowbit.Int8DynamicActivationInt8Weight()]
)
def test_one_class_trains_and_converts(scheme) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 8))
    present, x = copy.deepcopy(model), torch.randn(5, 32)
    qat.prepare_(present, scheme)
    qat.prepare_(model, scheme, scales="narrow")
    assert not torch.equal(model(x), present(x))
    model(x).square().sum().backward()
    grad = model[0].weight.grad
    assert grad is not None and grad.any() and not grad.all()  # where codes clip
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    values = model[0].weight.dequantize()
    y = model(x)
    qat.convert_(model)
    assert torch.equal(model[0].weight.dequantize(), values)
    torch.testing.assert_close(model(x), y)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'present' or 'learned'.*'narrow'.*got 'wide'"):
        qat.prepare_(nn.Sequential(nn.Linear(8, 8)), lowbit.Int4WeightOnly(8), scales="wide")


def test_a_lookup_has_the_scale_that_siblings_share() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

    model = Attention()
    with torch.no_grad():
        model.k_proj.weight *= 4
    qat.prepare_(model, lowbit.Float8WeightOnly(lowbit.PerTensor()))
    weight = model.q_proj.weight
    rows = torch.tensor([3, 0, 7])
    assert torch.equal(F.embedding(rows, weight), weight.dequantize()[rows])
