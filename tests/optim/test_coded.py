"""The step that updates codes in place gives the bits of the step with a buffer of float32 values."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from lowbit import Int4Weight, Int8Weight, optim
from lowbit.optim.step import coded
from lowbit.tensor.trained.trainable import TrainableTensor
from lowbit.train import prepare_
from tests.kernels.compiled_on_cpu import COMPILER
from tests.optim.counted import LAUNCHES
from tests.optim.problems import rand
from tests.optim.test_fused import decoded, set_grads

SCHEMES = {"int8": Int8Weight(), "g64": Int4Weight(64), "g24": Int4Weight(24), "g8": Int4Weight(8)}
# Widths that are multiples of 256 or not, rows of several widths and of experts. More rows than blocks, one row.
SHAPES = {
    "int8": [(7, 512), (3, 5, 1024), (4, 520), (1, 1288)],
    "g64": [(7, 512), (3, 5, 1024), (4, 576)],
    "g24": [(7, 528)],
    "g8": [(1, 520), (9, 1032)],
}
SIZES = (0.1, 1.0, 1e-25, 1e25)


EMULATED = pytest.param("emulated", marks=pytest.mark.skipif(not COMPILER, reason="no g++"))
pytestmark = pytest.mark.parametrize(
    "device", [EMULATED, pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def weights(kind, device, shapes=None):
    scheme = SCHEMES[kind]
    kinds = zip(shapes or SHAPES[kind], SIZES, strict=False)
    values = [rand(*shape, seed=i) * size for i, (shape, size) in enumerate(kinds)]
    made = (TrainableTensor.of(scheme).prepared(v, scheme, f"{i}") for i, v in enumerate(values))
    return [nn.Parameter(weight.to(device)) for weight in made]


def inner(params):
    return [t.clone() for p in params for t in p.detach().inner_tensors().values()]


def contents(params, optimizer):
    """Of weights and states, NaN as a number that nothing else has."""
    states = [torch.as_tensor(decoded(v)) for p in params for v in optimizer.state[p].values()]
    return [t.nan_to_num(1.25e33) if t.is_floating_point() else t for t in inner(params) + states]


def both(monkeypatch, run):
    """What `run` returns with the step under test and with a buffer, and the kinds of launches of each."""
    found = []
    for taken in (True, False):
        monkeypatch.setattr(coded, "runs_on_hopper", lambda device, taken=taken: taken)
        LAUNCHES.clear()
        found.append((run(), Counter(variant.code_bits for variant in LAUNCHES)))
    return found


def check_equal(a, b):
    assert len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", ["4bit", "8bit", "float8", "fp32", "bf16"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("correction", [None, "momentum"])
def test_the_same_bits(device, correction, kind, state, monkeypatch):
    """With a row of NaN from the second step on, and gradients in bfloat16."""

    def run():
        params = weights(kind, device)
        optimizer = optim.AdamW(
            params, lr=1e-2, state=state, fused=True, weight_correction=correction
        )
        for step in range(3):
            set_grads(params, step)
            if step == 1:
                params[0].grad[-1, 100] = torch.nan
            optimizer.step()
        return contents(params, optimizer)

    (codes, ran), (buffer, others) = both(monkeypatch, run)
    check_equal(codes, buffer)
    bits = 8 if kind == "int8" else 4
    assert ran[bits] and not ran[0] and others[0] and not others[bits]


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    "name,options",
    [
        *(("SGD", {}), ("Lion8bit", {}), ("AdEMAMix", {})),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_correction": "momentum"}),
        ("Adam8bit", {"amsgrad": True, "weight_decay": 0.1, "weight_correction": "momentum"}),
        ("AdEMAMix8bit", {"weight_correction": "momentum"}),
    ],
)
def test_other_algorithms(device, name, options, monkeypatch):
    def run():
        params = weights("int8", device, [(5, 520)])
        optimizer = getattr(optim, name)(params, lr=1e-2, max_grad_norm=0.5, **options)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
        return contents(params, optimizer)

    (codes, ran), (buffer, _) = both(monkeypatch, run)
    check_equal(codes, buffer)
    assert ran == {8: 2}


@pytest.mark.parametrize("correction", [None, "momentum"])
def test_rows_of_zeros_and_rates_of_zero(device, correction, monkeypatch):
    """A row of zeros has the scale 1, and one that does not change keeps its scale to the bit."""

    def run():
        params = weights("int8", device, [(4, 512)])
        params[0].detach().codes[1] = 0
        params[0].detach().codes[2].clamp_(-99, 99)
        optimizer = optim.AdamW8bit(params, lr=0.0, weight_correction=correction)
        set_grads(params, 0)
        optimizer.step()
        return inner(params)

    (codes, ran), (buffer, _) = both(monkeypatch, run)
    check_equal(codes, buffer)
    assert ran[8] and codes[1][1] == 1


@pytest.mark.parametrize("correction", [None, "momentum"])
def test_a_skipped_step_changes_nothing(device, correction):
    params = weights("g8", device)
    optimizer = optim.AdamW8bit(params, skip_nonfinite=True, weight_correction=correction)
    set_grads(params, 0)
    optimizer.step()
    before = contents(params, optimizer)
    set_grads(params, 1)
    params[1].grad[3, 4] = torch.inf
    optimizer.step()
    check_equal(before, contents(params, optimizer))
    assert {variant.code_bits for variant in LAUNCHES} == {4}


def test_weights_that_take_the_buffer(device):
    """Narrow rows, groups that do not fill rows, averages."""
    narrow, odd = weights("int8", device, [(9, 96), (4, 513)])
    (padded,) = weights("g64", device, [(4, 516)])
    (averaged,) = weights("int8", device, [(4, 512)])
    with torch.no_grad():
        averaged.copy_(averaged * 0.999 + 1e-5)
    params = [narrow, odd, padded, averaged]
    for param in params:
        assert coded.bits_for(param.detach(), []) == 0
    (taken,) = weights("int8", device, [(4, 512)])
    assert coded.bits_for(taken.detach(), []) == 8
    optimizer = optim.AdamW8bit([*params, taken])
    set_grads([*params, taken], 0)
    optimizer.step()
    assert {variant.code_bits for variant in LAUNCHES} == {0, 8}


def test_an_average_begins_between_two_steps(device):
    """The launch looks whether a weight has a remainder by now."""
    params = weights("int8", device, [(4, 512)])
    optimizer = optim.AdamW8bit(params, lr=1e-2)
    for step, bits in enumerate((8, 0)):
        LAUNCHES.clear()
        if step == 1:
            with torch.no_grad():
                params[0].copy_(params[0] * 0.999 + 1e-5)
        set_grads(params, step)
        optimizer.step()
        assert {variant.code_bits for variant in LAUNCHES} == {bits}


@pytest.mark.parametrize("products", [False, True])
def test_a_backward_that_kept_the_codes_is_refused(device, products):
    """As after any update in place: it would read other codes than its forward pass."""
    model = nn.Sequential(nn.Linear(512, 64, bias=False)).to(device)
    prepare_(model, Int8Weight(products, products, products, always=products))
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    loss = model(torch.randn(16, 512, device=device, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert {variant.code_bits for variant in LAUNCHES} == {8}
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loading_into_an_optimizer_that_has_stepped(device):
    """It takes the states, the options and the tensor of the learning rate of the checkpoint."""
    params, others, lr = weights("int8", device), weights("int8", device), torch.tensor(3e-2)
    optimizer = optim.AdamW8bit(params, lr=lr.to(device), betas=(0.5, 0.6), weight_decay=0.5)
    other = optim.AdamW8bit(others, lr=1e-3)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
        set_grads(others, step + 5)
        other.step()
    with torch.no_grad():
        for param, value in zip(others, params, strict=True):
            param.copy_(value)
    other.load_state_dict(optimizer.state_dict())
    for step in (2, 3):
        for each, own in ((optimizer, params), (other, others)):
            set_grads(own, step)
            each.step()
    check_equal(contents(params, optimizer), contents(others, other))
    assert {variant.code_bits for variant in LAUNCHES} == {8}


def test_memory_that_moved(device, monkeypatch):
    def run():
        params = weights("int8", device, [(4, 512)])
        optimizer = optim.AdamW8bit(params, lr=1e-2)
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
            params[0].codes = params[0].detach().codes.clone()
        return inner(params)

    (codes, ran), (buffer, _) = both(monkeypatch, run)
    check_equal(codes, buffer)
    assert ran == {8: 2}
