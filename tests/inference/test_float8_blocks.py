"""Checkpoints with float8 blocks as `weight` and `weight_scale_inv`: loaded, used, trained, and written again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import Float8Tensor, train
from lowbit.inference import float8_blocks_state_dict, load_float8_blocks_
from lowbit.train import Float8BlockMixedPrecision
from lowbit_kernels.runtime import launches
from tests.tensor.cases import same_bits
from tests.train.problems import relative, values

E4M3 = torch.float8_e4m3fn


class Net(nn.Module):
    """Two linears beside plain parameters, one of them tied."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 200, dtype=dtype)
        self.up, self.down = nn.Linear(200, 300, dtype=dtype), nn.Linear(300, 200, dtype=dtype)
        self.norm = nn.LayerNorm(200, dtype=dtype)
        self.head = nn.Linear(200, 20, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        return self.head(self.norm(h + self.down(torch.relu(self.up(h)))))


def published(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A state dict as such models are published; its values do not come from lowbit."""
    torch.manual_seed(1)
    state = {name: t.clone() for name, t in Net(dtype).state_dict().items()}
    for name in ("up", "down"):
        n, k = state[f"{name}.weight"].shape
        state[f"{name}.weight"] = (torch.randn(n, k) * 100).to(E4M3)
        state[f"{name}.weight_scale_inv"] = torch.rand(-(-n // 128), -(-k // 128)) * 1e-3 + 1e-4
    return state


def dequantized(state: dict[str, Tensor], name: str) -> Tensor:
    """By the formula, block by block."""
    codes, scale = state[f"{name}.weight"].double(), state[f"{name}.weight_scale_inv"].double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            codes[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    return codes


def assert_same_state(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(found[name], value) and found[name].is_contiguous(), name


@pytest.mark.parametrize("quantize_activations", [True, False])
def test_load_use_and_write_again(quantize_activations: bool, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state, model = published(), Net()
    safetensors.save_file({k: v.clone() for k, v in state.items()}, tmp_path / "in.safetensors")
    loaded = safetensors.load_file(tmp_path / "in.safetensors")
    report = load_float8_blocks_(model, loaded, quantize_activations=quantize_activations)
    assert sorted(report.converted) == ["down.weight", "up.weight"]
    weight = model.up.weight
    assert isinstance(weight, Float8Tensor) and weight.dtype is torch.bfloat16
    assert (weight.activation is not None) is quantize_activations
    assert relative(weight.dequantize(), dequantized(state, "up")) < 2**-8
    assert model.head.weight is model.embed.weight
    x = values(9, 200, dtype=torch.bfloat16)
    expected = x.double() @ dequantized(state, "up").t() + model.up.bias.detach().double()
    assert relative(model.up(x), expected) < (0.05 if quantize_activations else 0.01)
    assert_same_state(float8_blocks_state_dict(model), state)
    safetensors.save_model(model, tmp_path / "own.safetensors")
    written = {k: v.clone() for k, v in float8_blocks_state_dict(model).items()}
    safetensors.save_file(written, tmp_path / "out.safetensors")
    assert_same_state(safetensors.load_file(tmp_path / "out.safetensors"), state)
    lb.save(model, tmp_path / "model.lowbit.safetensors")
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert same_bits(again.up.weight.codes, weight.codes)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_scales_of_powers_of_two(as_bytes: bool) -> None:
    state = published()
    for name in ("up", "down"):
        key = f"{name}.weight_scale_inv"
        state[key] = state[key].to(torch.float8_e8m0fnu)
    model = Net()
    given = {k: v.view(torch.uint8) if as_bytes and "inv" in k else v for k, v in state.items()}
    load_float8_blocks_(model, given)
    found = float8_blocks_state_dict(model)
    for name in ("up", "down"):
        key = f"{name}.weight_scale_inv"
        assert found[key].dtype is torch.float32 and torch.equal(found[key], state[key].float())


def test_full_training_from_it_and_back() -> None:
    state, model = published(torch.float32), Net(torch.float32)
    load_float8_blocks_(model, state)
    train.prepare_(model, dict.fromkeys(("up", "down"), Float8BlockMixedPrecision(always=True)))
    assert relative(model.up.weight.master(), dequantized(state, "up")) < 1e-6
    tokens, optimizer = torch.arange(20), lb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 20)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    train.convert_(model)
    found = float8_blocks_state_dict(model)
    assert found.keys() == state.keys()
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in state.items()}
    assert not same_bits(found["up.weight"], state["up.weight"])
    again = Net(torch.float32)
    load_float8_blocks_(again, found)
    assert torch.equal(again(tokens), model(tokens))


def test_what_does_not_fit_is_refused() -> None:
    model, state = Net(), published()
    before = copy.deepcopy(model.state_dict())
    for change, error, message in (
        ({"up.weight_scale_inv": None}, KeyError, "has no scales 'up.weight_scale_inv'"),
        ({"up.weight_scale_inv": torch.ones(2, 2)}, ValueError, r"scales \(2, 2\).*\(3, 2\)"),
        ({"up.weight_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, ValueError, "torch.int32"),
        ({"up.weight": torch.zeros(300, 128).to(E4M3)}, ValueError, r"\(300, 128\)"),
        ({"norm.weight": None}, KeyError, r"lacks \['norm.weight'\]"),
        (
            {"up.weight": state["up.weight"].view(torch.int8)},
            ValueError,
            "up.weight_scale_inv.*lost",
        ),
        ({"norm.weight_scale_inv": torch.ones(1, 1)}, ValueError, "norm.weight_scale_inv.*lost"),
        ({"more": torch.ones(2)}, KeyError, r"the model lacks \['more'\]"),
        ({"more": torch.ones(2).to(E4M3)}, KeyError, "no parameter 'more'"),
    ):
        given = {k: v for k, v in {**state, **change}.items() if v is not None}
        with pytest.raises(error, match=message):
            load_float8_blocks_(model, given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(ValueError, match="no weights in float8 blocks"):
        float8_blocks_state_dict(model)
    with torch.device("meta"):
        on_meta = Net()
    with pytest.raises(ValueError, match=r"on the meta device; call model\.to_empty"):
        load_float8_blocks_(on_meta, state)
    load_float8_blocks_(model, state)
    with pytest.raises(ValueError, match=r"up\.weight is in low bits already"):
        load_float8_blocks_(model, state)
    lb.quantize_(model, {"head": lb.Int8WeightOnly()})
    with pytest.raises(ValueError, match=r"(head|embed)\.weight is stored otherwise"):
        float8_blocks_state_dict(model)


def test_parameters_of_any_name() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(values(130, 70).bfloat16())

        def forward(self, x):
            return nn.functional.linear(x, self.gate)

    model = Gate()
    lb.quantize_(
        model,
        lb.Float8DynamicActivationFloat8Weight(lb.PerBlock(128, 128)),
        lambda module, name: isinstance(module, Gate),
    )
    state = float8_blocks_state_dict(model)
    assert sorted(state) == ["gate", "gate_scale_inv"]
    again = Gate()
    load_float8_blocks_(again, state)
    x = values(5, 70).bfloat16()
    assert torch.equal(again(x), model(x))


def test_the_preset() -> None:
    scheme = lb.Float8DynamicActivationFloat8Weight(lb.PerBlock(128, 128))
    assert scheme.activation.granularity == lb.PerGroup(128)
    assert lb.Scheme.from_dict(scheme.to_dict()) == scheme
    weight_only = lb.Float8WeightOnly(lb.PerBlock(128, 128))
    assert weight_only.activation is None and weight_only.weight == scheme.weight
    with pytest.raises(ValueError, match=r"PerRow\(\) or PerBlock\(n, k\), got PerGroup"):
        lb.Float8DynamicActivationFloat8Weight(lb.PerGroup(32))


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m", [1, 3, 64, 500])
def test_products_on_a_gpu(m: int, bias: bool) -> None:
    """Inference multiplies the codes that training multiplied: outputs are equal to the bit."""
    layer = nn.Sequential(nn.Linear(400, 520, bias=bias)).bfloat16().cuda()
    x = values(m, 400, dtype=torch.bfloat16).cuda()
    exact = copy.deepcopy(layer).double()(x.double()).detach()
    train.prepare_(layer, Float8BlockMixedPrecision(always=True))
    trained = layer(x).detach()
    train.convert_(layer)
    with launches.counted() as calls:
        found = layer(x)
    assert calls["block_scaled_mm", "cublas"] == calls["quantize_blocks", "sm90"] == 1
    assert torch.equal(found, trained) and relative(found, exact) < 0.05
