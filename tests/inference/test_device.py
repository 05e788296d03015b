"""`device`: each weight moves before it is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowbit as lb

FLOWS: dict[str, Any] = {
    "int4": (lb.quantize_, lb.Int4WeightOnly(16)),
    # q and k share a global scale, which is made before
    "nvfp4": (lb.quantize_, lb.NVFP4WeightOnly()),
    "trained-int8": (lb.train.prepare_, lb.train.Int8Weight()),
    "trained-int4": (lb.train.prepare_, lb.train.Int4Weight(group_size=16)),
    "products": (lb.train.prepare_, lb.train.Int8MixedPrecision(always=True)),
}
flows = pytest.mark.parametrize("flow", FLOWS)


class Model(nn.Module):
    """A head tied to another layer, norms, a buffer, and an embedding that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 32)
        self.q_proj, self.k_proj, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.head, self.twin = nn.Linear(32, 16, bias=False), nn.Linear(32, 16)
        self.twin.weight = self.head.weight
        self.register_buffer("angles", torch.ones(3))


@flows
def test_all_of_the_model_moves(flow: str) -> None:
    convert, scheme = FLOWS[flow]
    model = Model()
    convert(model, scheme, device="meta")
    assert model.twin.weight is model.head.weight
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    assert isinstance(model.head.weight, lb.LowbitTensor)
    assert not isinstance(model.embedding.weight, lb.LowbitTensor)


@flows
def test_a_dtype_is_no_device(flow: str) -> None:
    convert, scheme = FLOWS[flow]
    model = Model()
    weight = model.head.weight
    with pytest.raises(TypeError, match="device"):
        convert(model, scheme, device=torch.bfloat16)
    assert model.head.weight is weight and weight.dtype is torch.float32


@pytest.mark.parametrize("flow", ["int4", "trained-int8"])
def test_one_weight_moves_at_a_time(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight follows before the one that moved is in low bits."""
    convert, scheme = FLOWS[flow]
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    high: list[int] = []
    apply = nn.Module._apply

    def moved(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        if not recurse:
            weights = [layer.weight for layer in model if layer.weight.device.type == "meta"]
            high.append(sum(not isinstance(w, lb.LowbitTensor) for w in weights))
        return apply(module, fn, recurse)

    monkeypatch.setattr(nn.Module, "_apply", moved)
    convert(model, scheme, device="meta")
    assert high == [0, 0, 0, 0]


@pytest.mark.gpu
@flows
def test_converted_on_a_gpu(flow: str) -> None:
    """As if the whole model had moved before."""
    convert, scheme = FLOWS[flow]
    models = [Model().cuda(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    convert(models[0], scheme)
    convert(models[1], scheme, device="cuda")
    for (name, a), (_, b) in zip(
        models[0].state_dict().items(), models[1].state_dict().items(), strict=True
    ):
        assert a.device == b.device and torch.equal(a, b), name
