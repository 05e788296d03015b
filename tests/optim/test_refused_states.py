"""States in a checkpoint that do not fit their parameter are refused by name, before anything changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowbit import AffineTensor, Int4WeightOnly, optim
from lowbit.tensor import CodebookTensor
from tests.optim.problems import parameters, run

SHAPE = (64, 128)


def book(stored="8bit", **changes):
    """A state with changed parts or metadata."""

    def make():
        t = CodebookTensor.from_float(torch.rand(SHAPE), stored, signed=True)
        for name, value in changes.items():
            setattr(t, name, value(getattr(t, name)) if callable(value) else value)
        return t

    return make


STATES = {
    "codes of one element": (book(codes=lambda c: c[:1, :1]), r"codes of shape \(1, 1\)"),
    "codes of one row": (book(codes=lambda c: c[:1]), r"codes of shape \(1, 128\)"),
    "one scale": (book(scale=lambda s: s[:1, :1]), r"scale of shape \(1, 1\).*\(64, 1\)"),
    "codes with a sign": (book(codes=lambda c: c.view(torch.int8)), r"codes of .*int8.*uint8"),
    "half a scale": (book(scale=torch.Tensor.half), r"scale of .*float16.*float32"),
    "no scale": (book(scale=None), r"has no scale"),
    "codes on meta": (
        book(codes=lambda c: c.to("meta")),
        r"is on the meta device in the checkpoint",
    ),
    "another format": (book("8bit", format="float16"), r"format must be one of .*'float16'"),
    "signed": (book(signed="yes"), r"signed must be True or False, got 'yes'"),
    "block size": (book(block_size=0), r"block_size must be a positive even integer, got 0"),
    "other block size": (book("4bit", block_size=64), r"scale of shape \(64, 1\).*\(64, 2\)"),
    "one element": (lambda: torch.ones(1), r"shape \(1,\) in the checkpoint.*\(64, 128\)"),
    "no dimensions": (lambda: torch.tensor(1.0), r"shape \(\) in the checkpoint"),
    "one row": (lambda: torch.ones(1, 128), r"shape \(1, 128\) in the checkpoint"),
    "integers": (lambda: torch.ones(SHAPE, dtype=torch.int64), r"floating dtype, got torch.int64"),
    "bools": (lambda: torch.ones(SHAPE, dtype=torch.bool), r"floating dtype, got torch.bool"),
    "complex": (
        lambda: torch.ones(SHAPE, dtype=torch.complex64),
        r"floating dtype, got torch.complex64",
    ),
    "float8": (lambda: torch.ones(SHAPE).to(torch.float8_e5m2), r"Tensor of torch.float8_e5m2"),
    "sparse": (lambda: torch.eye(*SHAPE).to_sparse(), r"torch.sparse_coo; accepted"),
    "a weight": (
        lambda: AffineTensor.from_float(torch.ones(SHAPE), Int4WeightOnly(32)),
        r"is a AffineTensor of torch.float32.*accepted: a CodebookTensor",
    ),
    "a list": (lambda: [1.0], r"must be a tensor, got list"),
}


@pytest.mark.parametrize("state", ["8bit", "fp32"])
@pytest.mark.parametrize("make,message", STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_is_refused_by_name(state, make, message):
    model = nn.Linear(128, 64, bias=False)
    optimizer = optim.AdamW(model.named_parameters(), state=state)
    run(optimizer, list(model.parameters()), 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state_dict["state"])
    state_dict["state"][0]["exp_avg_sq"] = make()
    with pytest.raises((ValueError, TypeError), match=f"weight: exp_avg_sq.*{message}"):
        optimizer.load_state_dict(state_dict)
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before[0][name])


@pytest.mark.parametrize("cls", [optim.SGD, optim.Lion, optim.Muon], ids=lambda c: c.__name__)
def test_every_optimizer_looks_at_its_states(cls):
    params = parameters(SHAPE)
    optimizer = cls(params, **({"momentum": 0.9} if cls is optim.SGD else {}))
    run(optimizer, params, 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    (name,) = state_dict["state"][0].keys() - {"step"}
    state_dict["state"][0][name] = book(codes=lambda c: c[:1, :1])()
    with pytest.raises(ValueError, match=rf"parameter 0: {name}: codes of shape \(1, 1\)"):
        optimizer.load_state_dict(state_dict)


def test_a_weight_correction_that_does_not_fit():
    """Older versions converted it to int8 silently."""
    params = [nn.Parameter(torch.randn(SHAPE).bfloat16())]
    optimizer = optim.AdamW8bit(params, weight_correction="8bit")
    run(optimizer, params, 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["weight_correction"] = torch.full(SHAPE, 300.7)
    with pytest.raises(
        TypeError, match=r"weight_correction must be of dtype torch.int8 or torch.uint8, got"
    ):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_plain_states_of_every_floating_dtype_are_taken(dtype):
    params = parameters(SHAPE)
    optimizer = optim.AdamW8bit(params)
    run(optimizer, params, 1)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        value = state_dict["state"][0][name].dequantize().to(dtype)
        state_dict["state"][0][name] = value.t().contiguous().t()
    optimizer.load_state_dict(state_dict)
    assert isinstance(optimizer.state[params[0]]["exp_avg"], CodebookTensor)
