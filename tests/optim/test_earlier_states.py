"""Files of earlier versions, whose 4-bit states have other tables: their values load, and training goes on."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lowbit as lb
from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.tensor import CodebookTensor
from tests.optim.problems import is_beside, rand, relative

DATA = Path(__file__).resolve().parents[1] / "data"
OLD = torch.load(
    DATA / "linear_moments.pt", weights_only=True
)  # tests/data/write_linear_moments.py
EXPECTED = OLD["expected"]
# a value is at most this far from the nearest power of two, in its own units
FURTHEST = 0.334


def old_moment():
    return OLD["optimizer"]["state"][0]["exp_avg_sq"].clone()


def test_an_old_pickle_has_its_values():
    moment = old_moment()
    assert (moment.format, moment.signed, moment.grid) == ("4bit", False, "linear")
    assert "grid='linear'" in repr(moment)
    assert torch.equal(moment.dequantize(), EXPECTED)
    assert OLD["optimizer"]["state"][0]["exp_avg"].grid == "dynamic"
    assert torch.equal(pickle.loads(pickle.dumps(moment)).dequantize(), EXPECTED)
    assert torch.equal(moment[3:9].dequantize(), EXPECTED[3:9])


def test_old_descriptions_are_linear():
    """The JSON of lowbit's own files, which lacks the table's name."""
    old = {"format": "4bit", "signed": False, "block_size": 128}
    assert CodebookTensor.meta_from_json(old)["grid"] == "linear"
    assert CodebookTensor.meta_from_json({**old, "signed": True})["grid"] == "dynamic"
    assert CodebookTensor.meta_from_json({**old, "format": "8bit"})["grid"] is None
    state = lb.load(DATA / "checkpoint_v1.safetensors")
    assert state["state.4bit.unsigned"].grid == "linear"
    expected = state["expected.state.4bit.unsigned"]
    assert torch.equal(state["state.4bit.unsigned"].dequantize(), expected)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_both_grids_are_saved_again(tmp_path, suffix):
    new = CodebookTensor.from_float(EXPECTED, "4bit", signed=False)
    lb.save({"old": old_moment(), "new": new}, tmp_path / f"both{suffix}")
    loaded = lb.load(tmp_path / f"both{suffix}")
    assert loaded["old"].grid == "linear" and loaded["new"].grid == "powers"
    assert torch.equal(loaded["old"].dequantize(), EXPECTED)
    assert torch.equal(loaded["new"].dequantize(), new.dequantize())


def test_an_impossible_grid_is_refused():
    for format, signed, grid in (
        ("4bit", False, "squares"), ("4bit", False, None), ("8bit", False, "powers"), ("4bit", True, "linear"),
    ):  # fmt: skip
        data = {"format": format, "signed": signed, "block_size": 128, "grid": grid}
        with pytest.raises(ValueError, match=f"grid must be .*got {grid!r}"):
            CodebookTensor.meta_from_json(data)


def resumed(cls=optim.AdamW4bit, **options):
    param = nn.Parameter(rand(32, 128).bfloat16())
    optimizer = cls([param], lr=0.01, **options)
    optimizer.load_state_dict(copy.deepcopy(OLD["optimizer"]))
    return param, optimizer


@pytest.mark.parametrize("fused", [None, False], ids=["kernel", "eager"])
def test_an_old_checkpoint_goes_on(fused):
    param, optimizer = resumed(fused=fused)
    moment = optimizer.state[param]["exp_avg_sq"]
    assert moment.grid == "powers" and is_beside(moment, EXPECTED).all()
    assert ((moment.dequantize() - EXPECTED).abs() <= FURTHEST * EXPECTED).all()
    before = moment.dequantize().double()
    param.grad = rand(32, 128, seed=7).bfloat16()
    optimizer.step()
    assert optimizer.state[param]["step"] == 4
    exact = 0.999 * before + 0.001 * param.grad.double().square()
    assert is_beside(optimizer.state[param]["exp_avg_sq"], exact).all()


@pytest.mark.parametrize("state", ["8bit", "fp32", "bf16"])
def test_an_old_checkpoint_is_converted_to_other_formats(state):
    optimizer = resumed(optim.AdamW, state=state)[1]
    stored = optim.dequantize_state_dict(optimizer.state_dict())["state"][0]["exp_avg_sq"]
    assert relative(stored, EXPECTED) < 0.01


def test_an_old_checkpoint_of_offloaded_states():
    optimizer = resumed(CPUOffloadOptimizer, base_class=optim.AdamW4bit)[1]
    moment = optimizer.state_dict()["state"][0]["exp_avg_sq"]
    assert moment.grid == "powers" and is_beside(moment, EXPECTED).all()


def test_an_old_optimizer_that_was_pickled_as_a_whole():
    param, optimizer = resumed()
    optimizer.state[param]["exp_avg_sq"] = old_moment()
    again = pickle.loads(pickle.dumps(optimizer))
    (state,) = again.state.values()
    assert state["exp_avg_sq"].grid == "powers"
    assert is_beside(state["exp_avg_sq"], EXPECTED).all()


def test_a_linear_state_stays_right_without_a_kernel():
    """A user may set a state. No kernel reads it, and PyTorch operations keep its grid."""
    param, optimizer = resumed()
    optimizer.state[param]["exp_avg_sq"] = old_moment()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    moment = optimizer.state[param]["exp_avg_sq"]
    assert moment.grid == "linear" and relative(moment.dequantize(), EXPECTED) < 1e-2
    fused = resumed(fused=True)
    fused[1].state[fused[0]]["exp_avg_sq"] = old_moment()
    fused[0].grad = torch.zeros_like(fused[0])
    with pytest.raises(RuntimeError, match="not stored as the kernel reads them"):
        fused[1].step()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_an_old_distributed_checkpoint():
    """torch.distributed.checkpoint copies into the present states, which keep their grid."""
    param, optimizer = resumed()
    param.grad = rand(32, 128, seed=9).bfloat16()
    optimizer.step()
    state = optimizer.state[param]
    dcp.load({"state": dict(state)}, checkpoint_id=DATA / "linear_moments_dcp")
    assert state["step"] == 3 and state["exp_avg_sq"].grid == "powers"
    assert ((state["exp_avg_sq"].dequantize() - EXPECTED).abs() <= FURTHEST * EXPECTED).all()
    old = {"exp_avg_sq": old_moment().new_zeros((32, 128))}
    dcp.load({"state": old}, checkpoint_id=DATA / "linear_moments_dcp")
    assert old["exp_avg_sq"].grid == "linear"
    assert torch.equal(old["exp_avg_sq"].dequantize(), EXPECTED)
