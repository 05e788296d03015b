"""prepare_ and convert_ over whole models: reports, ties, refusals, and weights that are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit import qat
from tests.inference.test_report import BOTH, Block, Model

INT4 = lb.Int4WeightOnly(8)
TOKENS = torch.tensor([[1, 2, 3], [4, 5, 19]])


def test_prepared_parameters_share_memory_with_the_old_ones() -> None:
    model = Model()
    weight = model.head.weight
    report = qat.prepare_(model, INT4)
    assert "head.weight" in report.converted
    assert report.left == {"embedding.weight": "an embedding: a pattern that names it converts it"}
    assert model.head.weight is not weight and model.head.weight.requires_grad
    assert model.head.weight.master().data_ptr() == weight.data_ptr()


def test_a_weight_that_is_not_contiguous() -> None:
    """Its codes are row-major, and it is converted to the trained values."""
    strided, plain = nn.Linear(64, 24), nn.Linear(64, 24)
    strided.weight = nn.Parameter(torch.randn(64, 24).t())
    plain.load_state_dict(strided.state_dict())
    x = torch.randn(5, 64)
    for scheme in (INT4, lb.IntxWeightOnly(3), lb.Float8WeightOnly()):
        prepared, quantized, expected = map(copy.deepcopy, (strided, strided, plain))
        assert not prepared.weight.is_contiguous()
        qat.prepare_(prepared, scheme)
        y = prepared(x)
        qat.convert_(prepared)
        lb.quantize_(quantized, scheme)
        lb.quantize_(expected, scheme)
        for model in (prepared, quantized):
            assert torch.equal(model.weight, expected.weight)
            assert all(t.is_contiguous() for t in model.weight.inner_tensors().values())
            assert torch.equal(model(x), y)


def test_schemes_by_name_survive_until_convert() -> None:
    model = Model()
    patterns = {
        "head": None,
        "layers.0.*": lb.IntxWeightOnly(3, 8),
        r"re:.*\.up": lb.Float8WeightOnly(),
        "*": lb.Int8DynamicActivationInt4Weight(8),
    }
    prepared = qat.prepare_(model, patterns)
    assert prepared.left["head.weight"] == "no scheme for this name"
    y = model(TOKENS)
    converted = qat.convert_(model)
    assert converted.converted == prepared.converted
    assert [e.note for e in converted.entries] == [e.note for e in prepared.entries if e.converted]
    assert model.layers[0].up.weight.spec.format == lb.Int(3)
    assert isinstance(model.layers[1].up.weight, lb.Float8Tensor)
    assert model.layers[1].down.weight.activation is not None
    assert type(model.head.weight) is nn.Parameter and model.head.weight.requires_grad
    assert torch.allclose(model(TOKENS), y, atol=1e-5)


@pytest.mark.parametrize("select", [BOTH, nn.Linear, nn.Embedding], ids=["both", "head", "embed"])
def test_ties(select) -> None:
    model = Model(tied=True)
    qat.prepare_(model, INT4, lambda m, name: isinstance(m, select))
    weight = model.head.weight
    assert weight is model.embedding.weight and isinstance(weight, lb.FakeQuantizedTensor)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight is not weight

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert sum(p is weight for p in model.parameters()) == 1
    model(TOKENS).square().sum().backward()
    alone = Model()
    alone.load_state_dict(copied.state_dict())  # the same values, untied
    qat.prepare_(alone, INT4, lambda m, name: isinstance(m, BOTH))
    if select is BOTH:
        alone(TOKENS).square().sum().backward()
        summed = alone.head.weight.grad + alone.embedding.weight.grad
        assert torch.allclose(weight.grad, summed, rtol=1e-4, atol=1e-5)
    optimizer.step()
    y = model(TOKENS)
    report = qat.convert_(model)
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.head.weight, lb.AffineTensor)
    assert sum(e.note == "tied to embedding.weight" for e in report.entries) == 1
    assert torch.equal(model(TOKENS), y)


@pytest.mark.parametrize("scales", ["present", "learned"])
def test_rows_of_an_embedding_change_in_place(scales) -> None:
    model = nn.Sequential(nn.Embedding(21, 40))
    qat.prepare_(model, INT4, lambda m, name: isinstance(m, nn.Embedding), scales=scales)
    tokens, table = torch.tensor([[3, 20], [3, 0]]), model[0].weight
    (expected,) = torch.autograd.grad((model(tokens) * 3).sum(), table)
    (found,) = torch.autograd.grad(model(tokens).mul_(3).sum(), table)
    assert torch.equal(found, expected) and expected.any()


def test_casts_and_moves_of_a_prepared_model_keep_ties() -> None:
    model = Model(tied=True)
    qat.prepare_(model, INT4)
    model(TOKENS).sum().backward()
    for cast in (lambda: model.to("cpu"), lambda: model.bfloat16(), lambda: model.float()):
        cast()
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.head.weight, lb.FakeQuantizedTensor)
    model.zero_grad()
    model(TOKENS).sum().backward()


def test_a_module_in_two_places() -> None:
    block = Block()
    model = nn.Sequential(block, block)
    assert len(qat.prepare_(model, INT4).converted) == 2
    x = torch.randn(3, 16)
    y = model(x)
    assert len(qat.convert_(model).converted) == 2
    assert model[0] is model[1] and torch.equal(model(x), y)


def test_a_plain_model_takes_the_high_precision_weights() -> None:
    model, plain = Model(), Model()
    qat.prepare_(model, INT4)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.head.weight, model.head.weight.master())
    assert not torch.equal(plain.head.weight, model.head.weight.dequantize())


def test_on_meta_then_loaded() -> None:
    torch.manual_seed(0)
    plain = Model()
    with torch.device("meta"):
        model = Model()
    qat.prepare_(model, INT4)
    assert model.head.weight.is_meta
    model.to_empty(device="cpu")
    assert isinstance(model.head.weight, lb.FakeQuantizedTensor)
    model.load_state_dict(plain.state_dict())
    qat.prepare_(plain, INT4)
    assert torch.equal(model(TOKENS), plain(TOKENS))


def snapshot(model: nn.Module) -> dict[str, tuple[nn.Parameter, torch.Tensor]]:
    found = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        inner = p.master() if isinstance(p, lb.FakeQuantizedTensor) else p
        found[name] = (p, inner.detach().clone())
    return found


def assert_untouched(model: nn.Module, before) -> None:
    after = snapshot(model)
    assert list(after) == list(before)
    for name, (p, values) in before.items():
        assert after[name][0] is p, name
        assert torch.equal(after[name][1].nan_to_num(7.0), values.nan_to_num(7.0)), name


def test_prepare_twice_is_refused() -> None:
    model = Model()
    qat.prepare_(model, INT4)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"nothing to convert.*prepared for QAT already.*convert_"):
        qat.prepare_(model, lb.Int8WeightOnly())
    assert_untouched(model, before)


def test_preparing_the_rest_later() -> None:
    model = Model()
    qat.prepare_(model, {"head": INT4})
    report = qat.prepare_(model, lb.Int8WeightOnly())
    assert "prepared for QAT already" in report.left["head.weight"]
    assert len(report.converted) == 4
    assert len(qat.convert_(model).converted) == 5
    assert model.head.weight.spec.format == lb.Int(4)


def test_quantize_on_a_prepared_model_says_what_to_do() -> None:
    model = Model()
    qat.prepare_(model, INT4)
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"lowbit\.qat\.convert_\(model\) converts it"):
        lb.quantize_(model, INT4)
    assert_untouched(model, before)


def test_prepare_on_a_quantized_model_is_refused() -> None:
    model = Model()
    lb.quantize_(model, INT4)
    with pytest.raises(
        ValueError, match=r"nothing to convert.*already in low bits \(AffineTensor\)"
    ):
        qat.prepare_(model, INT4)


@pytest.mark.parametrize("make", [Model, lambda: nn.ReLU(), lambda: nn.Sequential()])
def test_convert_without_prepare_is_refused(make) -> None:
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"has no prepared weights.*qat\.prepare_.*quantize_"):
        qat.convert_(model)
    assert_untouched(model, before)


def test_convert_twice_is_refused() -> None:
    model = Model()
    qat.prepare_(model, INT4)
    qat.convert_(model)
    weight = model.head.weight
    with pytest.raises(ValueError, match="has no prepared weights"):
        qat.convert_(model)
    assert model.head.weight is weight


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_diverged_is_not_converted(bad: float) -> None:
    model = Model()
    qat.prepare_(model, INT4)
    with torch.no_grad():
        model.layers[1].down.weight.master()[3, 4] = bad
    before = snapshot(model)
    with pytest.raises(
        ValueError, match=r"layers.1.down.weight has 1 NaN or infinite values of 384"
    ):
        qat.convert_(model)
    assert_untouched(model, before)
    assert not model(TOKENS).isfinite().all(), "and while it trains it shows"


def test_the_modules_themselves_stay() -> None:
    model = Model()
    modules = dict(model.named_modules())
    calls = []
    model.head.register_forward_hook(lambda *args: calls.append(1))
    qat.prepare_(model, INT4)
    model(TOKENS)
    qat.convert_(model)
    model(TOKENS)
    assert dict(model.named_modules()) == modules and len(calls) == 2
