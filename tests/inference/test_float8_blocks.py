"""Weights with float8 blocks, as published: trained, and multiplied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import lowbit as lb
from lowbit import Float8Tensor, train
from lowbit.schemes.mixed_precision import BLOCK_ACTIVATION
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


def load(model: Net, state: dict[str, Tensor]) -> None:
    model.load_state_dict({n: t for n, t in state.items() if t.dtype is not E4M3}, strict=False)
    for name in ("up", "down"):
        layer, parts = (
            getattr(model, name),
            [state[f"{name}.weight{s}"] for s in ("", "_scale_inv")],
        )
        made = Float8Tensor.from_blocks(*parts, (128, 128), layer.weight.dtype, BLOCK_ACTIVATION)
        layer.weight = nn.Parameter(made, requires_grad=False)


def test_full_training_from_it_and_back() -> None:
    state, model = published(torch.float32), Net(torch.float32)
    load(model, state)
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
    for name in ("up", "down"):
        weight = getattr(model, name).weight
        assert isinstance(weight, Float8Tensor) and weight.spec.granularity == lb.PerBlock(128, 128)
    assert not same_bits(model.up.weight.codes[:300, :200], state["up.weight"])


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
