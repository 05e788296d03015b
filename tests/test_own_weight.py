"""A frozen weight that a user defines in one file: a granularity, the scheme, the tensor, and a product of its own."""

from __future__ import annotations

import copy
import importlib
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowbit as lb
from lowbit.numerics.granularity import Granularity
from lowbit.tensor.trained.int8_weight import Int8WeightTensor
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.testing import TensorContract
from lowbit_kernels.runtime.launches import ran


@dataclass(frozen=True)
class PerColumn(Granularity):
    """One scale for each input feature."""

    shares_rows: ClassVar[bool] = True

    def block_size(self, shape):
        return (*[1] * (len(shape) - 2), max(shape[-2], 1), 1)

    def spans(self, dim, rank):
        return dim == rank - 2


INT5 = lb.Scheme(lb.Spec(lb.Int(5), PerColumn(), "symmetric_no_clipping_err"))
PACKED = lb.Scheme(lb.Spec(lb.Int(4), PerColumn(), "asymmetric"))


class Column5Tensor(lb.AffineTensor):
    """One code a byte; the class stores nothing but `INT5`."""

    stored_as = "column5"

    @classmethod
    def stores(cls, spec):
        return spec == INT5.weight

    @classmethod
    def _stored_bits(cls, spec):
        return 8


class TestColumn5(TensorContract):
    def encode(self, weight):
        return lb.AffineTensor.from_float(weight, INT5)


def column_linear(x, weight, bias):
    ran("column_linear", "test")
    return F.linear(x * weight.scale.to(x.dtype), weight.codes.to(x.dtype), bias)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 24), nn.Linear(24, 7)

    def forward(self, x):
        return self.second(self.first(x).relu())


def quantized(scheme=INT5, dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(dtype)
    assert lb.quantize_(model, scheme).converted == ["first.weight", "second.weight"]
    return model


def expected(model, x):
    hidden = F.linear(x, model.first.weight.dequantize(), model.first.bias).relu()
    return F.linear(hidden, model.second.weight.dequantize(), model.second.bias)


both = pytest.mark.parametrize("scheme", [INT5, PACKED], ids=["int5", "packed"])
X = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))


@both
def test_values_are_those_of_one_scale_a_column(scheme):
    torch.manual_seed(0)
    plain, weight = Model().first.weight.detach(), quantized(scheme).first.weight
    assert type(weight) is (Column5Tensor if scheme is INT5 else lb.AffineTensor)
    assert weight.scale.shape == (1, 40)
    assert ((weight.dequantize() - plain).abs() <= weight.scale * 0.51).all()


@both
def test_products_gradients_dtypes_and_copies(scheme):
    model = quantized(scheme)
    x, again = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).sum().backward()
    expected(model, again).sum().backward()
    assert torch.equal(x.grad, again.grad)
    torch.testing.assert_close(torch.compile(model, backend="eager")(X), model(X))
    for other in (copy.copy(model), copy.deepcopy(model)):
        assert torch.equal(other(X), model(X))
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert half.first.weight.scale.dtype is torch.float32
    torch.testing.assert_close(half(X.bfloat16()).float(), model(X), rtol=0.05, atol=0.05)


@both
def test_slices_rows_and_columns(scheme):
    weight = quantized(scheme).first.weight
    values = weight.dequantize()
    step = 3 if scheme is INT5 else 2  # 4-bit codes are cut at whole bytes
    left, right = weight[:, :step], weight[:, step:]
    assert torch.equal(weight[5:9].dequantize(), values[5:9])
    assert torch.equal(right.dequantize(), values[:, step:])
    assert torch.equal(torch.cat([left, right], 1).dequantize(), values)
    assert torch.equal(torch.cat([weight[:5], weight[5:]]).dequantize(), values)
    assert torch.equal(weight.T.dequantize(), values.T)
    assert torch.equal(weight[4], values[4])


@both
def test_saved_and_loaded(scheme, tmp_path):
    model, fresh, alike = quantized(scheme), Model(), quantized(scheme)
    lb.save(model, tmp_path / "model.safetensors")
    fresh.load_state_dict(lb.load(tmp_path / "model.safetensors"), assign=True)
    alike.load_state_dict(model.state_dict())
    assert type(fresh.first.weight) is type(model.first.weight)
    assert torch.equal(fresh(X), model(X)) and torch.equal(alike(X), model(X))
    torch.save(model.first.weight, tmp_path / "weight.pt")
    weight = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert weight.spec == scheme.weight and torch.equal(weight, model.first.weight)


@both
def test_qat_converts_to_the_trained_model(scheme):
    model = Model()
    lb.qat.prepare_(model, scheme)
    optimizer = lb.optim.AdamW8bit(model.parameters())
    model(X).square().mean().backward()
    optimizer.step()
    trained = model.eval()(X)
    lb.qat.convert_(model)
    assert torch.equal(model(X), trained)


def test_a_product_of_its_own_is_traced():
    model = quantized()
    plain = model(X)
    lb.register_linear(lambda x, w, bias: w.stored_as == "column5", column_linear)
    try:
        trace = lb.trace(model, X)
        product = model(X)
    finally:
        lb.unregister_linear(column_linear)
    torch.testing.assert_close(product, plain)
    found = {p.layer: p for p in trace.products if p.product == "output"}
    assert found["first"].implementation == "column_linear test"
    assert found["first"].weight == "int5-column"


def test_lowbits_own_kernels_leave_another_layout_alone():
    """int8 codes with a scale a row, stored in a layout that lowbit does not know."""

    class Reversed(lb.AffineTensor):
        stored_as = "reversed"

        @classmethod
        def _store(cls, codes, spec):
            return codes.flip(-1).contiguous()

        def _load(self, columns):
            return self.codes.flip(-1)

    plain, scheme = torch.randn(16, 32), lb.Int8DynamicActivationInt8Weight()
    parts = Reversed._encode_as(plain, scheme.weight, torch.float32)
    weight = Reversed(*parts.values(), scheme.weight, plain.shape, plain.dtype, scheme.activation)
    own = lb.AffineTensor.from_float(plain, scheme)
    x = torch.randn(4, 32)
    assert torch.equal(weight.dequantize(), own.dequantize())
    torch.testing.assert_close(F.linear(x, weight), F.linear(x, own))
    rows = torch.tensor([3, 1])
    assert torch.equal(F.embedding(rows, weight), F.embedding(rows, own))


def test_graphs_on_disk_depend_on_the_file_of_the_class(tmp_path, monkeypatch):
    """torch takes a graph of an earlier process by this key; the arithmetic in the file may have changed since."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def key(text):
        (tmp_path / "edited_weight.py").write_text(text)
        sys.modules.pop("edited_weight", None)
        importlib.invalidate_caches()
        own = importlib.import_module("edited_weight").Own
        weight = lb.AffineTensor.from_float(torch.ones(8, 8), lb.IntxWeightOnly(5))
        meta, parts = weight.meta(), weight.inner_tensors()
        return own.from_inner(parts, meta, (8, 8), torch.float32)._stable_hash_for_caching()

    text = "import lowbit\n\n\nclass Own(lowbit.AffineTensor):\n    pass\n"
    try:
        assert key(text) == key(text) != key(f"{text}    way_out = 'none'\n")
    finally:
        sys.modules.pop("edited_weight", None)
        lb.LowbitTensor.kinds.pop("Own", None)


def named(base, name):
    """Another class of this name, in this module."""
    attrs = {"__module__": __name__, "tensor_attrs": ("codes",)}
    return type(name, (base,), attrs)


@pytest.mark.parametrize(
    ("base", "name", "holder"),
    [
        (lb.LowbitTensor, "AffineTensor", lb.AffineTensor),
        (lb.AffineTensor, "Int8WeightTensor", Int8WeightTensor),
        (lb.TrainingScheme, "Int8Weight", lb.Int8Weight),
        (Granularity, "PerRow", lb.PerRow),
    ],
)
def test_two_classes_of_one_name_are_refused(base, name, holder):
    """Files name classes, so `lowbit.load` would read another class's weights as the new one's."""
    with pytest.raises(TypeError, match=rf"{__name__}\.{name} takes the name '{name}'.*lowbit\."):
        named(base, name)
    assert base.kinds[name] is holder


def test_a_second_tensor_of_one_scheme_is_refused():
    made = TrainableTensor.of(lb.Int8Weight())
    with pytest.raises(TypeError, match="takes the scheme Int8Weight, which lowbit"):
        type("Int8Again", (TrainableTensor,), {"schemes": (lb.Int8Weight,)})
    assert TrainableTensor.of(lb.Int8Weight()) is made is Int8WeightTensor
    assert "Int8Again" not in lb.LowbitTensor.kinds


def test_a_class_that_is_defined_again_replaces_itself():
    """A cell of a notebook that runs again."""
    for base in (lb.LowbitTensor, lb.TrainingScheme, Granularity):
        first, second = (named(base, "Again") for _ in range(2))
        try:
            assert first is not second and base.kinds["Again"] is second
        finally:
            base.kinds.pop("Again")


def test_what_a_class_lacks_is_named():
    class Codes(lb.LowbitTensor):
        is_described = False
        tensor_attrs = ("codes",)

    codes = {"codes": torch.ones(4, 4, dtype=torch.int8)}
    t = Codes.from_inner(codes, {}, (4, 4), torch.float32)
    with pytest.raises(NotImplementedError, match="subclasses of AffineTensor and TrainableTensor"):
        F.linear(torch.ones(2, 4), t)
    with pytest.raises(NotImplementedError, match=r"Codes defines no dequantize\(\)"):
        t.dequantize()
    with pytest.raises(NotImplementedError, match=r"Codes defines no inner_shapes"):
        t.inner_shapes((4, 4))
    with pytest.raises(NotImplementedError, match=r"Granularity defines no block_size"):
        Granularity().block_size((4, 4))
