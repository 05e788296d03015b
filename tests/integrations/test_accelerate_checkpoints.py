"""accelerate: save_state, load_state and save_model of models whose weights are low-bit."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import lowbit
from tests.tensor.cases import same_bits, values

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

PREPARE = {
    "qat": lambda m: lowbit.qat.prepare_(m, lowbit.Int4WeightOnly(32)),
    "Int8Weight": lambda m: lowbit.train.prepare_(m, lowbit.Int8Weight()),
    "int8 products": lambda m: lowbit.train.prepare_(
        m, lowbit.train.Int8MixedPrecision(always=True)
    ),
    "bitnet": lambda m: lowbit.train.prepare_(m, lowbit.BitNet()),
    "frozen": lambda m: lowbit.quantize_(m, {"0": lowbit.Int4WeightOnly(32), "*": None}),
}
over = pytest.mark.parametrize("how", PREPARE)


def made(how, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.SiLU(), nn.Linear(32, 64))
    PREPARE[how](model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, lowbit.optim.AdamW8bit(trained, lr=1e-2)


def train(accelerator, model, optimizer, steps):
    for step in steps:
        x = values((8, 64), step)
        accelerator.backward((model(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@over
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_run_that_resumes_gives_the_same_bits(how, safe, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*made(how))
    train(accelerator, model, optimizer, range(3))
    accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    train(accelerator, model, optimizer, range(3, 6))
    accelerator.free_memory()

    resumed = accelerate.Accelerator(cpu=True)
    again, optimizer = resumed.prepare(*made(how, seed=1))
    resumed.load_state(tmp_path / "state")
    train(resumed, again, optimizer, range(3, 6))
    expected = model.state_dict()
    assert [*again.state_dict()] == [*expected]
    for name, value in again.state_dict().items():
        assert same_bits(value, expected[name]), name


@over
def test_save_model(how, tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    model, _ = made(how)
    accelerator.save_model(accelerator.prepare(model), tmp_path)
    other, _ = made(how, seed=1)
    other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"))
    x = values((3, 64), 1)
    assert same_bits(other(x), model(x))


@over
def test_weights_are_not_loaded_tensor_by_tensor(how, tmp_path):
    """Parts have no description there, and plain values no scheme: the message names the calls that load them."""
    file = str(tmp_path / "model.bin")
    torch.save(made(how)[0].state_dict(), file)
    other, _ = made(how, seed=1)
    with pytest.raises((AttributeError, TypeError), match=r"Tensor .*lowbit\.load.*dispatch_model"):
        accelerate.load_checkpoint_and_dispatch(other, file, device_map={"": "cpu"})
    accelerate.load_checkpoint_in_model(other, file)
    accelerate.dispatch_model(other, {"": "cpu"})
    assert same_bits(other(values((3, 64), 1)), made(how)[0](values((3, 64), 1)))


@pytest.mark.parametrize("how", ["file", "folder", "index"])
@pytest.mark.parametrize("load", ["load_checkpoint_in_model", "load_checkpoint_and_dispatch"])
def test_a_plain_model_takes_no_low_bit_file(load, how, tmp_path):
    """accelerate would only log that it found none of the weights."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    file = tmp_path / "model.safetensors"
    lowbit.quantize_(model, lowbit.Int8WeightOnly())
    lowbit.save(model, file)
    index = tmp_path / "model.safetensors.index.json"
    if how == "index":
        index.write_text(json.dumps({"weight_map": {"0.weight.codes": file.name}}))
    given = {"file": file, "folder": tmp_path, "index": index}[how]
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64))
    before = plain[0].weight.detach().clone()
    call = getattr(accelerate, load)
    with pytest.raises(ValueError, match=r"such as 0\.weight.*lowbit\.load.*dispatch_model"):
        call(plain, str(given), device_map={"": "cpu"})
    assert torch.equal(plain[0].weight, before)
    if how == "folder":  # of which accelerate reads one checkpoint alone
        torch.save(plain.state_dict(), tmp_path / "pytorch_model.bin")
        call(plain, str(given), device_map={"": "cpu"})
    plain.load_state_dict(lowbit.load(file), assign=True)
    assert same_bits(plain(values((3, 64), 1)), model(values((3, 64), 1)))
    lowbit.save(torch.nn.Sequential(torch.nn.Linear(64, 64)), file)
    lowbit.save(model, tmp_path / "other.safetensors")  # not of the checkpoint
    index.write_text(json.dumps({"0.weight": file.name, "0.bias": file.name}))
    for one in (file, index):
        other = torch.nn.Sequential(torch.nn.Linear(64, 64))
        accelerate.load_checkpoint_in_model(other, str(one))
        assert torch.equal(other[0].weight, lowbit.load(file)["0.weight"])
