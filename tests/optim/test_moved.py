"""Tensors and options replaced between two compiled steps: the step reads the new ones."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from lowbit import optim
from lowbit.numerics.rounding import join_bf16
from lowbit.optim.step import fused
from lowbit_kernels.runtime import tensor_memory
from tests.optim.counted import launched
from tests.optim.problems import rand, relative


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def checks(request, monkeypatch):
    """The two forms in which a step looks for what has moved."""
    if request.param == "in Python":
        monkeypatch.setattr(tensor_memory, "_compiled", lambda: None)
        monkeypatch.setattr(fused, "_watch", lambda *_: None)


MEMORY = {
    "zeros": lambda tensor: torch.zeros_like(tensor),
    "clone": lambda tensor: tensor.clone(),
}


def inner_of(state):
    """The plain tensors of a parameter's states."""
    for value in state.values():
        yield from value.inner_tensors().values() if hasattr(value, "codes") else [value]


def trained(device, state, fused_or_not, replace):
    """A weight of 24 bits and its states after three steps, with `replace` called on each plain state after the first.

    Weight and correction are put together: the byte alone wraps where the bfloat16 rounds the other way.
    """
    param = nn.Parameter(rand(64, 256, dtype=torch.bfloat16).to(device))
    options = {"weight_correction": "8bit", "state": state, "fused": fused_or_not, "lr": 1e-2}
    optimizer = optim.AdamW([param], **options)
    for step in range(3):
        param.grad = rand(64, 256, seed=step).to(param)
        optimizer.step()
        if step == 0:
            for value in inner_of(optimizer.state[param]):
                replace(value)
    states = dict(optimizer.state[param])
    weight = join_bf16(param.detach(), states.pop("weight_correction"))
    return [weight, *(v.float() for v in inner_of(states))]


@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.parametrize("memory", MEMORY)
def test_states_whose_memory_is_replaced(device, state, memory):
    def replace(value):
        value.data = MEMORY[memory](value)

    found = trained(device, state, None, replace)
    assert launched() == 3
    expected = trained(device, state, False, replace)
    assert relative(found[0], expected[0]) < 2e-4  # 2e-3 with the corrections of other weights
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert relative(a, b) < 2e-2  # some codes differ


@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_states_moved_to_shared_memory(device, state):
    if device.type == "cuda":
        pytest.skip("a GPU's memory is shared as it is")
    param = nn.Parameter(rand(64, 256))
    optimizer = optim.AdamW([param], state=state)
    for step in range(3):
        param.grad = rand(64, 256, seed=step)
        optimizer.step()
        if step == 0:
            for value in optimizer.state[param].values():
                assert value.share_memory_() is value
    assert optimizer.state[param]["step"] == 3 and launched() == 3
    assert all(value.is_shared() for value in inner_of(optimizer.state[param]))


def test_a_state_that_is_another_tensor(device):
    param = nn.Parameter(torch.ones(1024, device=device))
    optimizer = optim.AdamW([param], lr=0.1, state="fp32")
    for replaced in (False, True):
        if replaced:
            optimizer.state[param]["exp_avg"] = torch.zeros(1024, device=device)
        param.grad = torch.ones(1024, device=device)
        optimizer.step()
    assert torch.allclose(optimizer.state[param]["exp_avg"], torch.tensor(0.1))


SAME_MEMORY = {
    "fewer rows": lambda whole: whole[:32],
    "as many elements": lambda whole: whole.view(128, 64),
    "transposed": lambda whole: whole.t(),
}


@pytest.mark.parametrize("made", SAME_MEMORY)
@pytest.mark.parametrize("fused_or_not", [None, False])
def test_data_of_another_shape_in_the_same_memory(device, made, fused_or_not):
    param = nn.Parameter(torch.ones(64, 128, device=device))
    optimizer = optim.AdamW8bit([param], lr=0.1, fused=fused_or_not)
    param.grad = torch.ones_like(param)
    optimizer.step()
    whole = param.data
    before = whole.clone()
    param.grad = None
    param.data = SAME_MEMORY[made](whole)
    param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=r"had the shape \(64, 128\) in earlier steps"):
        optimizer.step()
    assert torch.equal(whole, before) and optimizer.state[param]["step"] == 1


def test_other_strides_in_the_same_memory(device):
    """A gradient of the same shape: PyTorch operations take over."""
    square = nn.Parameter(torch.ones(64, 64, device=device))
    optimizer = optim.AdamW8bit([square], lr=0.1)
    grad = torch.arange(4096.0, device=device).view(64, 64) - 2000.5
    square.grad = grad.clone()
    optimizer.step()
    square.data = square.data.t()
    square.grad = grad.clone()
    optimizer.step()
    assert launched() == 1
    assert torch.equal(square[0, 0] > 1, square[0, 1] > 1) and (square[-1] < 1).all()


@pytest.mark.parametrize("fused_or_not", [None, False])
def test_a_gradient_of_another_shape_is_refused(device, fused_or_not):
    param = nn.Parameter(torch.ones(64, 128, device=device))
    optimizer = optim.AdamW8bit([param], fused=fused_or_not)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = param.detach().clone()
    param.grad.data = torch.ones(32, 128, device=device)
    with pytest.raises(
        RuntimeError, match=r"shape \(64, 128\) has a gradient of shape \(32, 128\)"
    ):
        optimizer.step()
    assert torch.equal(param, before)


def test_tensors_without_memory_of_their_own(device):
    """PyTorch operations update wrappers around other tensors, whether the weight or the gradient is one."""
    ones = functools.partial(torch.ones, 64, 128, device=device)
    results = []
    for fused_or_not in (None, False):
        wrapped, plain = nn.Parameter(TwoTensor(ones(), ones())), nn.Parameter(ones())
        groups = [{"params": [wrapped]}, {"params": [plain]}]
        optimizer = optim.AdamW8bit(groups, lr=0.1, fused=fused_or_not)
        for step in range(3):
            wrapped.grad = TwoTensor(ones(), ones())
            plain.grad = TwoTensor(ones(), ones()) if step == 1 else ones()
            optimizer.step()
        results.append([wrapped.a, wrapped.b, plain])
    assert launched() == 2
    for found, expected in zip(*results, strict=True):
        assert relative(found, expected) < 1e-5 and (found < 0.8).all()
    with pytest.raises(RuntimeError, match=r"fused=True.*it is a TwoTensor"):
        optim.AdamW8bit([wrapped], fused=True).step()


def test_a_gradient_without_memory_is_not_read(device):
    param = nn.Parameter(torch.ones(64, 128, device=device))
    optimizer = optim.AdamW8bit([param], fused=True)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    param.grad = torch.ones_like(param)
    param.grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its gradient has no memory"):
        optimizer.step()


def test_gradients_with_the_sign_turned(device):
    param = nn.Parameter(torch.zeros(64, 128, device=device))
    optimizer = optim.AdamW8bit([param], lr=0.1)
    for _ in range(2):
        param.grad = torch._neg_view(torch.ones(64, 128, device=device))
        optimizer.step()
    assert launched() == 2 and torch.allclose(param, torch.tensor(0.2), atol=0.01)


def test_an_optimizer_is_freed_with_its_states(device):
    param = nn.Parameter(torch.ones(64, 128, device=device))
    others = [nn.Parameter(torch.ones(64, 128, dtype=torch.float64, device=device))]
    optimizer = optim.AdamW8bit([param, *others])
    for _ in range(2):
        for p in (param, *others):
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert isinstance(optimizer._fused, fused.FusedStep)
    gone = [weakref.ref(v) for v in optimizer.state[param].values()]
    gone += [weakref.ref(v) for v in optimizer.state[others[0]].values()]
    gone += [weakref.ref(param), weakref.ref(others[0]), weakref.ref(param.grad)]
    optimizer.state.clear()
    optimizer.param_groups.clear()
    del param, others, p
    assert [ref() for ref in gone] == [None] * len(gone)
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None


def test_autograd_notices_that_weights_have_changed(device):
    weight = nn.Parameter(torch.ones(64, 128, device=device))
    optimizer = optim.AdamW8bit([weight])
    for _ in range(2):
        loss = weight.square().sum()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert launched() == 2


BAD = {
    "weight_decay": (None, TypeError, "weight_decay must be a number, got None"),
    "betas": ((0.5,), ValueError, r"betas must be two numbers in .*got \(0\.5,\)"),
    "eps": ("x", TypeError, "eps must be a number, got 'x'"),
    "lr": (-1.0, ValueError, r"lr must be.*-1\.0"),
    "seed": (None, TypeError, "seed must be an int, got None"),
}


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("fused_or_not", [None, False])
def test_options_that_are_set_wrongly(device, name, fused_or_not):
    params = [nn.Parameter(torch.ones(64, 128, device=device)) for _ in range(2)]
    optimizer = optim.AdamW8bit([{"params": [p]} for p in params], fused=fused_or_not)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    value, error, message = BAD[name]
    good = optimizer.param_groups[1][name]
    for wrong in (value, value):  # the second time, too
        optimizer.param_groups[1][name] = wrong
        with pytest.raises(error, match=message):
            optimizer.step()
    assert all(map(torch.equal, params, before)) and optimizer.state[params[0]]["step"] == 1
    optimizer.param_groups[1][name] = good
    optimizer.step()
    assert optimizer.state[params[0]]["step"] == 2


def test_a_learning_rate_on_the_device_is_not_waited_for(device, monkeypatch):
    def looked_at(tensor):
        raise AssertionError("the host waits for it")

    param = nn.Parameter(torch.ones(64, 128, device=device))
    lr = torch.tensor(0.1, device=device)
    optimizer = optim.AdamW8bit([param], lr=lr)
    for weight_decay in (0.1, 0.2):
        param.grad = torch.ones_like(param)
        optimizer.param_groups[0]["weight_decay"] = weight_decay
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__bool__", looked_at)
            optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    optimizer.param_groups[0]["lr"] = torch.zeros(2, device=device)
    with pytest.raises(ValueError, match=r"lr must be a number or a tensor of one element"):
        optimizer.step()
