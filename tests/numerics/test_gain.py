"""Scales for which the projection of a rounded weight on the weight is the weight itself, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.inference import GPTQ, Search
from lowbit.numerics import gain
from lowbit.numerics.unseen_inputs import search_qparams
from tests.schemes import FREE_SCALES, over

N, K = 24, 96


def heavy(*shape: int) -> Tensor:
    """Numbers with outliers, Student's t with 5 degrees of freedom."""
    torch.manual_seed(0)
    return torch.distributions.StudentT(5.0).sample(shape) / 20


def gains(weight: Tensor, made: lb.AffineTensor, importance: Tensor | None = None) -> Tensor:
    """Σ h x x̂ / Σ h x² of each block, float64."""
    own, found = weight.double(), made.dequantize().double()
    h = torch.ones(()) if importance is None else importance
    block = made.spec.block_size(tuple(made.spec.pad(weight).shape))
    sums = []
    for t in (own * found * h, own * own * h):
        t = made.spec.pad(t)
        for dim, size in enumerate(block):
            t = t.unflatten(2 * dim, (-1, size))
        sums.append(t.sum(tuple(range(1, 2 * len(block), 2))))
    return sums[0] / sums[1]


@over(FREE_SCALES)
def test_each_block_has_a_gain_of_one_by_the_same_codes(scheme: lb.Scheme) -> None:
    weight, spec = heavy(N, K), scheme.weight
    made = lb.AffineTensor.searched(weight, scheme)
    scale, zero = spec.search_qparams(weight, spec.scale_dtype_for(weight.dtype))
    before = lb.AffineTensor.from_float(weight, scheme, (scale, zero))
    assert torch.equal(made.codes, before.codes)
    found, start = gains(weight, made), gains(weight, before)
    if not gain.can_grow(spec, None):  # the smallest value of a block is rounded as well
        assert spec.rounds_minimum and torch.equal(made.scale, before.scale)
        return
    can = start >= 1 / gain.LARGEST
    exact = 2e-3 if made.scale.dtype is torch.float32 else 1e-2
    assert ((found - 1).abs()[can] < exact).all() and torch.equal(found[~can], start[~can])
    assert can.all() or spec.format.bits < 3
    assert (made.scale != before.scale).any() or spec.format.bits == 1


def test_the_error_grows_as_least_squares_says() -> None:
    weight, scheme = heavy(64, 256), lb.IntxWeightOnly(2, 32, "symmetric")
    spec = scheme.weight
    codes = spec.quantize(weight, qparams=spec.search_qparams(weight, torch.float32))
    least = spec.dequantize(*codes, weight.shape, torch.float32)
    d = float((least - weight).square().sum() / weight.square().sum())
    found = lb.AffineTensor.searched(weight, scheme).dequantize()
    error = float((found - weight).square().sum() / weight.square().sum())
    assert 0.08 < d < 0.16 and d < error < 1.15 * d / (1 - d)


def test_importance_padding_experts_and_sizes() -> None:
    scheme, h = lb.IntxWeightOnly(3, 32, "symmetric"), torch.rand(K).square() + 0.01
    weight = heavy(N, K)
    made = lb.AffineTensor.searched(weight, scheme, h)
    torch.testing.assert_close(gains(weight, made, h), torch.ones(N, 3).double(), rtol=1e-4, atol=0)
    for shape in ((N, 67), (3, N, K)):
        weight = heavy(*shape)
        made = lb.AffineTensor.searched(weight, scheme)
        found = gains(weight, made)
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-4, atol=0)
    small = lb.AffineTensor.searched(weight * 2.0**-90, scheme)
    assert torch.equal(small.dequantize(), made.dequantize() * 2.0**-90)
    empty = lb.AffineTensor.searched(torch.zeros(0, K), scheme)
    assert empty.dequantize().shape == (0, K)
    weight[0, 0] = 0
    made = lb.AffineTensor.searched(weight.bfloat16(), scheme)
    assert made.dtype is made.scale.dtype is torch.bfloat16
    assert made.dequantize().isfinite().all() and not made.dequantize()[0, 0].any()


@pytest.mark.parametrize("inverse", [False, True])
def test_siblings_of_nvfp4_share_a_global_scale_that_is_larger(inverse: bool) -> None:
    scheme = lb.NVFP4WeightOnly()
    if inverse:
        spec = lb.Spec(scheme.weight.format, scheme.weight.granularity, scale_format="e4m3_inverse")
        scheme = lb.Scheme(spec)
    spec, weights = scheme.weight, [heavy(N, K), 2 * heavy(N, K).flip(1)]
    joint = spec.joint_part(weights, torch.float32)
    made = [lb.AffineTensor.searched(w, scheme, joint=joint) for w in weights]
    assert torch.equal(made[0].global_scale, made[1].global_scale)
    torch.testing.assert_close(made[0].global_scale, 0.993 * joint, rtol=1e-6, atol=0)
    if inverse:
        twice = 1 / (1 / made[0].global_scale)
        assert torch.equal(twice, made[0].global_scale)
    for w, m in zip(weights, made, strict=True):
        start = search_qparams(spec, w, joint=joint)
        before = lb.AffineTensor.from_float(w, scheme, start, joint=joint)
        assert torch.equal(m.codes, before.codes)
        assert torch.equal(m.scale.view(torch.uint8), before.scale.view(torch.uint8))
        of = [float((w * t.dequantize()).sum() / w.square().sum()) for t in (before, m)]
        assert of[0] < 0.9985 and abs(of[1] - of[0] / 0.993) < 1e-4


def test_scales_that_are_powers_of_two_stay() -> None:
    weight, scheme = heavy(N, K), lb.MXFP4WeightOnly()
    spec = scheme.weight
    assert not gain.can_grow(spec, None)
    made = lb.AffineTensor.searched(weight, scheme)
    qparams = search_qparams(spec, weight)
    assert torch.equal(
        made.dequantize(), lb.AffineTensor.from_float(weight, scheme, qparams).dequantize()
    )


@pytest.mark.parametrize("mapping", ["symmetric", "asymmetric", "float_zero_point", "half_integer"])
def test_outputs_of_a_calibrated_row_are_as_large_as_before(mapping: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(300, K) @ torch.randn(K, K) / 9 + torch.rand(K)
    scheme = lb.IntxWeightOnly(2, 32, mapping)  # type: ignore[arg-type]
    plain = nn.Linear(K, N, bias=False)
    weight = plain.weight.detach().clone()
    model = nn.Sequential(plain)
    lb.calibrate(model, scheme, [x], steps=[GPTQ()])
    y, found = x.double() @ weight.double().T, x.double() @ model[0].weight.dequantize().double().T
    found = (y * found).sum(0) / (y * y).sum(0)
    torch.testing.assert_close(found, torch.ones(N).double(), rtol=2e-3, atol=0)


def test_searched_by_inputs_they_count_by_their_squares() -> None:
    x, weight = torch.randn(50, K) * torch.rand(K), heavy(N, K)
    model = nn.Sequential(nn.Linear(K, N))
    model[0].weight.data.copy_(weight)
    scheme = lb.IntxWeightOnly(3, 32, "symmetric")
    lb.calibrate(model, scheme, [x], steps=[Search()])
    found = gains(weight, model[0].weight, x.square().sum(0))
    torch.testing.assert_close(found, torch.ones(N, 3).double(), rtol=1e-4, atol=0)


def test_scales_that_are_chosen_by_the_largest_value_stay() -> None:
    scheme, weight = lb.IntxWeightOnly(3, 32, "symmetric"), heavy(N, K)
    model = nn.Sequential(nn.Linear(K, N))
    model[0].weight.data.copy_(weight)
    lb.calibrate(model, scheme, [torch.randn(200, K)], steps=[GPTQ(scales="minmax")])
    assert torch.equal(model[0].weight.scale, lb.AffineTensor.from_float(weight, scheme).scale)
