"""Models moved or converted after a step: the optimizer allows it, and reads the new tensors."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lowbit import optim
from lowbit.optim import CPUOffloadOptimizer
from lowbit.tensor.core.base import LowbitTensor
from tests.optim.problems import relative
from tests.train.problems import PREPARE

CLASSES = {
    "AdamW8bit": (optim.AdamW8bit, {}),
    "AdamW4bit amsgrad": (optim.AdamW4bit, {"amsgrad": True}),
    "AdamWFp8 clipped": (optim.AdamWFp8, {"max_grad_norm": 1.0}),
    "Adam8bit": (optim.Adam8bit, {}),
    "SGD8bit": (optim.SGD8bit, {"momentum": 0.9}),
    "SGD": (optim.SGD, {}),
    "Lion8bit": (optim.Lion8bit, {}),
    "AdEMAMix8bit": (optim.AdEMAMix8bit, {}),
    "Muon8bit": (optim.Muon8bit, {}),
}
every_class = pytest.mark.parametrize("cls,options", CLASSES.values(), ids=CLASSES)
PREPARED = {**PREPARE, "plain": lambda m: None}
MOVES = {
    "bf16": lambda m: m.to(torch.bfloat16),
    "double and back": lambda m: m.double().float(),
    "half and back": lambda m: m.half().float(),
    "other memory": lambda m: m.load_state_dict(moved_to_empty(m)),
    "nowhere": lambda m: m.to("cpu"),
}


def moved_to_empty(model):
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    return kept


def prepared(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 96))
    PREPARED[how](model)
    return model


def step(model, optimizer, seed, device="cpu"):
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def values(model):
    """The tensors that an optimizer updates."""
    held = (p.master() if isinstance(p, LowbitTensor) else p for p in model.parameters())
    return [p.detach().clone() for p in held]


@pytest.mark.cover("values")
@every_class
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
@pytest.mark.parametrize("how", PREPARED)
def test_a_model_is_converted_after_a_step(cls, options, fused, how):
    model = prepared(how)
    optimizer = cls(model.parameters(), lr=1e-2, fused=fused, **options)
    for seed, move in enumerate(MOVES.values()):
        step(model, optimizer, seed)
        move(model)
        before = values(model)
        step(model, optimizer, 10 + seed)
        for old, new in zip(before, values(model), strict=True):
            assert new.isfinite().all() and not torch.equal(old, new), "it trains the moved weight"


@pytest.mark.parametrize("how", PREPARED)
def test_a_conversion_there_and_back_changes_no_bit_of_training(how):
    """float32 to float64 and back keeps every weight: so does the run."""
    results = []
    for moved in (False, True):
        model = prepared(how)
        optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
        step(model, optimizer, 0)
        if moved:
            model.double().float()
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        results.append(values(model))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_weight_in_old_memory_of_another_dtype():
    """The same object at the same address, now bfloat16: the float32 launch must not touch it."""
    memory = torch.zeros(64, 256)
    param = nn.Parameter(memory)
    optimizer = optim.AdamW([param], lr=1e-2)
    param.grad = torch.ones(64, 256)
    optimizer.step()
    param.grad = None
    param.data = memory.view(-1).view(torch.bfloat16)[: 64 * 256].view(64, 256).fill_(1.0)
    assert param.data_ptr() == memory.data_ptr()
    param.grad_dtype = None
    param.grad = torch.ones(64, 256)
    optimizer.step()
    assert ((param > 0.98) & (param < 1.0)).all()


def test_gradients_are_moved_along():
    """Between backward and step, as `Module._apply` moves them too."""
    model = prepared("int8 products")
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    step(model, optimizer, 0)
    x = torch.randn(16, 128)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    model.to(torch.bfloat16)
    before = values(model)
    optimizer.step()
    assert not torch.equal(values(model)[0], before[0])


@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
def test_a_float32_weight_behind_bfloat16_products_needs_no_correction(fused):
    """A converted weight is float32 inside, and is updated in float32 beside bfloat16 ones."""
    model = prepared("QAT").to(torch.bfloat16)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, weight_correction="8bit", fused=fused)
    before = values(model)
    for seed in range(2):
        step(model, optimizer, seed)
    for old, new, p in zip(before, values(model), model.parameters(), strict=True):
        assert new.isfinite().all() and not torch.equal(old, new)
        assert ("weight_correction" in optimizer.state[p]) == (new.dtype == torch.bfloat16)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
def test_sharded_weights_are_moved_after_a_step(mesh, fused, offload):
    """torch swaps DTensors, and sets .data of plain weights."""
    model = nn.Linear(128, 64, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    if offload:
        optimizer = CPUOffloadOptimizer(model.parameters(), optim.AdamW8bit, lr=1e-2, fused=fused)
    else:
        optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2, fused=fused)
    for _ in range(2):
        model.weight.grad = distribute_tensor(torch.ones(64, 128), mesh, [Shard(0)])
        optimizer.step()
        before = model.weight.full_tensor().clone()
        if offload:
            model.to("cpu")
        else:
            model.double().float()
        assert isinstance(model.weight, DTensor)
        model.weight.grad = distribute_tensor(torch.ones(64, 128), mesh, [Shard(0)])
        optimizer.step()
        assert (model.weight.full_tensor() < before).all()


def test_offloaded_plain_weights_may_be_swapped():
    """With torch.__future__.set_swap_module_params_on_conversion."""
    model = nn.Linear(128, 64)
    optimizer = CPUOffloadOptimizer(model.parameters(), optim.AdamW8bit, lr=1e-2)
    step(model, optimizer, 0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.share_memory()
        model.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    step(model, optimizer, 1)
    assert all(((p != 1.0) & (p > 0.98) & (p < 1.02)).all() for p in model.parameters())


def test_a_new_gradient_at_an_old_address_is_copied_again():
    """A freed gradient may be followed by one with the same address, version and id."""
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = CPUOffloadOptimizer([param], torch.optim.SGD, lr=1.0)
    for value in (1.0, 2.0, 3.0):
        (param * value).sum().backward()
        before = param.detach().clone()
        optimizer.step()
        assert torch.equal(before - param, torch.full((64, 64), value))
        optimizer.zero_grad()
        gc.collect()


@pytest.mark.cover("pairs")
@pytest.mark.gpu
@every_class
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "eager"])
@pytest.mark.parametrize("how", PREPARED)
def test_a_model_goes_to_a_gpu_and_back_after_a_step(cls, options, fused, how):
    """The states follow the parameter at the next step."""
    model = prepared(how)
    optimizer = cls(model.parameters(), lr=1e-2, fused=fused, **options)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        model.to(device)
        before = values(model)
        for seed in range(2):
            step(model, optimizer, seed, device)
        for old, new, p in zip(before, values(model), model.parameters(), strict=True):
            assert new.isfinite().all() and not torch.equal(old, new)
            for state in optimizer.state[p].values():
                assert state.device.type == device
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_training_goes_on_on_a_gpu_as_it_would_have_on_the_cpu():
    moved, stays = prepared("plain"), prepared("plain")
    optimizers = [optim.AdamW(m.parameters(), lr=1e-2, state="fp32") for m in (moved, stays)]
    for i in range(4):
        if i == 2:
            moved.to("cuda")
        step(moved, optimizers[0], i, "cuda" if i >= 2 else "cpu")
        step(stays, optimizers[1], i)
    for a, b in zip(moved.parameters(), stays.parameters(), strict=True):
        assert relative(a.cpu(), b) < 1e-5
