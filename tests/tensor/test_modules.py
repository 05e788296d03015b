"""Low-bit tensors as the parameters of modules: moves, state dicts, tying, hooks."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lowbit.tensor import joined
from tests.tensor.cases import (
    each_structure,
    every_case,
    every_frozen_weight,
    every_master,
    every_weight,
    same,
    same_bits,
    values,
)

pytestmark = each_structure


class Tied(nn.Module):
    """An embedding whose table is also the weight of the head."""

    def __init__(self, weight):
        super().__init__()
        self.table = nn.Embedding(*weight.shape)
        self.head = nn.Linear(weight.shape[1], weight.shape[0])
        self.table.weight = self.head.weight = weight

    def forward(self, x):
        return self.head(x)


def module_of(case, seed=0, shape=(24, 100)):
    weight = nn.Parameter(case.make(shape, seed), requires_grad=case.is_trainable)
    module = Tied(weight)
    with torch.no_grad():
        module.head.bias.copy_(values(shape[:1], 7))
    return module


def stored(module):
    return module.head.weight.detach()


@pytest.mark.cover("values")
@every_weight
@pytest.mark.parametrize("swap", [False, True], ids=["default", "swap-tensors"])
def test_module_to_dtype(case, swap):
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module, x = module_of(case), values((5, 100), 1)
        before = stored(module)
        module(x.clone().requires_grad_()).sum().backward()
        module.zero_grad()
        low = module.to(torch.bfloat16)
        assert low is module and module.head.bias.dtype is torch.bfloat16
        assert same(stored(module), before.bfloat16())
        assert module.table.weight is module.head.weight, "tied weights stay tied"
        assert module.head.weight.requires_grad == case.is_trainable
        assert module(x.bfloat16()).dtype is torch.bfloat16
        if not case.is_cast:
            assert same(stored(module.float()), before), "the way there and back loses nothing"
            assert same(stored(module.double()), before.double())
        assert stored(module.half()).dtype is torch.float16
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@every_weight
def test_module_to_device(case):
    module = module_of(case)
    assert stored(module.cpu()).device.type == "cpu"
    module.to("meta")
    assert isinstance(module.head.weight, nn.Parameter) and module.head.weight.is_meta
    assert type(stored(module)) is case.kind
    assert module(torch.empty(5, 100, device="meta")).shape == (5, 24)


@every_weight
def test_module_share_memory_half_of_deepcopy_and_apply(case):
    module = module_of(case)
    twin = copy.deepcopy(module)
    assert twin.table.weight is twin.head.weight is not module.head.weight
    assert same(stored(twin), stored(module))
    x = values((5, 100), 1)
    assert same_bits(twin(x), module(x))
    assert sum(p.numel() for p in module.parameters()) == 24 * 100 + 24
    assert "AffineTensor" not in repr(module), "a module's repr shows no weights"
    assert case.kind.__name__ in repr(next(iter(module.parameters())))


@every_case
def test_state_dict_assigned(case):
    """assign=True replaces any tensor, as after loading a checkpoint into a model on meta."""
    state = {"weight": case.make((24, 100))}
    for device in ("cpu", "meta"):
        linear = nn.Linear(100, 24, bias=False, device=device)
        assert linear.load_state_dict(state, assign=True).missing_keys == []
        found = linear.weight
        assert isinstance(found, nn.Parameter) and same(found.detach(), state["weight"])
        if case.is_weight:
            assert found.requires_grad == case.is_trainable


@every_weight
def test_state_dict_assigned_keeps_a_frozen_parameter_frozen(case):
    linear = nn.Linear(100, 24, bias=False).requires_grad_(False)
    linear.load_state_dict({"weight": case.make((24, 100))}, assign=True)
    assert not linear.weight.requires_grad


@every_weight
def test_state_dict_copied_into_its_own_kind(case):
    module, other = module_of(case), module_of(case, seed=1)
    parameter, pointers = module.head.weight, pointers_of(module)
    module.load_state_dict(other.state_dict())
    assert module.head.weight is parameter and pointers_of(module) == pointers, "in place"
    assert same(stored(module), stored(other)) and not torch.equal(
        stored(module), case.make((24, 100))
    )
    state = io.BytesIO()
    torch.save(other.state_dict(), state)
    state.seek(0)
    module = module_of(case)
    module.load_state_dict(torch.load(state, weights_only=True))
    assert same(stored(module), stored(other))


def pointers_of(module):
    return [part.data_ptr() for part in module.head.weight.inner_tensors().values()]


@every_weight
def test_state_dict_of_plain_values_is_encoded(case):
    module = module_of(case)
    plain = nn.Linear(100, 24)
    module.head.load_state_dict(plain.state_dict())
    assert same(stored(module), case.encode(plain.weight.detach()))


@every_weight
def test_state_dict_copied_into_a_plain_module(case):
    """Dequantized values; for QAT the high-precision weight, which loses nothing."""
    module, plain = module_of(case), nn.Linear(100, 24)
    plain.load_state_dict(joined(module.head.state_dict()))
    assert type(plain.weight.detach()) is torch.Tensor
    assert same_bits(plain.weight.detach(), case.values_of(stored(module)))
    x = values((5, 100), 1)
    if case.activation is None and not case.is_trainable:
        assert same_bits(plain(x), module(x))


@every_weight
def test_state_dict_of_another_kind_is_refused_with_the_way_out(case):
    module = module_of(case)
    for other in [] if case.has_master else case.others:
        with pytest.raises(RuntimeError, match=r"stored differently.*assign=True"):
            module.load_state_dict(module_of(other).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.head.load_state_dict(module_of(case, shape=(24, 101)).head.state_dict())
    assert same(stored(module), case.make((24, 100)))


@every_case
def test_as_a_buffer(case):
    module = nn.Module()
    module.register_buffer("state", case.make((24, 100)))
    assert same(module.state_dict()["state"], case.make((24, 100)))
    twin = copy.deepcopy(module)
    twin.load_state_dict({"state": case.make((24, 100), seed=1)})
    assert same(twin.state, case.make((24, 100), seed=1))
    assert same(module.bfloat16().state, case.make((24, 100)).bfloat16())


@every_frozen_weight
def test_an_adapter_over_a_frozen_weight_trains(case):
    """LoRA: gradients pass through the frozen weight to earlier layers."""
    base = nn.Linear(100, 24, bias=False)
    base.weight = nn.Parameter(case.make((24, 100)))
    down, up = nn.Linear(100, 4, bias=False), nn.Linear(4, 100, bias=False)
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters()], lr=0.01)
    x, target = values((32, 100), 1), values((32, 24), 2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(base(x + up(down(x))), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert same(base.weight.detach(), case.make((24, 100)))


@every_master
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
def test_torch_optimizers_update_the_master(case, optimizer):
    """A QAT weight steps exactly as its high-precision weight would with the same gradient."""
    weight = nn.Parameter(case.make((24, 100)))
    plain = nn.Parameter(weight.master().clone())
    make = getattr(torch.optim, optimizer)
    steppers = [make([p], lr=0.1, weight_decay=0.1) for p in (weight, plain)]
    for step in range(3):
        F.linear(values((8, 100), step), weight).square().sum().backward()
        plain.grad = weight.grad.clone()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        torch.nn.utils.clip_grad_norm_([plain], 1.0)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        assert same_bits(weight.master(), plain.detach())
    assert type(weight.detach()) is case.kind


@every_master
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_steps_that_take_all_tensors_at_once_are_right_or_refused_by_name(case, how):
    weight = nn.Parameter(case.make((24, 100)))
    plain = nn.Parameter(weight.master().clone())
    weight.grad = plain.grad = values((24, 100), 1)
    torch.optim.AdamW([plain]).step()
    try:
        torch.optim.AdamW([weight], **{how: True}).step()
    except NotImplementedError as error:
        assert re.search(rf"FakeQuantizedTensor.*aten\._(foreach|{how}).*dequantize", str(error))
        return
    assert torch.allclose(weight.master(), plain.detach(), atol=1e-6)


@every_master
def test_initialisers_reach_the_master(case):
    weight = nn.Parameter(case.make((24, 100)))
    for init in (
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.zeros_,
        nn.init.trunc_normal_,
    ):
        plain = nn.Parameter(torch.empty(24, 100))
        torch.manual_seed(3)
        init(plain)
        torch.manual_seed(3)
        assert init(weight) is weight
        assert same_bits(weight.master(), plain.detach())
    assert torch.equal(weight.detach().master().norm(), weight.norm())
