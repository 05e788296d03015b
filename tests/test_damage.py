"""`lowbit.tracing.damage`: what a model loses while a weight of it is rounded, and that it stays as it was."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.layers.exchange import Held, exchanged
from lowbit.tracing.damage import damages

INT2 = lb.IntxWeightOnly(2, 32)


class Output(dict):
    __getattr__ = dict.get


class Model(nn.Module):
    """Dropout, a buffer that counts calls, and an output as those of transformers where labels are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop = nn.Linear(32, 64), nn.Dropout(0.5)
        self.head = nn.Linear(64, 7)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor | None = None, named: bool = False) -> Any:
        self.calls += 1
        logits = self.head(self.drop(F.gelu(self.first(x))))
        if labels is None:
            return Output(logits=logits) if named else logits
        return Output(logits=logits, loss=F.cross_entropy(logits, labels))


X, LABELS = torch.randn(5, 32), torch.arange(5)


def rounded(model: Any) -> Any:
    """The context in which the first weight is rounded."""
    made = copy.deepcopy(model)
    lb.quantize_(made, {"first": INT2}, scales="minmax")
    return partial(exchanged, [Held(model.first, type(model.first), {"weight": made.first.weight})])


def outputs() -> tuple[Tensor, Tensor]:
    model = Model().eval()
    with torch.no_grad():
        y = model(X)
        with rounded(model)():
            return y, model(X)


def test_each_measure() -> None:
    y, q = outputs()
    model = Model()
    context = rounded(model)
    error = damages(model, [X], [context])
    assert error.measure == "error" and error.baseline == 0
    assert error.values[0] == pytest.approx(
        float((y - q).square().sum() / y.square().sum()), rel=1e-5
    )
    kl = damages(model, [{"x": X, "named": True}], [context])
    log_p, log_q = y.log_softmax(-1), q.log_softmax(-1)
    expected = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    assert kl.measure == "kl" and kl.values[0] == pytest.approx(expected.item(), rel=1e-4)
    assert damages(model, [X], [context], "kl") == kl
    loss = damages(model, [{"x": X, "labels": LABELS}], [context])
    assert loss.measure == "loss" and loss.baseline == F.cross_entropy(y, LABELS).item()
    own = damages(model, [X], [context], lambda m, b: F.cross_entropy(m(b), LABELS))
    assert own == loss and own.added[0] == F.cross_entropy(q, LABELS).item() - own.baseline


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_stays_as_it_was(fails: bool) -> None:
    model = Model().train()
    model.head.eval()
    model(X).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    parameters, random = dict(model.named_parameters()), torch.get_rng_state()
    passes: list[int] = []

    def loss(own: nn.Module, x: Tensor) -> Tensor:
        torch.rand(1)
        return own(x).sum() if passes else own(x[:, : 16 if fails else 32]).sum()

    context = rounded(model)
    try:
        damages(model, iter([X, X]), [context], loss, passed=lambda: passes.append(1))
    except RuntimeError:
        assert fails
    assert len(passes) == (0 if fails else 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dict(model.named_parameters()) == parameters and torch.equal(
        torch.get_rng_state(), random
    )
    assert all(torch.equal(parameters[name].grad, grad) for name, grad in grads.items())
    assert model.training and model.drop.training and not model.head.training


class InDict(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"y": super().forward(x)}


def test_errors() -> None:
    with pytest.raises(ValueError, match="no batches"):
        damages(Model(), [], [])
    with pytest.raises(ValueError, match="'kl', 'error' or None, got 'mse'"):
        damages(Model(), [X], [], "mse")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a dict without loss, logits or a tensor"):
        damages(InDict(32, 32), [X], [])
    with pytest.raises(TypeError, match=r"gave a tensor of shape \(5, 7\); accepted: a scalar"):
        damages(Model(), [X], [], lambda m, b: m(b))
    for loss in (None, lambda m, b: m(b).sum()):
        with pytest.raises(ValueError, match=r"batch 1: the (error|loss) .* high precision is nan"):
            damages(Model(), [X, torch.full((2, 32), math.nan)], [], loss)
