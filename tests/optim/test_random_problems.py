"""Steps over random shapes, dtypes, formats and options against the reference step on plain tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lowbit import optim
from lowbit.optim.adam import reference
from lowbit.optim.state import state as states
from tests.optim.problems import FORMATS, is_beside, rand

shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4),
    st.lists(st.integers(40, 90), min_size=2, max_size=2),
    st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(100, 300)),
)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "maximize": st.booleans(),
    }
)


def stored(values, old, found):
    """`values` after encoding and decoding as in the state `old`. A plain state must be within its dtype's rounding. A
    state that is rounded stochastically must be beside its value."""
    if isinstance(old, states.CodebookTensor) and old.rounds_stochastically:
        assert is_beside(old, values).all()
        return found
    if isinstance(old, states.CodebookTensor):
        return type(old).from_float(values, old.format, signed=old.signed).dequantize()
    assert torch.allclose(found.double(), values.double(), rtol=0.01, atol=1e-6)
    return found


@pytest.mark.parametrize(
    "fused",
    [False, pytest.param(None, marks=pytest.mark.exhaustive)],
    ids=["operations", "kernels"],
)
@settings(max_examples=8, deadline=None)
@given(
    several=st.lists(st.tuples(shapes, st.sampled_from(FLOATS)), min_size=1, max_size=5),
    state=st.sampled_from(FORMATS),
    amsgrad=st.booleans(),
    decoupled=st.booleans(),
    options=options,
)
def test_every_step_is_the_references(several, state, amsgrad, decoupled, options, fused):
    params = [nn.Parameter(rand(*s, seed=i).to(d)) for i, (s, d) in enumerate(several)]
    cls = optim.AdamW if decoupled else optim.Adam
    optimizer = cls(params, state=state, amsgrad=amsgrad, fused=fused, **options)
    for step in range(1, 4):
        before = []
        for i, p in enumerate(params):
            p.grad = rand(*p.shape, seed=10 * step + i).to(p.dtype)
            own = {k: states.dequantized(v).float().clone() for k, v in optimizer.state[p].items()}
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
            moments = [own.get(name, torch.zeros(p.shape)) for name in names]
            wide = torch.float64 if p.dtype == torch.float64 else torch.float32
            weight = p.detach().to(wide, copy=True)
            before.append((weight, p.grad.float(), *moments))
        optimizer.step()
        t = torch.tensor(float(step), dtype=torch.float64)
        for p, (weight, grad, *moments) in zip(params, before, strict=True):
            expected = weight.clone()
            own = {"state": state, "decoupled_weight_decay": decoupled, **options}
            reference(*(expected, grad, *moments), step=t, **own)
            unit = torch.finfo(p.dtype).eps if p.dtype.itemsize == 2 else 2e-6
            scale = weight.abs() + 10 * options["lr"]
            assert ((p - expected).abs() <= 1.1 * unit * scale).all()
            for name, exact in zip(names, moments, strict=True):
                own = states.dequantized(optimizer.state[p][name])
                assert own.shape == p.shape
                close = stored(exact.float(), optimizer.state[p][name], own)
                near = torch.isclose(own.float(), close.float(), rtol=1e-4, atol=1e-6)
                # except codes near a boundary
                assert near.float().mean() > 0.99 or own.numel() == 0
