"""safetensors writes and reads models whose weights are low-bit, of every representation."""

from __future__ import annotations

import pytest
from torch import nn

import lowbit
from tests.tensor.cases import every_weight, same, same_bits, values
from tests.tensor.test_state_dicts import Net, check_equal

safetensors = pytest.importorskip("safetensors.torch")


@every_weight
def test_models(case, tmp_path):
    """save_model keeps one name of tied weights, and load_model restores both."""
    source, model = Net(case), Net(case, seed=1)
    safetensors.save_model(source, tmp_path / "m.safetensors")
    missing, unexpected = safetensors.load_model(model, tmp_path / "m.safetensors")
    assert not missing and not unexpected
    check_equal(model, source)


@every_weight
def test_state_dicts(case, tmp_path):
    source, model = (nn.Sequential(nn.Linear(100, 24), nn.Linear(24, 5)) for _ in range(2))
    for seed, m in enumerate((source, model)):
        m[0].weight = nn.Parameter(case.make((24, 100), seed))
    safetensors.save_file(source.state_dict(), tmp_path / "m.safetensors")
    model.load_state_dict(safetensors.load_file(tmp_path / "m.safetensors"))
    assert same(model[0].weight.detach(), source[0].weight.detach())
    x = values((3, 100), 1)
    assert same_bits(model(x), source(x))


def test_load_model_names_missing_tensors(tmp_path):
    model = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 8))
    lowbit.quantize_(model, lowbit.Int4WeightOnly(16))
    state = {name: t for name, t in model.state_dict().items() if not name.startswith("1.weight")}
    safetensors.save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(RuntimeError, match=r'Missing.*"1\.weight\.codes", "1\.weight\.scale"'):
        safetensors.load_model(model, tmp_path / "m.safetensors")


_DYNAMIC = lowbit.Int8DynamicActivationInt4Weight(32)


def test_gathered_by_name_and_written(tmp_path):
    """get_model_state_dict of a model that is not sharded gives plain parts, as state_dict does."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, other = (nn.Sequential(nn.Linear(64, 16)) for _ in range(2))
    for m in (model, other):
        lowbit.quantize_(m, lowbit.Int4WeightOnly(16))
    tensors, _ = lowbit.checkpoint.to_plain(get_model_state_dict(model))
    safetensors.save_file(tensors, tmp_path / "m.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "m.safetensors"))
    assert same(other[0].weight.detach(), model[0].weight.detach())
