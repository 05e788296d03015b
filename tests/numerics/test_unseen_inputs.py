"""What stands for the inputs of a weight, and stored scales that suit it, against float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.numerics import unseen_inputs
from lowbit.numerics.lookup_table import E2M1
from lowbit.numerics.unseen_inputs import stand_in
from lowbit.tensor.frozen.siblings import quantized_together
from tests.schemes import over

N, K = 24, 101
INVERSE = lb.Scheme(lb.Spec(E2M1, lb.PerGroup(16), scale_format="e4m3_inverse"))
STORED = {
    "nvfp4": lb.NVFP4WeightOnly(),
    "nvfp4 of inverses": INVERSE,
    "mxfp4": lb.MXFP4WeightOnly(),
    "mxfp4 of OCP": lb.MXFP4WeightOnly("symmetric"),
}


def trained(*shape: int) -> Tensor:
    """Weights that read few directions much more than all others."""
    torch.manual_seed(0)
    size = shape[-1]
    return torch.randn(*shape) @ (torch.randn(size, size) * torch.linspace(0, 1, size) ** 3) / size


def root(w: Tensor) -> Tensor:
    """(1 + 3 a) / (3 + a) of the eigenvalues a of WᵀW / mean(diag WᵀW), float64."""
    a = w.double().mT @ w.double()
    values, vectors = torch.linalg.eigh(a / a.diagonal().mean())
    return (vectors * ((1 + 3 * values) / (3 + values))) @ vectors.mT


def start_of(spec: lb.Spec, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scales with the least squared error, and the joint part."""
    joint = spec.joint_part([w, 2 * w], torch.float32) if spec.scales.joint else None
    return spec.search_qparams(w, torch.float32, joint=joint)[0], joint


def rounded_by(spec: lb.Spec, w: Tensor, scale: Tensor) -> Tensor:
    return spec.dequantize(*spec.quantize(w, qparams=(scale, None)), w.shape, torch.float32)


def test_the_stand_in_is_near_the_root_of_the_weights_own_sums() -> None:
    w = trained(2, 40, K)
    found = stand_in(w)
    for own, h in zip(w, found, strict=True):
        wanted = root(own)
        assert (h - wanted).norm() < 1e-5 * wanted.norm()
    assert torch.equal(stand_in(w * 2.0**-90), found) and torch.equal(stand_in(w * 2.0**90), found)
    torch.testing.assert_close(stand_in(torch.zeros(4, 5)), torch.eye(5) / 3)
    grown = (1 + 3 * torch.linspace(0.3, 3, 9)) / (3 + torch.linspace(0.3, 3, 9))
    torch.testing.assert_close(grown, torch.linspace(0.3, 3, 9).sqrt(), rtol=0.06, atol=0)


def searched(spec: lb.Spec, w: Tensor, joint: Tensor | None) -> Tensor:
    found, zero = unseen_inputs.search_qparams(spec, w, joint=joint)
    assert zero is None
    return found


def in_float64(spec: lb.Spec, w: Tensor, joint: Tensor | None) -> Tensor:
    """The scales of a matrix: those with the least e H eᵀ of each block alone, then block after block."""
    h, group = root(w), spec.block_size(tuple(w.shape))[-1]
    largest = spec.choose_scales(spec.pad(w), joint=joint)
    offered = [spec.scales.decode(p) for p in (largest, *spec.scales.neighbours(largest))]
    found, rows = offered[0].clone(), torch.arange(len(w))

    def errors(scale: Tensor, own: slice = slice(None)) -> Tensor:
        e = (rounded_by(spec, w, scale) - w).double()[:, own]
        return ((e @ h[own, own]) * e).sum(-1)

    for g in range(found.shape[-1]):
        own = slice(g * group, (g + 1) * group)
        best = torch.stack([errors(scale, own) for scale in offered]).argmin(0)
        found[:, g] = torch.stack(offered)[best, rows, g]
    for g in [*range(found.shape[-1])] * unseen_inputs.SWEEPS:
        tried = [found]
        for scale in offered:
            moved = found.clone()
            moved[:, g] = scale[:, g]
            tried.append(moved)
        best = torch.stack([errors(t) for t in tried]).argmin(0)
        found = torch.stack(tried)[best, rows]
    return found


@over(STORED)
def test_blocks_take_the_scale_with_the_least_error(scheme: lb.Scheme) -> None:
    spec, w = scheme.weight, trained(N, K)
    w[3] = 0
    start, joint = start_of(spec, w)
    found, wanted = searched(spec, w, joint), in_float64(spec, w, joint)
    assert (found != start).any() and torch.equal(found[3], start[3])
    h = root(w)
    errors = []
    for scale in (start, found, wanted):
        e = (rounded_by(spec, w, scale) - w).double()
        errors.append(((e @ h) * e).sum(-1))
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all() and errors[1].sum() < errors[0].sum()
    assert (found == wanted).double().mean() > 0.98  # others: ties in float32
    assert (errors[1].sum() - errors[2].sum()).abs() < 2e-3 * errors[2].sum()
    spec.check_qparams(w.shape, found, None, joint)


def test_experts_parts_and_odd_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = lb.NVFP4WeightOnly().weight
    w = trained(3, N, K)
    _, joint = start_of(spec, w)
    found = searched(spec, w, joint)
    for i in range(3):
        assert torch.equal(found[i], searched(spec, w[i], joint[i]))
    monkeypatch.setattr(unseen_inputs, "PANEL", 40)  # 32: two blocks; the last one has one
    assert torch.equal(searched(spec, w, joint), found)
    monkeypatch.setattr(unseen_inputs, "INPUTS", 40)
    whole = searched(spec, w, joint)
    for at in range(0, K, 32):
        own, blocks = slice(at, at + 32), slice(at // 16, at // 16 + 2)
        # the part starts from its own largest values, which joint ties to those of the whole
        assert torch.equal(whole[0, :, blocks], searched(spec, w[0, :, own], joint[0]))
    for rows in (10, 2 * N):  # parts of a matrix; two matrices and one
        monkeypatch.setitem(unseen_inputs.ROWS, "cpu", rows)
        assert torch.equal(searched(spec, w, joint), whole)
    odd = w[0].clone()
    odd[0, 0] = float("nan")
    assert torch.equal(searched(spec, odd, joint[0])[:, 2:], whole[0, :, 2:])  # another part
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(searched(spec, w, joint), whole)
    assert searched(spec, w[0, :0], joint[0]).shape == (0, whole.shape[-1])


@over(STORED)
def test_a_search_takes_them_and_an_importance_does_not(scheme: lb.Scheme) -> None:
    spec, w = scheme.weight, trained(N, K)
    joint = spec.joint_part([w], torch.float32) if spec.scales.joint else None
    start, _ = spec.search_qparams(w, torch.float32, joint=joint)
    made = lb.AffineTensor.searched(w, scheme, joint=joint)
    found = searched(spec, w, joint), None
    wanted = lb.AffineTensor.from_float(w, scheme, found, joint=joint)
    assert torch.equal(made.codes, wanted.codes)
    plain = lb.AffineTensor.from_float(w, scheme, (start, None), joint=joint)
    weighed = lb.AffineTensor.searched(w, scheme, torch.ones(K), joint=joint)
    assert torch.equal(weighed.codes, plain.codes) and not torch.equal(made.codes, plain.codes)


@over(STORED)
def test_weights_near_the_ends_of_float32(scheme: lb.Scheme) -> None:
    spec, w = scheme.weight, trained(N, K)
    w[5] *= 2.0**-80  # a row whose squares are 0 beside those of others
    start, joint = start_of(spec, w)
    found = searched(spec, w, joint)
    if joint is None:  # scales of e4m3 do not reach so far down
        assert (found[5] != start[5]).any()
    for power in (2.0**-40, 2.0**-30, 2.0**90, 2.0**120):
        times = None if joint is None else joint / power
        moved = searched(spec, w * power, times)
        assert torch.equal(moved, (found * power).clamp(min=2.0**-126))


def test_other_scales_stay() -> None:
    w = trained(N, 96)
    for spec in (
        lb.IntxWeightOnly(4, 32).weight,
        lb.Spec(E2M1, lb.PerGroup(16)),
        lb.Spec(E2M1, lb.PerBlock(4, 16), scale_format="e4m3"),
        lb.Spec(E2M1, lb.PerTensor(), scale_format="e8m0"),
        lb.Spec(lb.Float8(), lb.PerGroup(32), scale_format="e8m0"),
    ):
        start, _ = spec.search_qparams(w, torch.float32)
        assert torch.equal(searched(spec, w, None), start)


def test_siblings_are_searched_together() -> None:
    scheme, w = lb.NVFP4WeightOnly(), trained(60, K)
    names = {"q_proj": 40, "k_proj": 12, "v_proj": 8}
    model = nn.ModuleDict({n: nn.Linear(K, rows, bias=False) for n, rows in names.items()})
    with torch.no_grad():
        for layer, own in zip(model.values(), w.split([*names.values()]), strict=True):
            layer.weight.copy_(own)
    lb.quantize_(model, scheme, lambda module, name: isinstance(module, nn.Linear), "searched")
    joint = scheme.weight.joint_part([w], torch.float32)
    wanted = lb.AffineTensor.searched(w, scheme, joint=joint)
    apart = lb.AffineTensor.searched(w[:40], scheme, joint=joint)
    at = 0
    for name, rows in names.items():
        found = model[name].weight
        assert found.global_scale.data_ptr() != wanted.global_scale.data_ptr()
        assert torch.equal(found.dequantize(), wanted.dequantize()[at : at + rows])
        at += rows
    assert not torch.equal(model["q_proj"].weight.dequantize(), apart.dequantize())


def test_a_sibling_that_rounds_to_infinity_in_its_own_dtype() -> None:
    """Weights of several dtypes are searched in float32, which holds what float16 does not."""
    scheme, w = lb.NVFP4WeightOnly(), trained(12, K)
    half = ((w / w.std()).clamp(-1, 1) * 65504).half()
    for own, is_infinite in ((half, True), (half / 4, False)):
        raises = pytest.raises(ValueError, match="round to infinity")
        with raises if is_infinite else nullcontext():
            found = quantized_together({"k": own, "v": w}, [scheme] * 2, "searched")
    assert [t.dtype for t in found.values()] == [torch.float16, torch.float32]
