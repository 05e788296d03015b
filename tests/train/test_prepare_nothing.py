"""Models of which `prepare_` converts nothing, and layers without weights, take the same calls as others."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lowbit
from lowbit import train
from lowbit.train import BitNet, Int8MixedPrecision, Int8Weight
from tests.train.problems import SCHEMES, linear, values

INT8 = SCHEMES["int8"]


@pytest.mark.parametrize("scheme", [Int8MixedPrecision(), BitNet()], ids=["int8", "bitnet"])
@pytest.mark.parametrize("end", [train.restore_, train.convert_, lowbit.dequantize_])
def test_restoring_weights_that_prepare_left_alone_is_no_error(scheme, end):
    """By the rule of sizes a program would else run on one model and stop on a smaller one."""
    whole = nn.ModuleDict({"inner": nn.MultiheadAttention(32, 4), "norm": nn.LayerNorm(32)})
    model = whole.inner
    if not isinstance(scheme, BitNet):
        model = whole["inner"] = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    assert not train.prepare_(model, scheme).converted
    train.precompute_bitnet_scale(model)
    for twin in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), whole):
        assert twin.inner.state_dict().keys() == state.keys()
        report = end(twin)
        assert not report.converted and report.left
        assert all("prepare_ left it alone" in why for why in report.left.values())
        assert str(report).startswith("0 weights converted")
        with pytest.raises(ValueError, match="none to"):
            end(twin)  # it is plain now, as if it had never been prepared
    assert all(torch.equal(t, state[name]) for name, t in whole.inner.state_dict().items())


def test_each_part_of_a_model_is_restored_on_its_own():
    model = nn.ModuleDict({"large": nn.Linear(4096, 2048), "small": nn.Linear(8, 8)}).bfloat16()
    assert train.prepare_(model, Int8MixedPrecision()).converted == ["large.weight"]
    assert not train.restore_(model.small).converted
    assert train.restore_(model.large).converted == ["weight"]
    assert not train.restore_(model).entries
    with pytest.raises(ValueError, match="none to restore"):
        train.restore_(model)


def test_mixed_precision_is_not_converted_in_silence():
    model = nn.Sequential(linear(16, 16), nn.MultiheadAttention(32, 4))
    train.prepare_(model, INT8)
    with pytest.raises(ValueError, match="no BitNet weights"):
        train.precompute_bitnet_scale(model)
    with pytest.raises(ValueError, match=r"none to convert: MixedPrecision.*restore_"):
        train.convert_(model)
    assert train.restore_(model).converted == ["0.weight"]


@pytest.mark.parametrize("n,k", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize(
    "scheme",
    [*SCHEMES.values(), Int8Weight(), Int8Weight(True, True, True, always=True), BitNet()],
    ids=[*SCHEMES, "weight", "weight-products", "bitnet"],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_weights_go_all_the_way(scheme, n, k, tmp_path):
    model = nn.ModuleDict({"empty": nn.Linear(k, n), "full": nn.Linear(16, 16)})
    train.prepare_(model, scheme)
    optimizer = lowbit.optim.AdamW8bit(model.parameters(), lr=1e-2)
    (model.empty(values(3, k)).sum() + model.full(values(3, 16)).square().sum()).backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    restored = copy.deepcopy(model)
    assert train.restore_(restored).converted == ["empty.weight", "full.weight"]
    assert type(restored.empty.weight) is nn.Parameter and restored.empty.weight.shape == (n, k)
    if isinstance(scheme, Int8Weight | BitNet):
        train.convert_(model)
    else:
        lowbit.quantize_(restored, lowbit.Int4WeightOnly(8))
        model = restored
    assert model.empty.weight.dequantize().shape == (n, k)
    expected = model.empty.bias.expand(3, n)
    assert torch.equal(model.empty(values(3, k)), expected)
    lowbit.save(model, tmp_path / "model.safetensors")
    loaded = lowbit.load(tmp_path / "model.safetensors")
    assert torch.equal(loaded["empty.weight"], model.empty.weight)
