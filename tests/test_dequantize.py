"""dequantize_: any low-bit model becomes a plain one that computes the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

import lowbit
from lowbit import (
    BitNet,
    Float8MixedPrecision,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8MixedPrecision,
    Int8Weight,
    Int8WeightOnly,
    LowbitTensor,
    train,
)
from lowbit.testing.launch import launch
from tests.schemes import relative_error

INT4 = Int4WeightOnly(8)


class Model(nn.Module):
    """An embedding tied to the head, and projections that read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(self.q_proj(x) * self.k_proj(x) + self.v_proj(x)))


def of_bitnet(model: nn.Module) -> None:
    train.prepare_(model, BitNet(), lambda m, name: name.endswith("proj"))


def ternary(model: nn.Module) -> None:
    of_bitnet(model)
    train.convert_(model)


WAYS = {
    "int4": lambda m: lowbit.quantize_(m, INT4),
    "int8": lambda m: lowbit.quantize_(m, Int8WeightOnly()),
    "float8": lambda m: lowbit.quantize_(m, Float8WeightOnly()),
    "qat": lambda m: lowbit.qat.prepare_(m, INT4),
    "mixed": lambda m: train.prepare_(m, Int8MixedPrecision(always=True)),
    "float8 mixed": lambda m: train.prepare_(m, Float8MixedPrecision(always=True)),
    "int8 weight": lambda m: train.prepare_(m, Int8Weight()),
    "bitnet": of_bitnet,
    "ternary": ternary,
}
ROUNDS_INPUTS = {"mixed", "float8 mixed", "bitnet", "ternary"}
every_way = pytest.mark.parametrize("way", WAYS)
TOKENS = torch.arange(12).view(2, 6)


def made(way: str, dtype: torch.dtype = torch.float32) -> Model:
    model = Model().to(dtype)
    WAYS[way](model)
    return model


def modules_of(model: nn.Module) -> dict[str, type]:
    return {name: type(m) for name, m in model.named_modules()}


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_model_of_the_same_values(way, dtype) -> None:
    model = made(way, dtype)
    before = {
        name: (p.dequantize() if isinstance(p, LowbitTensor) else p.detach()).clone()
        for name, p in model.named_parameters()
    }
    low = {name for name, p in model.named_parameters() if isinstance(p, LowbitTensor)}
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    y = model(TOKENS)
    report = lowbit.dequantize_(model)
    assert low and low <= set(report.converted) and "0.0% of" in str(report)
    assert modules_of(model) == modules_of(Model())
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter and type(p.data) is torch.Tensor and p.is_contiguous()
        assert p.dtype is dtype and p.requires_grad == trains[name]
        assert torch.equal(p, before[name]), name
    assert model.head.weight is model.embedding.weight
    if way not in ROUNDS_INPUTS:
        # bfloat16: three layers round differently, relative to the whole
        limit = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert relative_error(model(TOKENS), y.double()) < limit
    plain = Model().to(dtype)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(TOKENS), model(TOKENS))
    assert all(
        not m._state_dict_hooks and not m._load_state_dict_pre_hooks for m in model.modules()
    )
    with pytest.raises(ValueError, match="no weights in low bits, none to dequantize"):
        lowbit.dequantize_(model)


def test_the_values_of_products_and_not_the_trained_weights() -> None:
    """`restore_` returns the trained weights; `dequantize_` returns the rounded ones, those of the converted model."""
    trained = Model()
    qat, bitnet, mixed = (copy.deepcopy(trained) for _ in range(3))
    lowbit.qat.prepare_(qat, INT4)
    converted = copy.deepcopy(qat)
    lowbit.qat.convert_(converted)
    y = converted(TOKENS)
    lowbit.dequantize_(qat)
    assert torch.equal(qat(TOKENS), y) and not torch.equal(qat.q_proj.weight, trained.q_proj.weight)
    of_bitnet(bitnet)
    lowbit.dequantize_(bitnet)
    assert len(bitnet.q_proj.weight.unique()) == 3
    train.prepare_(mixed, Int8MixedPrecision(always=True))
    memory = mixed.q_proj.weight.master().data_ptr()
    lowbit.dequantize_(mixed)
    assert torch.equal(mixed.q_proj.weight, trained.q_proj.weight)
    assert mixed.q_proj.weight.data_ptr() == memory


@pytest.mark.parametrize("way", ["qat", "mixed", "int8 weight"])
def test_trainable_weights_stay_trainable_with_their_gradients(way) -> None:
    model = made(way)
    model(TOKENS).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    report = lowbit.dequantize_(model)
    for name, p in model.named_parameters():
        assert p.requires_grad and torch.equal(p.grad, grads[name]), name
    assert {e.note for e in report.entries} <= {"plain", "tied to embedding.weight"}


def test_frozen_weights_are_reported_and_can_be_trained_afterwards() -> None:
    model = made("int4")
    report = lowbit.dequantize_(model)
    assert "plain, frozen as it was: requires_grad_(True) trains it" in str(report)
    assert not model.q_proj.weight.requires_grad and model.q_proj.bias.requires_grad
    model.requires_grad_(True)
    optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=0.1)
    before = model.q_proj.weight.detach().clone()
    model(TOKENS).sum().backward()
    optimizer.step()
    assert not torch.equal(model.q_proj.weight, before)


def test_a_filter_chooses_modules() -> None:
    model = made("int8")
    report = lowbit.dequantize_(model, lambda m, name: name == "k_proj")
    assert report.converted == ["k_proj.weight"]
    assert isinstance(model.q_proj.weight, LowbitTensor)
    report = lowbit.dequantize_(model, lambda m, name: name == "head")
    assert report.converted == ["embedding.weight", "head.weight"]
    with pytest.raises(ValueError, match="no weights in low bits that the filter chooses"):
        lowbit.dequantize_(model, lambda m, name: name == "norm")
    lowbit.dequantize_(model.q_proj)
    assert type(model.q_proj.weight) is nn.Parameter
    with pytest.raises(TypeError, match="filter_fn must be"):
        lowbit.dequantize_(model, "head")
    with pytest.raises(TypeError, match=r"must be an nn\.Module"):
        lowbit.dequantize_(model.state_dict())


def test_experts_and_all_dimensions() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(3, 8, 16))

    model = nn.ModuleDict({"experts": Experts(), "linear": nn.Linear(8, 8)})
    lowbit.quantize_(model, Int8DynamicActivationInt8Weight(), lambda m, name: True)
    values = model.experts.up.dequantize()
    assert lowbit.dequantize_(model).converted == ["experts.up", "linear.weight"]
    assert torch.equal(model.experts.up, values)


def _sharded_is_refused(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    lowbit.quantize_(model, INT4)
    mesh = init_device_mesh("cpu", (world,))
    sharded = DTensor.from_local(model[1].weight.data, mesh, [Replicate()], run_check=False)
    model[1].weight = nn.Parameter(sharded, requires_grad=False)
    with pytest.raises(ValueError, match=r"1\.weight is sharded: gather the state dict"):
        lowbit.dequantize_(model)
    assert isinstance(model[0].weight, LowbitTensor)


def test_a_sharded_model_is_refused_and_stays_as_it_is() -> None:
    launch(_sharded_is_refused, 2)


def test_a_filter_reports_what_it_left() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16))
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    report = lowbit.dequantize_(model, lambda _, name: name == "0")
    assert report.converted == ["0.weight"]
    assert report.left == {"1.weight": "not selected by the filter"}
