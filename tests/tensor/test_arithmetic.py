"""Arithmetic with frozen weights: read as values, written back in the weight's own scheme, or refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import lowbit
from lowbit import AffineTensor, Int8WeightOnly
from lowbit.numerics import row_chunks
from lowbit.numerics.row_chunks import CHUNK_ELEMENTS
from lowbit.tensor import TernaryTensor
from tests.schemes import relative_error
from tests.tensor.cases import (
    BY_NAME,
    CASES,
    by_class,
    every_case,
    every_trainable,
    over,
    same,
    same_bits,
    values,
)

FROZEN = [c for c in CASES if issubclass(c.kind, AffineTensor) and not c.is_trainable]
every_frozen = over(FROZEN)
every_affine = over([c for c in FROZEN if c.kind is not TernaryTensor])
quiet = pytest.mark.filterwarnings("ignore:.* takes new values")
SHAPES = pytest.mark.parametrize("shape", [(24, 100), (7, 101), (3, 8, 96)], ids=str)


@by_class
@every_frozen
@SHAPES
def test_reads_see_the_values(case, shape) -> None:
    w = case.make(shape)
    plain, other = w.dequantize(), values(shape, seed=3)
    for read in (
        *(lambda t: t + other, lambda t: other + t, lambda t: t - other, lambda t: other - t),
        *(lambda t: t * other, lambda t: t * 2, lambda t: t / other, lambda t: t + t, lambda t: -t),
        *(lambda t: torch.linalg.norm(t, dim=1), lambda t: t.norm(), lambda t: t.abs().max()),
        *(lambda t: torch.isfinite(t), lambda t: t.sum(), lambda t: t.mean(0), lambda t: t.std()),
        *(
            lambda t: t.square(),
            lambda t: t.amax(),
            lambda t: t == t,
            lambda t: other.clone().add_(t),
        ),
    ):
        found = read(w)
        assert type(found) is torch.Tensor and same_bits(found, read(plain))
    assert same(w, case.make(shape))


def test_a_gradient_passes_through() -> None:
    w = AffineTensor.from_float(values((8, 32)), Int8WeightOnly())
    x = values((8, 32), seed=1).requires_grad_()
    (w * x + w).sum().backward()
    assert torch.equal(x.grad, w.dequantize())


@by_class
@quiet
@every_affine
@SHAPES
def test_a_change_is_quantized_in_the_same_scheme(case, shape) -> None:
    for seed, change in enumerate(
        (
            lambda t, d: t.add_(d),
            lambda t, d: t.sub_(d),
            lambda t, d: t.mul_(d),
            lambda t, d: t.div_(2),
        )
    ):
        w, delta = case.make(shape), values(shape, seed=seed + 5)
        expected = change(w.dequantize(), delta)
        codes = w.codes.data_ptr()
        assert change(w, delta) is w
        assert w.codes.data_ptr() == codes and w._is_stored_like(case.make(shape))
        anew = case.encode(expected).dequantize()
        least = relative_error(anew, expected)
        assert relative_error(w.dequantize(), expected) <= 1.001 * least + 1e-6


@quiet
@every_affine
def test_unchanged_values_stay_to_the_bit(case) -> None:
    w, before = case.make((24, 96)), case.make((24, 96))
    w.add_(torch.zeros(24, 96))
    w.mul_(1.0)
    w.data = w.dequantize()
    assert torch.equal(w.dequantize(), before.dequantize())  # the sum of -0.0 and 0.0 is 0.0
    if not case.shares_rows and case.row_step == 1:
        delta = torch.zeros(24, 96)
        delta[5] = 3.0
        w.add_(delta)
        w.sub_(delta)
        rest = torch.arange(24) != 5
        assert torch.equal(w.dequantize()[rest], before.dequantize()[rest])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@over([c for c in FROZEN if "double" not in c.name])
def test_a_factor_multiplies_the_scales(case, dtype) -> None:
    """As RWKV of transformers divides weights for inference; without a warning, since nothing is rounded."""
    for change in (lambda w: w.div_(4), lambda w: setattr(w, "data", w.data * 0.25)):
        w = case.make((24, 96), dtype=dtype)
        wanted, codes = w.dequantize() / 4, w.codes.clone()
        change(w)
        assert torch.equal(w.dequantize(), wanted)
        assert torch.equal(w.codes.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scales", ["minmax", "searched"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_each_row_by_its_own_factor(bits, scales) -> None:
    layer = nn.Sequential(nn.Linear(100, 24))
    layer[0].weight.data[3] = 0.0
    lowbit.quantize_(layer, lowbit.IntxWeightOnly(bits, 32), scales=scales)
    w = layer[0].weight
    factors = torch.linspace(0.1, 7.0, 24)[:, None]
    wanted = w.dequantize() * factors
    w.mul_(factors)
    assert relative_error(w.dequantize(), wanted) < 1e-6


@quiet
@pytest.mark.parametrize("name", ["int8-tensor", "int4-block-8x16", "int4-g32"])
def test_experts_in_parts(name, monkeypatch) -> None:
    """Parts have no boundary inside of a block of rows, nor between experts that share one scale."""
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", 96)
    for change in (lambda w: w.mul_(0.5), lambda w: w.add_(0.5)):
        w = BY_NAME[name].make((3, 24, 96))
        wanted = w.dequantize()
        change(wanted)
        codes = w.codes.clone()
        change(w)
        factor = torch.equal(w.codes, codes)
        assert relative_error(w.dequantize(), wanted) < (1e-6 if factor else 0.2)


@quiet
@every_affine
def test_of_a_small_change_no_more_is_lost_than_rounding(case) -> None:
    """As a merged adapter's is: the error is at most that of leaving the weight, and that of quantizing the sum."""
    w, delta = case.make((24, 96)), 0.02 * values((24, 96), seed=2)
    before, wanted = w.dequantize(), w.dequantize() + delta
    w.data += delta
    error = (w.dequantize() - wanted).norm()
    assert error <= (before - wanted).norm() * 1.001
    assert error <= (case.encode(wanted).dequantize() - wanted).norm() * 1.001


@quiet
def test_a_large_weight_in_parts() -> None:
    for shape in ((CHUNK_ELEMENTS // 256 + 3, 512), (2, CHUNK_ELEMENTS // 256 + 3, 512)):
        w = BY_NAME["int4-g32"].make(shape)
        wanted = w.dequantize() + 0.5
        w += 0.5
        assert relative_error(w.dequantize(), wanted) < 0.1


@quiet
@every_affine
def test_transposed(case) -> None:
    w, other = case.make((24, 96)), case.make((24, 96))
    delta = values((24, 96), seed=1)
    w.t().add_(delta.t())
    other.add_(delta)
    assert same(w, other)


@by_class
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@every_affine
def test_values_that_are_not_finite_change_nothing(case, bad) -> None:
    w, delta = case.make((8, 96)), torch.zeros(8, 96)
    delta[3, 4] = bad
    for change in (lambda: w.add_(delta), lambda: setattr(w, "data", delta)):
        with pytest.raises(ValueError, match=r"1 NaN or infinite values of 768"):
            change()
    assert same(w, case.make((8, 96)))


def test_ternary_weights_are_not_changed() -> None:
    w = BY_NAME["ternary"].make((8, 96))
    with pytest.raises(NotImplementedError, match=r"lowbit\.dequantize_\(model\) before merging"):
        w += 0.01
    assert same(w, BY_NAME["ternary"].make((8, 96)))


# ---- weight.data = values --------------------------------------------------------------------------------------


@quiet
@every_affine
def test_data_takes_values_and_leaves_aliases(case) -> None:
    """As for plain tensors, a saved copy of the weight can be assigned again."""
    w = nn.Parameter(case.make((8, 96)), requires_grad=False)
    kept, first = w.data, case.make((8, 96))
    w.data = wanted = values((8, 96), seed=4)
    anew = case.encode(wanted).dequantize()
    assert relative_error(w.dequantize(), wanted) <= relative_error(anew, wanted) * 1.001 + 1e-6
    assert same(kept, first)
    w.data = kept
    assert same(w.data, first) and w.codes is kept.codes


@every_affine
def test_data_refuses_a_misfit(case) -> None:
    w = case.make((8, 96))
    others = case.others or [next(c for c in FROZEN if c.how != case.how)]
    for given, error, message in (
        (torch.zeros(8, 95), ValueError, r"shape \(8, 95\)"),
        (torch.zeros(8, 96, dtype=torch.bfloat16), ValueError, r"dtype torch.bfloat16"),
        (torch.zeros(8, 96, device="meta"), ValueError, "device meta"),
        (others[0].make((8, 96)), ValueError, "stored differently"),
    ):
        with pytest.raises(error, match=message):
            w.data = given
    assert same(w, case.make((8, 96)))


@quiet
@every_trainable
def test_a_trainable_weight_is_changed_through_data(case) -> None:
    """In place by `weight.data += x`, and by new values as those of a plain tensor, which its aliases do not get."""
    w = nn.Parameter(case.make((8, 96)))
    before = w.master().clone()
    w.data += 0.5
    rounding = 0.2 if case.name == "train-int4-weight" else 0.01
    assert relative_error(w.master(), before + 0.5) < rounding
    kept, old, wanted = w.data, w.master().clone(), values((8, 96), seed=4)
    w.data = wanted
    assert isinstance(w, nn.Parameter) and type(w.data) is case.kind
    assert relative_error(w.master(), wanted) < rounding
    F.linear(values((3, 96), 1), w).sum().backward()
    twin = nn.Parameter(case.make((8, 96)))
    with torch.no_grad():
        twin.copy_(wanted)
    assert same_bits(F.linear(values((3, 96), 1), w), F.linear(values((3, 96), 1), twin))
    w.data = kept
    assert same_bits(w.master(), old)
    for given in (wanted[:, 1:], wanted.double()):
        with pytest.raises(NotImplementedError, match=r"assigning \.data .*copy_"):
            w.data = given


@every_trainable
def test_data_shares_memory_where_the_weight_is_in_high_precision(case) -> None:
    """As parameters that are views of one flat tensor do. Codes are told that they round."""
    w, flat = nn.Parameter(case.make((8, 96))), values((2, 8, 96), 4)
    if w.updated_in_place() is None:
        with pytest.warns(UserWarning, match=r"takes new values by \.data"):
            w.data = flat[1]
        return
    w.data = flat[1]
    flat.zero_()
    assert torch.equal(w.master(), flat[1])


@pytest.mark.filterwarnings("ignore:.* takes new values")
@every_trainable
def test_a_pruned_weight_without_its_mask(case) -> None:
    layer = nn.Linear(96, 8)
    layer.weight = nn.Parameter(case.make((8, 96)))
    prune.l1_unstructured(layer, "weight", 0.25)
    masked = layer.weight.detach()
    prune.remove(layer, "weight")
    assert type(layer.weight.data) is case.kind and isinstance(layer.weight, nn.Parameter)
    rounding = 0.15 if case.name == "train-int4-weight" else 0.01
    assert relative_error(layer.weight.master(), masked) < rounding
    assert (layer.weight.master() == 0).sum() >= 8 * 96 // 4
    layer(values((3, 96), 1)).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.filterwarnings("error:.* takes new values")
@pytest.mark.parametrize(
    "scheme",
    [lowbit.NVFP4WeightOnly(), lowbit.Int4WeightOnly(32), lowbit.Float8WeightOnly()],
    ids=str,
)
def test_a_frozen_weight_keeps_its_other_values_when_it_is_pruned(scheme) -> None:
    layer = nn.Linear(96, 8)
    lowbit.quantize_(nn.Sequential(layer), scheme)
    before = layer.weight.dequantize()
    for prune_one in (prune.l1_unstructured, prune.random_unstructured):
        prune_one(layer, "weight", 0.25)
    kept = layer.weight_mask.bool()
    prune.remove(layer, "weight")
    assert kept.logical_not().sum() > 8 * 96 // 4
    assert torch.equal(layer.weight.dequantize(), before.where(kept, 0))


@by_class
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
@every_case
def test_data_takes_its_own_cast(case, wide) -> None:
    """The line `p.data = p.data.to(float32)`, by which PEFT prepares a model for QLoRA: the codes stay."""
    if not case.is_weight and wide is torch.float64:
        return  # states have float32 values
    given = torch.bfloat16 if case.is_weight else torch.float32
    w = nn.Parameter(case.make((24, 100), dtype=given), requires_grad=case.is_trainable)
    if case.is_weight:  # what a product remembers of the weight, and the gradient, have its dtype
        F.linear(values((3, 100), 1).to(given).requires_grad_(), w).sum().backward()
        w.grad = None
    kept, wanted = w.data, w.data.to(wide)
    w.data = w.data.to(wide)
    assert isinstance(w, nn.Parameter) and w.dtype is wide and w.requires_grad == case.is_trainable
    assert type(w.data) is case.kind and same(w.data, wanted) and kept.dtype is given
    if not case.is_weight:
        return
    x = values((3, 100), 1).to(wide)
    twin, inputs = (
        nn.Parameter(wanted, requires_grad=case.is_trainable),
        [x.clone().requires_grad_() for _ in "ab"],
    )
    outputs = [F.linear(i, p) for i, p in zip(inputs, (w, twin), strict=True)]
    assert outputs[0].dtype is wide and torch.equal(*outputs)
    for y in outputs:
        y.sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    if case.is_trainable:
        assert w.grad.dtype is wide and torch.equal(w.grad, twin.grad)


@every_case
def test_data_refuses_other_low_bit_data(case) -> None:
    w = case.make((24, 100))
    other = next(c for c in CASES if c.kind is not case.kind)
    for given in (other.make((24, 100)), case.make((48, 100))):
        with pytest.raises((ValueError, NotImplementedError), match=r"assigning.*\.data"):
            w.data = given
    assert same(w, case.make((24, 100)))


# ---- warnings and errors ---------------------------------------------------------------------------------------


def test_rounding_is_said_once() -> None:
    model = nn.Sequential(*(nn.Linear(32, 8) for _ in range(20)))
    lowbit.quantize_(model, Int8WeightOnly())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for layer in model:
            layer.weight.data += 0.1
    assert len(said) == 1
    assert "rounded to its own codes" in str(said[0].message)
    assert "lowbit.dequantize_(model) before the change" in str(said[0].message)
