"""Training in float8 blocks: the gradients of the recipe, and the way from stored weights and back to them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import BlockMixedPrecisionTensor, Float8Tensor, train
from lowbit.schemes.mixed_precision import UE8M0_BLOCK_ACTIVATION, UE8M0_BLOCK_WEIGHT
from lowbit.train import Float8BlockMixedPrecision, Float8MixedPrecision
from lowbit_kernels.quantize.quantize_blocks import quantize_blocks
from lowbit_kernels.runtime import launches
from tests.tensor.cases import same_bits
from tests.train.problems import linear, outcome, prepared, relative, snr, values

BLOCKS = Float8BlockMixedPrecision(always=True)
STORED = lb.Float8DynamicActivationFloat8Weight(lb.PerBlock(128, 128))
SHAPES = [(300, 260, 390), (128, 128, 128), (7, 131, 257), (1, 1, 1)]


def by_formula(x: Tensor, rows: int, columns: int, power_of_two: bool = False) -> Tensor:
    """x rounded to e4m3 with a scale for each block of rows x columns, by loops over blocks, in float64."""
    found = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns].float()
            scale = block.abs().max() / 448
            if power_of_two:
                scale = torch.exp2(torch.log2(scale.double()).ceil()).float()
            codes = (block * (1 / scale)).to(torch.float8_e4m3fn)
            found[i : i + rows, j : j + columns] = codes.double() * scale.double()
    return found


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_recipe_in_float64(m, n, k, power_of_two):
    """Section 3.3 of arXiv 2412.19437: every product reads groups along the dimension that it sums over, and both
    products of the weight read the same rounded weight."""
    layer, x, upstream = linear(n, k), values(m, k), values(m, n, seed=3)
    found = outcome(prepared(layer, replace(BLOCKS, power_of_two=power_of_two)), x, upstream)
    weight = by_formula(layer.weight.detach(), 128, 128, power_of_two)
    expected = {
        "output": by_formula(x, 1, 128, power_of_two) @ weight.t() + layer.bias.double(),
        "input": by_formula(upstream, 1, 128, power_of_two) @ weight,
        "weight": by_formula(upstream, 128, 1, power_of_two).t()
        @ by_formula(x, 128, 1, power_of_two),
        "bias": upstream.double().sum(0),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(found[name], value) < 1e-6, name


def test_outlying_values_cost_precision_in_their_own_block_only():
    layer, x = linear(128, 512, bias=False), values(256, 512)
    x[5, 7] = 3e4
    exact = outcome(layer.double(), x.double())["output"]
    rows = {
        name: outcome(prepared(layer.float(), scheme), x)["output"][5].double() - exact[5]
        for name, scheme in {
            "blocks": BLOCKS,
            "rows": Float8MixedPrecision(always=True),
        }.items()
    }
    assert rows["blocks"].norm() < rows["rows"].norm()
    assert relative(exact[5] + rows["blocks"], exact[5]) < 0.05


@pytest.mark.parametrize("power_of_two", [False, True])
def test_convert_gives_the_weight_that_training_multiplied_by(power_of_two):
    model = nn.Sequential(linear(260, 390), nn.GELU(), linear(100, 260))
    low = prepared(model, Float8BlockMixedPrecision(always=True, power_of_two=power_of_two))
    x = values(40, 390)
    expected = low(x).detach()
    codes, scale = low[0].weight.row_codes()
    report = train.convert_(low)
    assert report.converted == ["0.weight", "2.weight"]
    weight = low[0].weight
    assert isinstance(weight, Float8Tensor) and not weight.requires_grad
    assert same_bits(weight.codes[:260], codes) and same_bits(weight.scale_values(), scale)
    assert weight.scale.dtype is (torch.uint8 if power_of_two else torch.float32)
    assert relative(low(x).detach(), expected) < 1e-6
    quantized = copy.deepcopy(model)
    stored = lb.Scheme(UE8M0_BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION) if power_of_two else STORED
    lb.quantize_(quantized, stored)
    assert same_bits(quantized[0].weight.codes, weight.codes)
    assert same_bits(quantized[0].weight.scale, weight.scale)
    train.prepare_(low, {"0": BLOCKS, "2": BLOCKS})  # and starts from it
    assert torch.equal(low[0].weight.master(), weight.dequantize())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(values(3, 150, 200, seed=1))

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


def is_expert(module, name):
    return isinstance(module, Experts)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("stored", [False, True], ids=["float32", "float8"])
def test_the_recipe_of_experts_in_float64(stored, power_of_two):
    """Blocks of columns begin with an expert's rows. Training may start from float8."""
    model, tokens = Experts(), (130, 0, 300)
    if stored:
        scheme = lb.Scheme(UE8M0_BLOCK_WEIGHT, UE8M0_BLOCK_ACTIVATION) if power_of_two else STORED
        lb.quantize_(model, scheme, is_expert)
    start = model.weight.dequantize() if stored else model.weight.detach().clone()
    train.prepare_(model, replace(BLOCKS, power_of_two=power_of_two), is_expert)
    assert torch.equal(model.weight.master(), start)
    ends = torch.tensor(tokens).cumsum(0).to(torch.int32)
    x, grad = values(440, 200).requires_grad_(), values(440, 150, seed=3)
    with launches.counted() as calls:
        y = model(x, ends)
        y.backward(grad)
    assert calls["grouped_block_mm", "torch"] == 3
    weights = [by_formula(w, 128, 128, power_of_two) for w in start]
    rows = [by_formula(t.detach(), 1, 128, power_of_two) for t in (x, grad)]
    wanted = torch.zeros(3, 150, 200, dtype=torch.float64)
    for e, (end, count) in enumerate(zip(ends.tolist(), tokens, strict=True)):
        own = slice(end - count, end)
        assert not count or relative(y[own].detach(), rows[0][own] @ weights[e].t()) < 1e-6
        assert not count or relative(x.grad[own], rows[1][own] @ weights[e]) < 1e-6
        of_x, of_grad = (by_formula(t.detach()[own], 128, 1, power_of_two) for t in (x, grad))
        wanted[e] = of_grad.t() @ of_x
    assert relative(model.weight.grad, wanted) < 1e-6
    assert not y[430:].any() and not x.grad[430:].any() and not model.weight.grad[1].any()


def test_convert_of_experts():
    model = Experts()
    low = copy.deepcopy(model)
    train.prepare_(low, BLOCKS, is_expert)
    train.convert_(low)
    lb.quantize_(model, STORED, is_expert)
    assert same_bits(low.weight.codes, model.weight.codes)
    assert low.weight.scale.shape == (3, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_training_starts_from_stored_weights(dtype):
    """Untouched weights come back with their codes. Trained ones learn."""
    model = nn.Sequential(linear(260, 390, dtype=dtype), nn.GELU(), linear(100, 260, dtype=dtype))
    lb.quantize_(model, STORED)
    stored = copy.deepcopy(model)
    report = train.prepare_(model, {"0": BLOCKS, "2": BLOCKS})
    assert report.converted == ["0.weight", "2.weight"] and model[0].weight.requires_grad
    assert isinstance(model[0].weight, BlockMixedPrecisionTensor)
    assert torch.equal(model[0].weight.master(), stored[0].weight.dequantize())
    untouched = copy.deepcopy(model)
    train.convert_(untouched)
    for i in (0, 2):
        assert same_bits(untouched[i].weight.codes, stored[i].weight.codes)
        assert relative(untouched[i].weight.scale, stored[i].weight.scale) < 2**-8
    x, target = values(64, 390, dtype=dtype), values(64, 100, seed=5, dtype=dtype)
    optimizer = lb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(15):
        with launches.counted() as calls:
            loss = (model(x) - target).float().square().mean()
            loss.backward()
        assert calls["block_scaled_mm", "torch"] == 5  # the input needs no gradient
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    train.convert_(model)
    assert isinstance(model[0].weight, Float8Tensor)
    final = float((model(x) - target).detach().float().square().mean())
    assert abs(final - losses[-1]) < 0.2 * losses[-1]


def test_training_starts_from_its_own_blocks_only():
    model = nn.Sequential(linear(64, 64), linear(64, 64))
    for scheme in (lb.Float8WeightOnly(), lb.Int8WeightOnly()):
        quantized = copy.deepcopy(model)
        lb.quantize_(quantized, scheme)
        with pytest.raises(ValueError, match="already in low bits"):
            train.prepare_(quantized, BLOCKS)
    lb.quantize_(model, STORED)
    with pytest.raises(ValueError, match="already in low bits"):
        train.prepare_(model, Float8MixedPrecision(always=True))


def test_a_low_rank_adapter_over_stored_weights_learns():
    torch.manual_seed(0)
    base = linear(140, 200, dtype=torch.float32)
    model = nn.Sequential(base)
    lb.quantize_(model, STORED)
    down, up = nn.Linear(200, 8, bias=False), nn.Linear(8, 140, bias=False)
    nn.init.zeros_(up.weight)
    x = values(50, 200).requires_grad_()
    y = model(x) + up(down(x))
    upstream = values(50, 140, seed=3)
    y.backward(upstream)
    weight = model[0].weight.dequantize().double()
    assert relative(x.grad, upstream.double() @ weight) < 1e-6
    assert relative(up.weight.grad, upstream.double().t() @ down(x).detach().double()) < 1e-6
    assert model[0].weight.grad is None


def test_stochastic_rounding_is_refused():
    with pytest.raises(ValueError, match="takes no stochastic_rounding=True"):
        Float8BlockMixedPrecision(stochastic_rounding=True)


def test_the_report_names_the_blocks():
    scheme = Float8BlockMixedPrecision(grad_weight=False, always=True, power_of_two=True)
    layer = nn.Sequential(linear(200, 200))
    assert "a scale a block of 128 x 128: output, grad_input; scales are powers of two" in str(
        train.prepare_(layer, scheme)
    )
    assert train.TrainingScheme.from_dict(scheme.to_dict()) == scheme


def test_signal_to_noise_of_a_deep_model():
    """Errors of a chain of layers stay those of 3 bits of mantissa."""
    model = nn.Sequential(*(linear(256, 256) for _ in range(4)))
    x = values(128, 256)
    found, expected = outcome(prepared(model, BLOCKS), x), outcome(model.double(), x.double())
    for name, value in expected.items():
        assert snr(found[name], value) > 18, name


def test_powers_of_two_of_kernel_and_spec_agree():
    """Inputs of frozen weights are rounded by the kernel on a GPU, and by the spec elsewhere."""
    x = values(37, 300) * torch.logspace(-30, 30, 37)[:, None]
    x[3, :200], x[5] = 0, 2.0**-140
    codes, scale, _, _ = quantize_blocks(x, tiles=False, columns=False, power_of_two=True)
    own, factors, _ = UE8M0_BLOCK_ACTIVATION.quantize(x)
    assert same_bits(codes[:, :300], own[:, :300]) and torch.equal(scale.t(), factors)
