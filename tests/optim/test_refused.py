"""Refused options and parameters: errors give the name and the accepted values, before anything changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lowbit import optim
from tests.optim.problems import parameters, rand, run, set_grads

BAD = {
    "lr negative": ({"lr": -1.0}, ValueError, r"lr must be.*-1\.0"),
    "lr nan": ({"lr": float("nan")}, ValueError, r"lr must be.*nan"),
    "lr text": ({"lr": "0.1"}, TypeError, r"lr must be a number, got '0\.1'"),
    "lr of two": ({"lr": torch.tensor([0.1, 0.2])}, ValueError, r"one element, got shape \(2,\)"),
    "lr complex": ({"lr": torch.tensor(1j)}, TypeError, r"lr must be a number, got tensor"),
    "lr bool": ({"lr": torch.tensor(True)}, TypeError, r"lr must be a number, got tensor"),
    "eps of two": ({"eps": torch.ones(2)}, ValueError, r"eps must be.*one element, got.*\(2,\)"),
    "beta of two": ({"betas": (torch.zeros(2), 0.9)}, ValueError, r"betas\[0\] must be.*\(2,\)"),
    "eps": ({"eps": -1e-8}, ValueError, r"eps must be.*-1e-08"),
    "beta 1": ({"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be in \[0, 1\), got 1\.0"),
    "beta 2": ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]"),
    "betas": ({"betas": 0.9}, ValueError, r"two numbers"),
    "decay": ({"weight_decay": -0.1}, ValueError, r"weight_decay"),
    "state": (
        {"state": "int4"},
        ValueError,
        r"'4bit', '8bit', 'float8', 'bf16', 'fp32', got 'int4'",
    ),
    "differentiable": ({"differentiable": True}, ValueError, r"differentiable=True.*torch\.optim"),
    "rounding": (
        {"bf16_stochastic_round": 1},
        TypeError,
        r"bf16_stochastic_round must be True or False, got 1",
    ),
    "correction": (
        {"weight_correction": "4bit"},
        ValueError,
        r"None, False, 'momentum', '8bit' or '16bit', got '4bit'",
    ),
    "exact and stochastic": (
        {"weight_correction": "16bit", "bf16_stochastic_round": True},
        ValueError,
        r"weight_correction='16bit' and .* leave one out",
    ),
    "no momentum": (
        {"weight_correction": "momentum", "betas": (0.0, 0.9)},
        ValueError,
        r"has none that moves .* accepted: AdamW, Adam and AdEMAMix with betas\[0\] above 0",
    ),
    "both": (
        {"weight_correction": "8bit", "bf16_stochastic_round": True},
        ValueError,
        r"leave one out",
    ),
    "norm": ({"max_grad_norm": -1.0}, ValueError, r"max_grad_norm must be.*-1\.0"),
    "norm 0": ({"max_grad_norm": 0.0}, ValueError, r"max_grad_norm must be above 0, or None"),
    "norm text": ({"max_grad_norm": "1"}, TypeError, r"max_grad_norm must be a number, got '1'"),
    "skip": (
        {"skip_nonfinite": None},
        TypeError,
        r"skip_nonfinite must be True or False, got None",
    ),
    "seed": ({"seed": 0.5}, TypeError, r"seed must be an int, got 0\.5"),
    "fused": ({"fused": "yes"}, TypeError, r"fused must be True, False or None, got 'yes'"),
    "amsgrad": ({"amsgrad": 1}, TypeError, r"amsgrad must be True or False, got 1"),
    "maximize": ({"maximize": None}, TypeError, r"maximize must be True or False, got None"),
    "foreach and fused": (
        {"foreach": True, "fused": True},
        RuntimeError,
        r"foreach=True and fused=True",
    ),
}


LION, SGD, MIX, MUON = optim.Lion, optim.SGD, optim.AdEMAMix, optim.Muon
OWN = [
    (LION, {"lr": -1.0}, ValueError, r"lr must be.*-1\.0"),
    (LION, {"betas": 0.9}, ValueError, r"betas must be two numbers in \[0, 1\), got 0\.9"),
    (LION, {"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be in \[0, 1\), got 1\.0"),
    (LION, {"betas": (0.9, "x")}, TypeError, r"betas\[1\] must be a number, got 'x'"),
    (LION, {"weight_decay": -0.1}, ValueError, r"weight_decay must be.*-0\.1"),
    (LION, {"maximize": 1}, TypeError, r"maximize must be True or False, got 1"),
    (LION, {"state": "int8"}, ValueError, r"'4bit', '8bit', 'float8', 'bf16', 'fp32', got 'int8'"),
    (SGD, {"momentum": -0.5}, ValueError, r"momentum must be.*-0\.5"),
    (SGD, {"dampening": "x"}, TypeError, r"dampening must be a number, got 'x'"),
    (SGD, {"dampening": math.nan}, ValueError, r"dampening must be a finite number, got nan"),
    (SGD, {"weight_decay": math.inf}, ValueError, r"weight_decay must be.*inf"),
    (SGD, {"nesterov": 1}, TypeError, r"nesterov must be True or False, got 1"),
    (SGD, {"nesterov": True}, ValueError, r"takes a momentum above 0.*momentum=0\.0"),
    (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, r"dampening=0\.1"),
    (MIX, {"betas": (0.9, 0.99)}, ValueError, r"three numbers.*\(0\.9, 0\.99\)"),
    (MIX, {"betas": (0.9, 0.99, 1.0)}, ValueError, r"betas\[2\].*got 1\.0"),
    (MIX, {"alpha": -1.0}, ValueError, r"alpha must be.*-1\.0"),
    (MIX, {"eps": -1.0}, ValueError, r"eps must be.*-1\.0"),
    (MIX, {"t_alpha_beta3": 0}, ValueError, r"t_alpha_beta3 must be a number of steps.*got 0"),
    (MIX, {"t_alpha_beta3": 0.5}, ValueError, r"t_alpha_beta3.*got 0\.5"),
    (MUON, {"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    (MUON, {"ns_steps": 0}, ValueError, "ns_steps must be a whole number from 1 to 99, got 0"),
    (MUON, {"ns_coefficients": (1, 2)}, ValueError, "ns_coefficients must be three numbers"),
    (MUON, {"ns_coefficients": (1, 2, math.nan)}, ValueError, r"ns_coefficients\[2\] must be.*nan"),
    (MUON, {"adjust_lr_fn": "best"}, ValueError, r"must be None, 'original' or 'match_rms_adamw'"),
]
REFUSED = [(cls, *row) for row in BAD.values() for cls in (optim.AdamW, optim.Adam4bit)] + OWN


@pytest.mark.parametrize("cls,options,error,message", REFUSED, ids=lambda v: str(v)[:40])
def test_bad_options_are_refused_as_default_and_in_a_group(cls, options, error, message):
    params = parameters((4, 4))
    with pytest.raises(error, match=message):
        cls(params, **options)
    optimizer = cls(params)
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": parameters((4, 4)), **options})
    assert len(optimizer.param_groups) == 1


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.AdamW([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        optim.AdamW(torch.zeros(3))
    with pytest.raises(TypeError, match=r"complex64; accepted are float32.*view_as_real"):
        optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    with pytest.raises(TypeError, match=r"int8; accepted are.*requires_grad"):
        optim.AdamW([nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)])
    with pytest.raises(TypeError, match=r"float8_e4m3fn; accepted"):
        optim.AdamW([nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)])
    with pytest.raises(ValueError, match="non-leaf"):
        optim.AdamW([torch.zeros(3, requires_grad=True) * 2])
    with pytest.raises(TypeError, match="ordered collections"):
        optim.AdamW([{"params": set(parameters((4, 4)))}])


def test_a_sparse_gradient_is_refused_before_anything_changes():
    dense = nn.Parameter(rand(40, 130))
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = optim.AdamW4bit([dense, embedding.weight])
    dense.grad = torch.ones_like(dense)
    embedding(torch.tensor([1])).sum().backward()
    before = dense.detach().clone()
    with pytest.raises(RuntimeError, match=r"shape \(10, 4\) is sparse.*SparseAdam"):
        optimizer.step()
    assert torch.equal(dense, before) and not optimizer.state


@pytest.mark.parametrize("cls", [optim.AdamW4bit, optim.SGD, optim.Muon], ids=lambda c: c.__name__)
@pytest.mark.parametrize("shape", [(130, 40), (30, 130)], ids=str)
def test_data_of_another_shape_is_refused(cls, shape):
    """Also with the same number of elements: the states would apply to other elements."""
    params = parameters((40, 130))
    optimizer = cls(params, **({"momentum": 0.9} if cls is optim.SGD else {}))
    run(optimizer, params, 1)
    params[0].grad = None
    params[0].data = before = rand(*shape, seed=1)
    params[0].grad = rand(*shape, seed=2)
    kept = before.clone()
    with pytest.raises(
        RuntimeError, match=r"had the shape \(40, 130\) in earlier steps; make a new"
    ):
        optimizer.step()
    assert torch.equal(params[0], kept) and optimizer.state[params[0]]["step"] == 1


def test_an_unknown_option_is_refused_with_those_that_exist():
    with pytest.raises(TypeError, match=r"AdamW8bit got .*'decay'; accepted: lr, betas.*seed"):
        optim.AdamW8bit(parameters((4, 4)), decay=0.1)


@pytest.mark.parametrize("options", [{"max_grad_norm": 2.0}, {"skip_nonfinite": True}], ids=str)
def test_options_of_all_gradients_are_the_same_in_all_groups(options):
    optimizer = optim.AdamW(parameters((4, 4)))
    with pytest.raises(ValueError, match=r"in one group and .* in another: it concerns"):
        optimizer.add_param_group({"params": parameters((4, 4)), **options})
    assert len(optimizer.param_groups) == 1


def test_numpy_numbers_are_numbers():
    """They become Python numbers: torch.load refuses numpy's in a checkpoint."""
    norm = np.float64(2.0)
    options = {"lr": np.float32(0.1), "eps": np.float64(1e-8), "max_grad_norm": norm}
    group = optim.AdamW(parameters((4, 4)), **options).param_groups[0]
    assert {type(group[name]) for name in options} == {float}


def test_options_changed_later_are_looked_at():
    params = parameters((64, 128), (4, 4))
    groups = [{"params": [p]} for p in params]
    optimizer = optim.AdamW8bit(groups)
    set_grads(params, 0)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match=r"max_grad_norm=None in one group and 1\.0 in another"):
        optimizer.step()
    optimizer.param_groups[1]["max_grad_norm"] = None
    optimizer.param_groups[0]["state"] = "int4"
    with pytest.raises(ValueError, match=r"state must be one of '4bit'.*got 'int4'"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_a_group_without_parameters_names_its_keys() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"under 'params', got the keys \['lr', 'param'\]"):
        optim.AdamW([{"param": model.parameters(), "lr": 1e-3}])
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="under 'params'"):
        optimizer.add_param_group({})
    assert len(optimizer.param_groups) == 1
