"""GPTQ's sweeps over blocks, and calibration without data, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import AWQ, GPTQ, LearnedRounding, Prune24, Search
from lowbit.inference.calibration.inputs import Moments
from lowbit.inference.calibration.step import Layer
from tests.inference.test_gptq import textbook, uneven

N, K = 12, 96
SCHEMES = {
    "int3": lb.IntxWeightOnly(3, 32, "symmetric"),
    "zero points": lb.IntxWeightOnly(3, 32, "asymmetric"),
    "values": lb.IntxWeightOnly(2, 32, "float_zero_point"),
    "int2": lb.Int2WeightOnly(32),
    "nvfp4": lb.NVFP4WeightOnly(),
    "mxfp4": lb.MXFP4WeightOnly(),
    "nf4": lb.NF4WeightOnly(32, double_quantization=False),
    "a whole tensor": lb.Scheme(lb.Spec(lb.Int(4), lb.PerTensor())),
}


def layer_of(scheme: lb.Scheme, hessian: Tensor, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    weight = torch.randn(N, K) / 10
    moments = Moments((N, K), torch.device("cpu"), True, False)
    moments.square, moments.rows = hessian[None].clone(), [1000]
    joint = scheme.weight.joint_part([weight], torch.float32) if scheme.weight.joins else None
    return Layer("weight", weight, scheme.weight, torch.float32, moments, joint)


def lost(layer: Layer, hessian: Tensor, damping: float = 0.01) -> float:
    """tr((Q − W) H (Q − W)ᵀ) in float64, with the damping."""
    assert layer.values is not None
    h = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(K)
    apart = layer.values.double() - layer.original.double()
    return float(((apart @ h) * apart).sum())


@pytest.mark.parametrize("name", SCHEMES)
def test_each_sweep_lowers_the_error_and_stays_on_the_grid(name: str) -> None:
    scheme, x = SCHEMES[name], uneven(300, K)
    hessian, errors = x.T @ x, []
    for sweeps in (0, 1, 3):
        layer = layer_of(scheme, hessian)
        GPTQ(sweeps=sweeps).apply(layer)
        assert layer.qparams is not None and layer.values is not None
        errors.append(lost(layer, hessian))
        torch.testing.assert_close(layer.values, layer.spec.dequantize(
            *layer.spec.quantize(layer.values, torch.float32, layer.qparams), (N, K), torch.float32
        ), rtol=1e-6, atol=1e-7)  # fmt: skip
        layer.spec.check_qparams((N, K), *layer.qparams, layer.joint)
    assert errors[2] < errors[1] < errors[0], errors


@pytest.mark.parametrize("name", ["int3", "nvfp4", "mxfp4"])
@pytest.mark.usefixtures("least_squares")
def test_uncorrelated_inputs_get_the_best_scale_of_each_block(name: str) -> None:
    """Under a diagonal H a block is as good as the nearest values by each other scale that the sweep tries."""
    scheme = SCHEMES[name]
    hessian = torch.diag(torch.logspace(-1, 1, K))
    layer = layer_of(scheme, hessian)
    GPTQ(sweeps=1).apply(layer)
    assert layer.qparams is not None and layer.values is not None
    spec, weights = layer.spec, hessian.diagonal().double() + 0.01 * hessian.diagonal().mean()
    group = spec.block_size((N, K))[-1]

    def by_block(values: Tensor) -> Tensor:
        wrong = (values.double() - layer.weight.double()).square() * weights
        return wrong.unflatten(1, (-1, group)).sum(2)

    own, start = by_block(layer.values), layer.minmax()[0]
    for ratio in (0.9, 1.0, 1.1):
        scale = (start * ratio).float()
        if spec.scales is not None:
            scale = spec.scales.nearest(scale, spec.kept_parts(layer.joint))
        assert bool((own <= by_block(layer.rounded((scale, None))) * 1.02).all())


def test_pruned_weights_keep_their_zeros_and_experts_their_own_scales() -> None:
    x = uneven(300, K)
    hessian, errors = x.T @ x, []
    for sweeps in (0, 2):
        layer = layer_of(SCHEMES["int3"], hessian)
        Prune24().apply(layer)
        GPTQ(sweeps=sweeps).apply(layer)
        assert layer.mask is not None and layer.values is not None
        assert not layer.values[~layer.mask].any() and layer.values.isfinite().all()
        errors.append(lost(layer, hessian))
    assert errors[1] < errors[0]
    torch.manual_seed(0)
    stack = torch.randn(2, N, K) / 10
    moments = Moments(stack.shape, torch.device("cpu"), True, False)
    for expert in range(2):
        moments.add(expert, x.roll(expert, 1), matrices=2)
    scheme = lb.NVFP4WeightOnly()
    joint = scheme.weight.joint_part([stack], torch.float32)
    both = Layer("weight", stack, scheme.weight, torch.float32, moments, joint)
    GPTQ(sweeps=1).apply(both)
    assert both.values is not None
    for expert in range(2):
        own = Moments((N, K), torch.device("cpu"), True, False)
        own.add(0, x.roll(expert, 1))
        alone = Layer("weight", stack[expert], scheme.weight, torch.float32, own, joint[expert])
        GPTQ(sweeps=1).apply(alone)
        assert alone.values is not None and torch.equal(alone.values, both.values[expert])


@pytest.mark.parametrize("group", [144, 200])
def test_no_block_of_a_sweep_reaches_into_two_groups(group: int) -> None:
    """Scales of more than 128 inputs stay. 32 columns at a time would cross from one group into the next."""
    x = uneven(300, 2 * group)
    errors = []
    for sweeps in (0, 2):
        torch.manual_seed(0)
        moments = Moments((N, 2 * group), torch.device("cpu"), True, False)
        moments.add(0, x)
        spec = lb.IntxWeightOnly(3, group, "symmetric").weight
        layer = Layer("weight", torch.randn(N, 2 * group) / 10, spec, torch.float32, moments)
        GPTQ(sweeps=sweeps).apply(layer)
        assert layer.values is not None and layer.qparams is not None
        stored = spec.quantize(layer.values, torch.float32, layer.qparams)
        again = spec.dequantize(*stored, tuple(layer.values.shape), torch.float32)
        torch.testing.assert_close(layer.values, again, rtol=1e-6, atol=1e-7)
        errors.append(layer.error(again))
    assert errors[1] < errors[0], errors


def test_edges_of_a_sweep() -> None:
    """A dead input, rows of zeros, a last block that is not full, and few rows of inputs."""
    x = uneven(9, 40)
    x[:, 5] = 0
    model: Any = nn.Sequential(nn.Linear(40, N))
    with torch.no_grad():
        model[0].weight[3] = 0
    report = lb.calibrate(model, lb.IntxWeightOnly(3, 32), [x], steps=[GPTQ(sweeps=2)])
    (layer,) = report.layers.values()
    found = model[0].weight.dequantize()
    assert found.isfinite().all() and not found[3].any() and layer.after < layer.before
    for bad in (-1, 1.5, "2", True):
        with pytest.raises(ValueError, match="sweeps must be a whole number of at least 0, got"):
            GPTQ(sweeps=bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="act_order must be True or False, got 'yes'"):
        GPTQ(act_order="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int3", "nvfp4"])
@pytest.mark.usefixtures("least_squares")
def test_without_data_the_weight_stands_for_its_inputs(name: str) -> None:
    """H = WᵀW / mean(diag WᵀW) + I for a linear; an embedding, which no product reads, is searched."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(20, K), nn.Linear(K, N, bias=False), nn.Linear(N, N))
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-1, 0, K))
    weight, table = model[1].weight.detach().clone(), model[0].weight.detach().clone()
    scheme, step = SCHEMES[name], GPTQ()
    report = lb.calibrate(model, {"0.*": scheme, "1.*": scheme}, steps=[step])
    h = weight.double().T @ weight.double()
    h = h / h.diagonal().mean() + torch.eye(K)
    expected, _ = textbook(weight, h, model[1].weight, step)
    found = model[1].weight.dequantize().double()
    wrong = (found - expected).abs() > 1e-4 * expected.abs().max()
    assert float(wrong.double().mean()) < 5e-3
    searched: Any = nn.Sequential(nn.Embedding.from_pretrained(table))
    lb.quantize_(searched, {"0.*": scheme}, scales="searched")
    assert torch.equal(model[0].weight.dequantize(), searched[0].weight.dequantize())
    layer = report.layers["1.weight"]
    assert layer.rows == 0 and layer.after < layer.before
    assert "by the weight alone" in str(layer) and "no batch" not in str(layer)


@pytest.mark.parametrize("groups", [1, 3, N])
@pytest.mark.usefixtures("least_squares")
def test_without_data_each_group_of_a_convolution_has_its_own_inputs(groups: int) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv1d(groups * K // 4, N, 4, groups=groups, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(N, 1, 1)).mul_(torch.logspace(-1, 0, K).view(-1, 4))
    weights = model[0].weight.detach().flatten(1).chunk(groups)
    scheme, step = SCHEMES["int3"], GPTQ()
    report = lb.calibrate(model, {"0.weight": scheme}, steps=[step])
    wrong, error, size = [], 0.0, 0.0
    for weight, made in zip(weights, model[0].weight.matrix.split(N // groups), strict=True):
        h = weight.double().T @ weight.double()
        h = h / h.diagonal().mean() + torch.eye(K)
        expected, _ = textbook(weight, h, made, step)
        found = made.dequantize().double()
        wrong.append((found - expected).abs() > 1e-4 * expected.abs().max())
        apart = found - weight
        error += float(((apart @ h) * apart).sum())
        size += float(((weight.double() @ h) * weight).sum())
    assert float(torch.cat(wrong).double().mean()) < 5e-3
    layer = report.layers["0.weight"]
    assert layer.after == pytest.approx(error / size, rel=1e-4) and layer.after < layer.before


@pytest.mark.parametrize("size", [2.0**-80, 2.0**80])
def test_without_data_the_size_of_a_weight_changes_nothing(size: float) -> None:
    """Squares of such weights leave float32."""
    found = []
    for factor in (1.0, size):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(K, N))
        model[0].weight.data.mul_(factor)
        lb.calibrate(model, lb.Int4WeightOnly(32), steps=[GPTQ()])
        found.append(model[0].weight.dequantize() / factor)
    assert torch.equal(*found)


def test_without_data_refuses_what_needs_it() -> None:
    for steps in ([AWQ(), GPTQ()], [Search(), LearnedRounding()]):
        model = nn.Sequential(nn.Linear(K, N))
        with pytest.raises(ValueError, match=r"needs batches, calibrate\(model, scheme, batches"):
            lb.calibrate(model, lb.Int4WeightOnly(32), steps=steps)
        assert type(model[0].weight) is nn.Parameter
    with pytest.raises(ValueError, match=r"the static input of 0\.weight"):
        lb.calibrate(model, lb.Int8StaticActivationInt8Weight(), steps=[GPTQ()])
    with pytest.raises(TypeError, match="blocks: not read without batches"):
        lb.calibrate(model, lb.Int4WeightOnly(32), steps=[GPTQ()], blocks=[])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"a filter beside steps is filter_fn=…"):
        lb.calibrate(model, lb.Int4WeightOnly(32), lambda module, name: True, steps=[GPTQ()])  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="none of which"):  # a loader that is empty by mistake
        lb.calibrate(model, lb.Int4WeightOnly(32), [], steps=[GPTQ()])
    empty = nn.Sequential(nn.Linear(K, 0))
    lb.calibrate(empty, lb.Int4WeightOnly(32), steps=[GPTQ(sweeps=1)])
    assert empty[0].weight.shape == (0, K)
