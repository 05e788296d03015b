"""Schemes to test `lowbit.train` with, and errors of results."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lowbit import Int4WeightOnly, qat, train
from lowbit.train import Float8BlockMixedPrecision, Float8MixedPrecision, Int8MixedPrecision
from tests.scaled_products import scaled_products
from tests.schemes import relative_error as relative

SCHEMES = {
    "int8": Int8MixedPrecision(always=True, stochastic_rounding=False),
    "float8": Float8MixedPrecision(always=True),
    "float8-e5m2": Float8MixedPrecision(always=True, backward="e5m2"),
    "float8-tensorwise": Float8MixedPrecision(always=True, tensorwise=True, backward="e5m2"),
    "float8-blocks": Float8BlockMixedPrecision(always=True),
}
PREPARE = {
    "int8 products": lambda m: train.prepare_(m, Int8MixedPrecision(always=True)),
    "float8 products": lambda m: train.prepare_(m, Float8MixedPrecision(always=True)),
    "int8 weights": lambda m: train.prepare_(m, train.Int8Weight()),
    "BitNet": lambda m: train.prepare_(m, train.BitNet()),
    "QAT": lambda m: qat.prepare_(m, Int4WeightOnly(group_size=32)),
}
"""Ways to prepare a model for training, by name."""
SWITCHES = [switch for switch in product((True, False), repeat=3) if any(switch)]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
every_switch = pytest.mark.parametrize(
    "switch",
    SWITCHES,
    ids=["".join("low"[on] for on in s) for s in [tuple(map(int, s)) for s in SWITCHES]],
)


def switched(scheme: Any, switch: tuple[bool, bool, bool]) -> Any:
    output, grad_input, grad_weight = switch
    return replace(scheme, output=output, grad_input=grad_input, grad_weight=grad_weight)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, rows of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64) + 0.25
    return (x * size).to(dtype)


def linear(n: int, k: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(values(n, k, seed=1) / k**0.5)
        if bias:
            layer.bias.copy_(values(1, n, seed=2)[0])
    return layer


def prepared(model: nn.Module, scheme: Any) -> nn.Module:
    """A prepared copy."""
    model = copy.deepcopy(model)
    train.prepare_(model, scheme)
    return model


def outcome(
    model: nn.Module, x: Tensor, upstream: Tensor | None = None, run: Any = None
) -> dict[str, Tensor]:
    """Output, and the gradients of the input and of every parameter by name. `run` calls the model."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x) if run is None else run(x)
    y.backward(values(*y.shape, seed=3, dtype=y.dtype) if upstream is None else upstream)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": x.grad, **grads}


HOW = ["reentrant", "checkpointed", "compiled"]


def int8_products(model: nn.Module, x: Tensor, how: str) -> int:
    """The int8 products of a step of a linear that runs as one of `HOW` says. Its outcome must be that without."""
    torch._dynamo.reset()
    expected = outcome(model, x)
    run = {
        "reentrant": lambda x: checkpoint(model, x, use_reentrant=True),
        "checkpointed": lambda x: checkpoint(model, x, use_reentrant=False),
        "compiled": torch.compile(model, fullgraph=True, backend="aot_eager"),
    }[how]
    with scaled_products() as calls:
        found = outcome(model, x, run=run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) < 1e-5, name
    return calls["int8"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 64, padding_idx=3)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(F.silu(self.up(self.table(tokens))))


def tokens(step: int = 0) -> Tensor:
    return torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(step))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    out = model(tokens(step))
    loss = F.cross_entropy(out.flatten(0, -2).float(), tokens(step).flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def peak_of_a_step(model: nn.Module, x: Tensor) -> int:
    """Bytes of GPU memory that forward and backward take beyond what is there before; of the second of two."""
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).float().square().mean().backward()
    return torch.cuda.max_memory_allocated() - before


def snr(found: Tensor, expected: Tensor) -> float:
    """Signal to noise in decibels, 20 log10 ‖expected‖ / ‖found − expected‖."""
    expected = expected.double()
    noise = (found.double() - expected).norm().clamp(min=1e-300)
    return float(20 * torch.log10(expected.norm() / noise))
