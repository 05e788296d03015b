"""quantize_ in ordinary models: attention, experts, shared modules, meta devices, casts, copies, pickles."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit.tensor import joined
from tests.schemes import SCHEMES, WEIGHT_ONLY, over, relative_error, rounded

INT4 = lb.Int4WeightOnly(8)


def with_dequantized_weights(model: nn.Module) -> nn.Module:
    """A copy in which each quantized weight is a plain one of the same values."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, lb.LowbitTensor):
                setattr(module, name, nn.Parameter(param.dequantize()))
    return model


# ---- attention, whose fused paths take the weight without nn.Linear ------------------------------------------


@over({"int4-g8": INT4, "float8": lb.Float8WeightOnly(), "int8xint8": SCHEMES["int8xint8"]})
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_multihead_attention(scheme: lb.Scheme, train: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True).train(train)
    report = lb.quantize_(model, scheme)
    assert report.converted == ["out_proj.weight"]
    plain = with_dequantized_weights(model)
    x = torch.randn(2, 5, 16)
    bound = 1e-5 if scheme.activation is None else 0.03
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            y, expected = model(x, x, x)[0], plain(x, x, x)[0]
        assert 0 <= relative_error(y, expected) < bound
        if scheme.activation is not None:
            assert not torch.equal(y, expected), "the activation must be quantized"
    leaf = x.clone().requires_grad_()
    model(leaf, leaf, leaf)[0].sum().backward()
    assert leaf.grad.abs().sum() > 0 and model.in_proj_weight.grad is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@over({"int4-g8": INT4, "float8": lb.Float8WeightOnly()})
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_transformer_encoder(scheme: lb.Scheme, train: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).train(train)
    assert len(lb.quantize_(model, scheme).converted) == 6
    plain = with_dequantized_weights(model)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            assert relative_error(model(x), plain(x)) < 1e-5
            masked = model(x, src_key_padding_mask=padding)
            expected = plain(x, src_key_padding_mask=padding)
            assert relative_error(masked[0], expected[0]) < 1e-5
            assert relative_error(masked[1, :3], expected[1, :3]) < 1e-5


# ---- experts ------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """E feed-forward experts in two 3-D parameters; each token goes to one of them."""

    def __init__(self, experts: int = 3, size: int = 18, hidden: int = 20) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, size) / size**0.5)
        self.down = nn.Parameter(torch.randn(experts, size, hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            tokens = choice == e
            hidden = nn.functional.linear(x[tokens], self.up[e]).relu()
            y[tokens] = nn.functional.linear(hidden, self.down[e])
        return y + self.bias


@over({k: v for k, v in SCHEMES.items() if k != "int4-tensor"})
def test_experts(scheme: lb.Scheme) -> None:
    model = nn.ModuleDict({"gate": nn.Linear(18, 3), "experts": Experts()})
    originals = {n: p.detach().clone() for n, p in model["experts"].named_parameters()}
    report = lb.quantize_(model, scheme, lambda m, name: isinstance(m, Experts), scales="minmax")
    assert report.converted == ["experts.up", "experts.down"]
    assert report.left == {"gate.weight": "not selected by the filter"}
    experts = model["experts"]
    assert experts.bias.requires_grad
    for name in ("up", "down"):
        weight = getattr(experts, name)
        values = rounded(originals[name], scheme.weight).float()
        assert torch.equal(weight.dequantize(), values)
        for e in range(3):
            assert torch.equal(weight[e].dequantize(), values[e])
    x, choice = torch.randn(8, 18, requires_grad=True), torch.tensor([0, 1, 1, 0, 2, 0, 0, 2])
    y = experts(x, choice)
    bound = 1e-5 if scheme.activation is None else 0.1
    assert relative_error(y, with_dequantized_weights(experts)(x, choice)) < bound
    y.sum().backward()
    assert (x.grad.abs().sum(1) > 0).all()


def test_a_whole_tensor_scale_for_experts_is_never_wrong() -> None:
    experts = Experts()
    lb.quantize_(experts, WEIGHT_ONLY["int4-tensor"], lambda m, name: True)
    values = experts.up.dequantize()
    try:
        assert torch.equal(experts.up[1].dequantize(), values[1])
    except NotImplementedError as error:
        assert "dequantize" in str(error)


def test_a_3d_weight_in_a_plain_linear_says_what_to_do() -> None:
    experts = Experts()
    lb.quantize_(experts, INT4, lambda m, name: True)
    with pytest.raises(ValueError, match="index one expert"):
        nn.functional.linear(torch.randn(2, 18), experts.up)


# ---- the same module in two places, and other forms of a model -----------------------------------------------


def test_a_module_in_two_places() -> None:
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    lb.quantize_(model, INT4)
    assert model[0] is model[2]
    x = torch.randn(3, 16)
    assert torch.equal(model(x), with_dequantized_weights(model)(x))
    assert len(list(model.parameters())) == 2


def test_on_meta_then_loaded() -> None:
    """A model that is converted on the meta device loads a quantized state dict."""
    real = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4))
    lb.quantize_(real, INT4)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4))
    report = lb.quantize_(model, INT4)
    assert report.converted == ["0.weight", "1.weight"] and model[0].weight.is_meta
    assert model[0].weight.shape == (16, 19) and model[0].weight.codes.shape == (16, 12)
    assert model(torch.randn(2, 19, device="meta")).shape == (2, 4)
    x = torch.randn(2, 19)
    by_assignment = copy.deepcopy(model)
    by_assignment.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(by_assignment(x), real(x))
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    assert torch.equal(model(x), real(x))


@pytest.mark.cover("values")
@over(SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casting_keeps_the_codes(scheme: lb.Scheme, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4))
    lb.quantize_(model, scheme)
    before = [copy.deepcopy(model[i].weight) for i in (0, 1)]
    x = torch.randn(5, 19)
    y = model(x)
    model.to(dtype)
    for old, layer in zip(before, model, strict=True):
        assert layer.weight.dtype is layer.bias.dtype is dtype
        for name, inner in old.inner_tensors().items():
            assert torch.equal(getattr(layer.weight, name), inner), name
        assert torch.equal(layer.weight.dequantize(), old.dequantize().to(dtype))
    assert relative_error(model(x.to(dtype)), y) < 0.03  # inputs of float8 may round to neighbours
    model.float()
    assert torch.equal(model[0].weight, before[0])


@over(SCHEMES)
def test_copies_and_pickles(scheme: lb.Scheme) -> None:
    model = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4))
    lb.quantize_(model, scheme)
    x = torch.randn(5, 19)
    y = model(x)
    copied = copy.deepcopy(model)
    copied[0].weight.codes.zero_()
    assert torch.equal(model(x), y), "a deep copy has memory of its own"
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), y)


@over(SCHEMES)
def test_state_dicts(scheme: lb.Scheme) -> None:
    model, other = (nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4)) for _ in range(2))
    lb.quantize_(model, scheme)
    x = torch.randn(5, 19)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other.load_state_dict(joined(state), assign=True)
    assert torch.equal(other(x), model(x)) and not other[0].weight.requires_grad
    third = nn.Sequential(nn.Linear(19, 16), nn.Linear(16, 4))
    lb.quantize_(third, scheme)
    third.load_state_dict(model.state_dict())
    assert torch.equal(third(x), model(x))
    assert third[0].weight.codes.data_ptr() != model[0].weight.codes.data_ptr()


def test_state_dicts_of_different_schemes_are_not_mixed_up() -> None:
    a, b = nn.Linear(16, 4), nn.Linear(16, 4)
    lb.quantize_(a, INT4)
    lb.quantize_(b, lb.Int4WeightOnly(16))
    before = copy.deepcopy(b.weight)
    with pytest.raises(RuntimeError, match="stored differently"):
        b.load_state_dict(a.state_dict())
    assert torch.equal(b.weight, before)


def test_plain_weights_loaded_into_a_quantized_model_are_quantized() -> None:
    model, plain = nn.Linear(16, 4), nn.Linear(16, 4)
    lb.quantize_(model, INT4)
    model.load_state_dict(plain.state_dict())
    expected = rounded(plain.weight.detach(), INT4.weight).float()
    assert torch.equal(model.weight.dequantize(), expected)


def test_a_quantized_state_dict_into_a_plain_model_is_dequantized() -> None:
    model, plain = nn.Linear(16, 4), nn.Linear(16, 4)
    lb.quantize_(model, INT4)
    plain.load_state_dict(joined(model.state_dict()))
    assert (
        torch.equal(plain.weight, model.weight.dequantize()) and type(plain.weight) is nn.Parameter
    )
