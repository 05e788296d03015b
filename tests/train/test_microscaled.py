"""Training in MXFP8: the products of the recipe, and the way to stored weights and back."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import Float8Tensor, MXFP8MixedPrecision, train
from tests.tensor.cases import same_bits
from tests.train.problems import (
    Model,
    every_switch,
    linear,
    outcome,
    prepared,
    relative,
    switched,
    train_step,
    values,
)

RCEIL = MXFP8MixedPrecision(always=True)
FLOOR = replace(RCEIL, mapping="symmetric")
each_rule = pytest.mark.parametrize("scheme", [FLOOR, RCEIL], ids=["floor", "rceil"])
STORED = lb.MXFP8DynamicActivationMXFP8Weight()


def by_formula(x: Tensor, scheme: MXFP8MixedPrecision) -> Tensor:
    """x with each 32 elements of a row rounded, by loops over blocks, in float64."""
    found = torch.empty(x.shape, dtype=torch.float64)
    for i in range(x.shape[0]):
        for j in range(0, x.shape[1], 32):
            block = x[i, j : j + 32].double()
            largest = float(block.abs().max()) or 1.0
            if scheme.mapping == "symmetric":
                exponent = math.frexp(largest)[1] - 1 - 8
            else:
                exponent = math.ceil(math.log2(largest / 448))
            codes = (block / 2.0**exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn)
            found[i, j : j + 32] = codes.double() * 2.0**exponent
    return found


@each_rule
@every_switch
@pytest.mark.parametrize(("m", "n", "k"), [(33, 40, 70), (32, 64, 32), (1, 1, 1)])
def test_the_recipe_in_float64(m, n, k, switch, scheme):
    """Every product reads groups along the dimension that it sums over."""
    layer, x, upstream = linear(n, k), values(m, k), values(m, n, seed=3)
    scheme = switched(scheme, switch)
    found = outcome(prepared(layer, scheme), x, upstream)
    rounds = dict(zip(("output", "input", "weight"), switch, strict=True))

    def seen(t: Tensor, product: str) -> Tensor:
        return by_formula(t, scheme) if rounds[product] else t.double()

    weight = layer.weight.detach()
    expected = {
        "output": seen(x, "output") @ seen(weight, "output").t() + layer.bias.detach().double(),
        "input": seen(upstream, "input") @ seen(weight.t(), "input").t(),
        "weight": seen(upstream.t(), "weight") @ seen(x.t(), "weight").t(),
        "bias": upstream.double().sum(0),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) < 1e-6, name


def test_bfloat16_holds_the_rounded_values():
    """So its products are those of float32 values, up to the rounding of sums."""
    layer, x, upstream = linear(64, 96), values(48, 96), values(48, 64, seed=3)
    x, upstream = x.bfloat16(), upstream.bfloat16()
    short = outcome(prepared(layer.bfloat16(), RCEIL), x, upstream)
    wide = outcome(prepared(layer.float(), RCEIL), x.float(), upstream.float())
    for name, value in wide.items():
        assert relative(short[name], value) < 2**-8, name


def test_zeros_nan_and_no_rows():
    layer = prepared(linear(40, 64), RCEIL)
    x, upstream = values(34, 64), values(34, 40, seed=3)
    x[5, 40] = torch.nan
    found = outcome(layer, x, upstream)
    assert found["output"].isnan().any(1).nonzero().flatten().tolist() == [5]
    columns = found["weight"].isnan().any(0).nonzero().flatten().tolist()
    assert columns == [40] and not found["input"].isnan().any()
    found = outcome(layer, torch.zeros(34, 64), torch.zeros(34, 40))
    assert not any(found[name].any() for name in ("input", "weight"))
    found = outcome(layer, torch.zeros(0, 64), torch.zeros(0, 40))
    assert found["output"].shape == (0, 40) and not found["weight"].any()


def test_compiled_products_are_those_of_eager_code():
    model, x = (
        prepared(nn.Sequential(linear(40, 64), nn.GELU(), linear(32, 40)), RCEIL),
        values(34, 64),
    )
    expected = outcome(model, x)
    found = outcome(model, x, run=torch.compile(model, fullgraph=True, backend="aot_eager"))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@each_rule
def test_a_model_learns_as_in_high_precision(scheme):
    losses = {}
    for name, one in {"plain": None, "mxfp8": scheme}.items():
        model = Model()
        if one is not None:
            train.prepare_(model, one)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[name] = [train_step(model, optimizer, step % 4) for step in range(30)]
    assert losses["mxfp8"][-1] < 0.2 * losses["mxfp8"][0]
    assert abs(losses["mxfp8"][-1] - losses["plain"][-1]) < 0.03 * losses["plain"][0]


def test_convert_gives_the_weight_that_training_multiplied_by():
    model = nn.Sequential(linear(48, 96), nn.GELU(), linear(32, 48))
    low, x = prepared(model, RCEIL), values(40, 96)
    expected = low(x).detach()
    report = train.convert_(low)
    assert report.converted == ["0.weight", "2.weight"]
    assert isinstance(low[0].weight, Float8Tensor) and not low[0].weight.requires_grad
    with torch.no_grad():
        assert relative(low(x), expected) < 1e-6
    lb.quantize_(model, STORED)
    for i in (0, 2):
        assert same_bits(model[i].weight.codes, low[i].weight.codes)
        assert same_bits(model[i].weight.scale, low[i].weight.scale)


def test_training_starts_from_stored_weights():
    """Untouched weights come back with their codes."""
    model = nn.Sequential(linear(48, 96))
    lb.quantize_(model, STORED)
    stored = copy.deepcopy(model)
    train.prepare_(model, {"*": RCEIL})
    assert torch.equal(model[0].weight.master(), stored[0].weight.dequantize())
    model(values(40, 96)).square().mean().backward()
    assert model[0].weight.grad is not None
    train.convert_(model)
    assert torch.equal(model[0].weight.dequantize(), stored[0].weight.dequantize())
    lb.quantize_(rows := nn.Sequential(linear(48, 96)), lb.Float8WeightOnly())
    with pytest.raises(ValueError, match="already in low bits"):
        train.prepare_(rows, RCEIL)


def test_the_scheme():
    scheme = MXFP8MixedPrecision(grad_weight=False, always=True)
    note = str(train.prepare_(nn.Sequential(linear(64, 64)), scheme))
    assert "e4m3, a power of two for each 32: output, grad_input" in note
    assert train.TrainingScheme.from_dict(scheme.to_dict()) == scheme
    with pytest.raises(ValueError, match="takes no stochastic_rounding=True"):
        MXFP8MixedPrecision(stochastic_rounding=True)
    with pytest.raises(
        ValueError, match="mapping must be 'symmetric' or 'symmetric_no_clipping_err'"
    ):
        MXFP8MixedPrecision(mapping="asymmetric")
    refused = scheme._refusal_of(torch.device("cuda"))
    assert refused is None
    assert "no kernel of MXFP8" in str(MXFP8MixedPrecision()._refusal_of(torch.device("cuda")))
