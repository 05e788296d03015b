"""torch.compile(fullgraph=True): no graph breaks, the same values and gradients, no compilation for each batch size.

Every representation goes through AOTAutograd (which flattens the tensors), in test_contract.py and below. The C++ of
inductor takes seconds and is compiled for one of each class.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit import train
from lowbit.testing.compiled import compiled, outcome
from tests.as_sent import as_sent
from tests.tensor.cases import (
    CASES,
    named,
    one_of_each,
    over,
    same,
    same_bits,
    values,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.cover("values", case=lambda case: (case.is_trainable, case.activation is not None))
@over(
    named(
        *("int4-g32", "int8dyn-int8-row", "qat-int8dyn-int4-g32", "nf4-g16-double", "nvfp4"),
        *("train-int8-weight", "qat-nvfp4", "train-bitnet", "ternary"),
    )
)
def test_a_block_by_inductor(case):
    """A linear and an activation, forward and backward, with a batch of any size. The usual run has a frozen weight
    and a trained one, one of them with a rounded input."""
    block = nn.Sequential(nn.Linear(100, 24), nn.SiLU())
    block[0].weight = nn.Parameter(case.make((24, 100)))
    fn, counter = compiled(block, "inductor")
    for batch in (4, 9):
        x = values((batch, 100), 1)
        torch._dynamo.mark_dynamic(x, 0)
        x.requires_grad_()
        found, expected = outcome(fn, block[0], x), outcome(block, block[0], x)
        for name in expected:
            error = (found[name] - expected[name]).norm() / expected[name].norm()
            assert error < (0.02 if case.activation else 1e-5), name
    assert counter.frame_count == 1


def test_values_in_arithmetic_by_inductor():
    """The last group of each row is cut: 100 values in groups of 32. One graph has a tensor of each class."""
    weights = [case for case in CASES if case.is_weight]
    made = {case: case.make((24, 100)) for case in one_of_each(weights, lambda case: case.kind)}
    tensors = {case.name: t for case, t in made.items()}
    trained = {case.name: t.requires_grad_() for case, t in made.items() if case.is_trainable}
    assert trained

    class Doubled(nn.Module):
        """A graph rounds the weights that its model reads, as a forward pass does in eager mode."""

        def forward(self, tensors):
            return {name: t * 2 for name, t in tensors.items()}

    def outcomes(fn):
        y = fn(tensors)
        loss = torch.stack([y[name].square().sum() for name in trained]).sum()
        return y, dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))

    doubled = Doubled()
    fn, _ = compiled(doubled, "inductor")
    for found, expected in zip(outcomes(fn), outcomes(doubled), strict=True):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "rows,backend", [(100, "inductor"), (128, "aot_eager"), (256, "aot_eager")]
)
def test_gathered_blocks_in_a_graph(rows, backend):
    """200 values in blocks of 128: FSDP2 gathers the second one whole."""
    layer = nn.Sequential(nn.Linear(200, rows, bias=False))
    train.prepare_(layer, train.Float8BlockMixedPrecision(always=True))
    gathered = as_sent(layer[0].weight.detach())
    fn, _ = compiled(lambda w: w.dequantize() * 2 + 1, backend)
    torch.testing.assert_close(fn(gathered), gathered.dequantize() * 2 + 1)


@over(named("int4-g32", "int8-row", "e4m3-row"))
def test_transposes_and_experts_in_a_graph(case):
    fn, _ = compiled(lambda x, w: x @ w[1].t() + F.linear(x, w[0]))
    x, weight = values((5, 100), 1), case.make((3, 24, 100))
    eager = x @ weight[1].t() + F.linear(x, weight[0])
    assert torch.allclose(fn(x, weight), eager, rtol=1e-5, atol=1e-5)


@over(named("int4-g32-asymmetric", "qat-int4-g32"))
def test_embedding_in_a_graph(case):
    fn, _ = compiled(lambda i, w: F.embedding(i, w))
    table = case.make((24, 100))
    for indices in (torch.tensor([0, 5, 5, 23]), torch.tensor([[1, 2, 3]])):
        assert same_bits(fn(indices, table), F.embedding(indices, table))


@over(named("state-8bit-signed", "state-4bit-unsigned", "state-float8-signed"))
def test_a_state_updated_in_place_in_a_graph(case):
    def step(state, gradient):
        state.copy_(state.dequantize().mul(0.9) + gradient.mul(0.1))

    fn, _ = compiled(step)
    gradient = values((24, 300), 5).square()
    state, twin = case.make((24, 300)), case.make((24, 300))
    for _ in range(2):
        fn(state, gradient)
        step(twin, gradient)
    assert same(state, twin)


def test_another_scheme_compiles_again():
    """The metadata is guarded on: a graph made for one scheme never serves another."""
    fn, counter = compiled(lambda x, w: F.linear(x, w))
    x = values((5, 96), 1)
    frozen = [case for case in CASES if case.is_weight and not case.is_trainable]
    for case in frozen[:4]:
        weight = case.make((24, 96))
        assert torch.allclose(fn(x, weight), F.linear(x, weight), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 4


@over(named("int4-g32", "int8dyn-int8-row", "qat-int4-g32"))
def test_inference_mode(case):
    linear = nn.Linear(100, 24)
    linear.weight = nn.Parameter(case.make((24, 100)))
    fn, _ = compiled(linear)
    with torch.inference_mode():
        for batch in (3, 5):
            x = values((batch, 100), 1)
            assert torch.allclose(fn(x), linear(x), rtol=1e-5, atol=1e-5)
