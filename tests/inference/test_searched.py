"""quantize_ with searched scales, and scales that the caller gives: stored, served, written and reported."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from tests.schemes import FREE_DYNAMIC, FREE_SCALES, PER_TOKEN, over


def error(weight: torch.Tensor, original: torch.Tensor) -> float:
    return float((weight.dequantize().double() - original.detach().double()).square().sum())


@over({**FREE_SCALES, **FREE_DYNAMIC})
def test_searched_scales_lose_less(scheme: lb.Scheme) -> None:
    plain = nn.Linear(96, 40)
    models = {scales: copy.deepcopy(plain) for scales in ("minmax", "searched")}
    reports = {s: lb.quantize_(m, scheme, scales=s) for s, m in models.items()}
    assert str(reports["minmax"]) == str(reports["searched"])
    chosen, found = (models[s].weight for s in ("minmax", "searched"))
    assert found.spec == chosen.spec and found.scale.dtype == chosen.scale.dtype
    assert error(found, plain.weight) < error(chosen, plain.weight)
    assert torch.equal(found.scale, lb.AffineTensor.searched(plain.weight, scheme).scale)


@over(PER_TOKEN)
def test_products_see_the_searched_values(scheme: lb.Scheme) -> None:
    model = nn.Linear(96, 40)
    lb.quantize_(model, scheme, scales="searched")
    x = torch.randn(5, 96)
    rounded = model.weight.rounded_input(x)
    expected = nn.functional.linear(rounded, model.weight.dequantize(), model.bias)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_unknown_scales_are_refused() -> None:
    model = nn.Linear(96, 40)
    with pytest.raises(ValueError, match=r"unknown scales 'best'; accepted: minmax, searched"):
        lb.quantize_(model, lb.Int4WeightOnly(32), scales="best")  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter


@over(FREE_SCALES)
def test_the_default_searches_at_one_and_two_bits(scheme: lb.Scheme) -> None:
    fmt = scheme.weight.format
    scales = "searched" if isinstance(fmt, lb.Int) and fmt.bits <= 2 else "minmax"
    conv = [] if isinstance(fmt, lb.LookupTable) else [nn.Conv2d(24, 40, 2)]
    for plain in (nn.Linear(96, 40), *conv):
        models = [copy.deepcopy(plain) for _ in range(2)]
        for model, given in zip(models, (None, scales), strict=True):
            lb.quantize_(model, scheme, lambda module, name: True, scales=given)
        found, expected = (model.weight.inner_tensors() for model in models)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_one_bit_loses_half_by_default() -> None:
    model = nn.Linear(512, 64, bias=False)
    nn.init.normal_(model.weight)
    plain = model.weight.detach().clone()
    lb.quantize_(model, lb.Int1WeightOnly())
    assert error(model.weight, plain) < 0.6**2 * error(0 * model.weight, plain)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_values_beyond_all_float16_scales_are_refused(bits: int) -> None:
    """No scale of the search clips them in silence."""
    model = nn.Linear(32, 4)
    nn.init.constant_(model.weight, 3e6)
    scheme = lb.IntxWeightOnly(bits, 32, "half_integer", scale_dtype=torch.float16)
    for scales in ("minmax", "searched"):
        with pytest.raises(ValueError, match=r"4 of 4 scales .*65504"):
            lb.quantize_(model, scheme, scales=scales)
    assert type(model.weight) is nn.Parameter


def test_qat_at_few_bits_converts_what_it_trained() -> None:
    for scheme in (lb.Int1WeightOnly(), lb.Int2WeightOnly(), lb.IntxWeightOnly(2, 32)):
        model, x = nn.Sequential(nn.Linear(96, 40)), torch.randn(5, 96)
        lb.qat.prepare_(model, scheme)
        trained = model(x)
        lb.qat.convert_(model)
        assert torch.equal(model(x), trained)


def test_an_importance_moves_the_error_to_other_channels() -> None:
    weight, importance = torch.randn(16, 64), torch.ones(64)
    importance[::2] = 100
    scheme = lb.IntxWeightOnly(3, 32)
    plain = lb.AffineTensor.searched(weight, scheme)
    weighted = lb.AffineTensor.searched(weight, scheme, importance)
    errors = [((w.dequantize() - weight).square() * importance).sum() for w in (plain, weighted)]
    assert errors[1] < 0.8 * errors[0]


# ---- given scales ---------------------------------------------------------------------------------------------


@over({**FREE_SCALES, **FREE_DYNAMIC})
def test_given_parameters_are_stored_as_they_are(scheme: lb.Scheme) -> None:
    weight = torch.randn(24, 96)
    spec = scheme.weight
    own = lb.AffineTensor.from_float(weight, scheme)
    again = lb.AffineTensor.from_float(weight, scheme, (own.scale, own.zero_point))
    for name, t in own.inner_tensors().items():
        assert torch.equal(getattr(again, name), t)
    doubled = lb.AffineTensor.from_float(weight, scheme, (own.scale * 2, own.zero_point))
    assert torch.equal(doubled.scale, own.scale * 2)
    codes, _, _ = spec.quantize(weight, qparams=(own.scale * 2, own.zero_point))
    values = spec.dequantize(codes, own.scale * 2, own.zero_point, weight.shape, torch.float32)
    assert torch.equal(doubled.dequantize(), values)


def test_given_parameters_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for weight in (torch.randn(37, 67), torch.randn(3, 41, 67)):
        scheme = lb.Int4WeightOnly(16, "asymmetric")
        whole = lb.AffineTensor.searched(weight, scheme)
        with monkeypatch.context() as patch:
            patch.setattr("lowbit.numerics.row_chunks.CHUNK_ELEMENTS", 300)
            values, qparams = whole.dequantize(), (whole.scale, whole.zero_point)
            parts = lb.AffineTensor.from_float(values, scheme, qparams)
        assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scale, whole.scale)
        assert torch.equal(parts.zero_point, whole.zero_point)


ONES = torch.ones(4, 2)
CODES = torch.zeros(4, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("mapping", "scale", "zero_point", "match"),
    [
        ("symmetric", torch.ones(4), None, r"of shape \(4, 2\), got torch.float32 \(4,\); reshape"),
        ("symmetric", ONES.int(), None, r"is floating, of shape \(4, 2\), got torch.int32"),
        ("symmetric", ONES, CODES, r"takes no zero point: give None"),
        ("asymmetric", ONES, None, r"takes a zero point"),
        ("asymmetric", ONES, ONES, r"zero point .* is torch.int8 \(4, 2\), got torch.float32"),
        ("float_zero_point", ONES, CODES, r"is torch.float32 \(4, 2\), got torch.int8"),
        ("half_integer", ONES, ONES[:1], r"is torch.float32 \(4, 2\), got torch.float32 \(1, 2\)"),
        ("symmetric", ONES * 0, None, r"8 of 8 scales cannot be used, such as 0.0"),
        ("symmetric", ONES * torch.nan, None, r"such as nan: a scale, negative or not, is finite"),
        ("symmetric", ONES * 1e-39, None, r"has a finite reciprocal; `choose_qparams` and"),
        ("symmetric", -ONES * torch.inf, None, r"such as -inf"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(mapping, scale, zero_point, match: str) -> None:
    weight = torch.randn(4, 16)
    with pytest.raises(ValueError, match=match):
        lb.AffineTensor.from_float(weight, lb.Int4WeightOnly(8, mapping), (scale, zero_point))
