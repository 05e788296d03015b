"""The compiled step of int8 weights against the step in PyTorch operations: the same random bits, so the same codes
except where the float32 values differ by rounding. `test_coded` compares the step without a buffer with that of one."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from lowbit import Int8Weight, Int8WeightTensor, optim
from lowbit.optim.step import coded, job
from tests.optim.counted import LAUNCHES, launched
from tests.optim.problems import FORMATS, rand
from tests.optim.test_fused import check_alike, decoded, set_grads

# odd rows, rows shorter than a block, experts with several rows in a block, a small one with float32 states, an empty
# one
SHAPES = [(33, 300), (70, 512), (3, 40, 40), (5, 16, 300), (128, 64), (9, 31), (1, 4096), (0, 64)]


def weights(device, shapes=SHAPES, dtype=torch.float32):
    return [
        nn.Parameter(
            Int8WeightTensor(rand(*s, seed=i, dtype=dtype), Int8Weight(), f"{i}").to(device)
        )
        for i, s in enumerate(shapes)
    ]


def pair(device, make, **kind):
    """(weights, optimizer) with the kernel, and without it."""
    made = []
    for fused in (True, False):
        params = weights(device, **kind)
        made.append((params, make(params, fused=fused)))
    return made


def step_all(made, steps, scale=1.0):
    for params, optimizer in made:
        for step in range(steps):
            set_grads(params, step, scale)
            optimizer.step()


def inner(params):
    return [{n: t.clone() for n, t in p.detach().inner_tensors().items()} for p in params]


def same(a, b):
    return all(torch.equal(x[n], y[n]) for x, y in zip(a, b, strict=True) for n in x)


def check_codes(made, differ=1e-3):
    """Rows whose largest value differs may have another last bit of their scale."""
    for p, q in zip(inner(made[0][0]), inner(made[1][0]), strict=True):
        assert torch.equal(p["place"], q["place"])
        if p["codes"].numel():
            assert (p["codes"] != q["codes"]).sum() <= max(2, differ * p["codes"].numel())
            torch.testing.assert_close(p["scale"], q["scale"], rtol=1e-5, atol=0)


def masters(made):
    """As plain parameters with the states, for `check_alike`."""
    plain = []
    for params, optimizer in made:
        values = [p.detach().master() for p in params]
        for p, v in zip(params, values, strict=True):
            optimizer.state[v] = optimizer.state[p]
        plain.append((values, optimizer))
    return plain


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", FORMATS)
def test_as_the_step_in_pytorch(device, state, monkeypatch):
    """Most pieces hold several parameters, and some parameters take several pieces."""
    monkeypatch.setattr(coded, "runs_on_hopper", lambda device: False)
    monkeypatch.setattr(job, "PIECE_CPU", 7000)
    monkeypatch.setattr(job, "PIECE_OTHER", 7000)
    made = pair(device, functools.partial(optim.AdamW, state=state, lr=1e-2))
    step_all(made, 2)
    check_codes(made)
    # where sums differ in their last bit, a 4-bit code may be the neighbouring one
    bound = {"fp32": 1e-6, "bf16": 1e-3, "4bit": 5e-3}.get(state, 2e-3)
    check_alike(masters(made), 1e-3, bound)
    if state == "8bit":
        large, small = sorted(made[0][1]._fused.launches, key=lambda x: -len(x.indices))
        owners = [piece.owner for piece in large.pieces]
        assert [owners.count(i) for i in range(len(large.indices))] == [2, 6, 1, 4, 2, 1]
        assert len(large.passes) < len(large.pieces)  # small ones share a pass
        assert large.size <= 7008 and len(small.passes) == 1
        assert launched() == 2 * (len(large.passes) + 1)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("name", ["Lion8bit", "SGD", "AdEMAMix"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_other_algorithms_and_dtypes(device, name, dtype):
    options = (
        {"weight_correction": "8bit"} if name == "Lion8bit" else {"bf16_stochastic_round": True}
    )
    shapes = [(33, 300), (64, 256)]
    make = functools.partial(getattr(optim, name), lr=1e-3, **options)
    made = pair(device, make, dtype=dtype, shapes=shapes)
    step_all(made, 2)
    assert launched()
    check_codes(made, 2e-3)
    assert all(p.dtype is dtype for p in made[0][0])


@pytest.mark.cover("values")
@pytest.mark.parametrize("state", ["8bit", "bf16"])
def test_how_a_step_is_cut_changes_no_bit(device, state, monkeypatch):
    monkeypatch.setattr(coded, "runs_on_hopper", lambda device: False)
    found = []
    for piece in (2**20, 7000, 700):
        monkeypatch.setattr(job, "PIECE_CPU", piece)
        monkeypatch.setattr(job, "PIECE_OTHER", piece)
        params = weights(device, [(15, 300), (3, 40, 40), (5, 4, 300), (9, 31), (1, 4096)])
        optimizer = optim.AdamW(params, lr=1e-2, state=state, fused=True)
        step_all([(params, optimizer)], 2)
        states = [optimizer.state[p] for p in params]
        assert all(s["step"] == 2 for s in states)
        found.append((inner(params), [{k: decoded(v) for k, v in s.items()} for s in states]))
    for other in found[1:]:
        assert all(same(a, b) for a, b in zip(found[0], other, strict=True))


def test_beside_plain_weights_in_one_group(device):
    params = [*weights(device, [(64, 256)]), nn.Parameter(rand(64, 256).to(device))]
    twins = [*weights(device, [(64, 256)]), nn.Parameter(rand(64, 256).to(device))]
    made = [(params, optim.AdamW8bit(params)), (twins, optim.AdamW8bit(twins, fused=False))]
    step_all(made, 3)
    assert launched() == 6
    check_codes([(ps[:1], o) for ps, o in made])
    assert (params[1] - twins[1]).norm() < 1e-5 * twins[1].norm()


def test_gradients_that_are_not_contiguous_or_scaled(device, monkeypatch):
    monkeypatch.setattr(job, "PIECE_CPU", 5000)
    monkeypatch.setattr(job, "PIECE_OTHER", 5000)
    make = functools.partial(optim.AdamW8bit, lr=1e-2, max_grad_norm=0.5)
    made = pair(device, make, shapes=[(48, 320)])
    for params, optimizer in made:
        for step in range(2):
            params[0].grad = rand(320, 48, seed=step).to(device).t()
            optimizer.step()
    check_codes(made)
    assert launched() >= 8


def test_a_skipped_step_changes_nothing(device, monkeypatch):
    """Not even the random bits of the next step. The host must not ask the device whether to skip."""
    monkeypatch.setattr(job, "PIECE_CPU", 5000)
    monkeypatch.setattr(job, "PIECE_OTHER", 5000)
    make = functools.partial(optim.AdamW8bit, lr=1e-2, skip_nonfinite=True)
    made = pair(device, make, shapes=[(33, 300), (64, 256)])
    step_all(made, 1)
    for params, optimizer in made:
        # rows without a code of 127: rounding again would change their scale
        params[0].detach().codes[::2].clamp_(-99, 99)
        before = inner(params)
        states = [{k: decoded(v).clone() for k, v in optimizer.state[p].items()} for p in params]
        set_grads(params, 1)
        params[1].grad[3, 4] = float("nan")
        if optimizer is made[0][1]:
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "__bool__", lambda t: 1 / 0)
                optimizer.step()
        else:
            optimizer.step()
        assert same(before, inner(params))
        for p, state in zip(params, states, strict=True):
            assert all(torch.equal(decoded(optimizer.state[p][k]), v) for k, v in state.items())
        set_grads(params, 2)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2
    check_codes(made)


@pytest.mark.parametrize("piece", [2**20, 7000])
def test_a_step_of_an_average_reads_and_ends_its_remainder(device, piece, monkeypatch):
    """The values that the step rounds have the remainder, also where rows are updated a few at a time."""
    monkeypatch.setattr(job, "PIECE_CPU", piece)
    monkeypatch.setattr(job, "PIECE_OTHER", piece)
    (weight,) = weights(device, [(33, 300)])
    with torch.no_grad():
        weight.copy_(weight * 0.999 + 1e-5)
    exact = weight.detach().master()
    assert not torch.equal(exact, weight.detach().dequantize())
    read = []
    update = Int8WeightTensor.update_
    monkeypatch.setattr(
        Int8WeightTensor, "update_", lambda w, x: (read.append(x.clone()), update(w, x))
    )
    optimizer = optim.SGD([weight], lr=0.0, fused=True)
    set_grads([weight], 0)
    optimizer.step()
    assert len(read) == (2 if piece == 7000 else 1)
    assert torch.equal(torch.cat(read), exact)
    assert torch.equal(weight.detach().master(), weight.detach().dequantize())


@pytest.mark.parametrize("piece", [2**20, 7000])
def test_a_skipped_step_keeps_what_an_average_lost(device, piece, monkeypatch):
    """The remainder of an int8 weight that is an average of others; a step that is not skipped ends it."""
    monkeypatch.setattr(job, "PIECE_CPU", piece)
    monkeypatch.setattr(job, "PIECE_OTHER", piece)
    (weight,) = weights(device, [(33, 300)])
    optimizer = optim.AdamW8bit([weight], lr=1e-2, skip_nonfinite=True)
    set_grads([weight], 0)
    optimizer.step()
    with torch.no_grad():
        weight.copy_(weight * 0.999 + 1e-5)
    exact = weight.detach().master()
    assert not torch.equal(exact, weight.detach().dequantize())
    for step, value in ((1, torch.nan), (2, 1.0)):
        set_grads([weight], step)
        weight.grad[3, 4] = value
        optimizer.step()
        assert torch.equal(weight.detach().master(), exact) == (step == 1)
    torch.testing.assert_close(
        weight.detach().master(), weight.detach().dequantize(), rtol=0, atol=0
    )


def test_weights_are_looked_up_in_each_step(device):
    """Their memory may have moved by then."""
    made = pair(device, optim.AdamW8bit, shapes=[(33, 300), (64, 256)])
    for params, optimizer in made:
        set_grads(params, 0)
        optimizer.step()
        for p in params:
            own = p.detach()
            p.codes = own.codes.clone()
        set_grads(params, 1)
        optimizer.step()
    check_codes(made)


def test_a_gradient_that_is_not_finite_shows_in_its_row(device):
    (weight,) = weights(device, [(4, 1024)])
    optimizer = optim.AdamW8bit([weight], fused=True)
    set_grads([weight], 0)
    weight.grad[1, 300] = float("inf")
    optimizer.step()
    assert weight.detach().scale.isnan().flatten().tolist() == [False, True, False, False]


def test_resumed_bit_for_bit(device):
    params = weights(device)
    optimizer = optim.AdamW8bit(params, lr=1e-2)
    step_all([(params, optimizer)], 2)
    kept, saved = inner(params), optimizer.state_dict()
    again = weights(device)
    other = optim.AdamW8bit(again, lr=1e-2)
    other.load_state_dict(saved)
    for p, tensors in zip(again, kept, strict=True):
        for name, t in tensors.items():
            getattr(p.detach(), name).copy_(t)
    step_all([(params, optimizer), (again, other)], 1)
    assert same(inner(params), inner(again)) and LAUNCHES


# ---- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_in_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(job, "PIECE_OTHER", 20_000)
    results = []
    for captured in (True, False):
        params = weights("cuda", [(64, 512), (33, 300), (9, 31)], torch.bfloat16)
        optimizer = optim.AdamW8bit(params, lr=torch.tensor(1e-2, device="cuda"), fused=True)
        set_grads(params, 0)
        grads = [p.grad for p in params]
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                optimizer.step()
        for step in range(1, 5):
            for i, g in enumerate(grads):
                g.copy_(rand(*g.shape, seed=1000 * step + i))
            graph.replay() if captured and step != 3 else optimizer.step()
        results.append(inner(params))
    assert same(*results)


@pytest.mark.gpu
def test_no_memory_but_the_shared_one_and_no_synchronisation():
    params = weights("cuda", [(2048, 4096)] * 4 + [(16384, 4096)], torch.bfloat16)
    optimizer = optim.AdamW8bit(params, skip_nonfinite=False, fused=True)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() == before
    # float32 values of a pass, and the codes that they become
    assert torch.cuda.max_memory_allocated() - before < 4 * 2**24 + 2**24 + 2**20


@pytest.mark.gpu
def test_no_synchronisation_where_a_step_may_be_skipped():
    params = weights("cuda", [(64, 512), (33, 300)], torch.bfloat16)
    optimizer = optim.AdamW8bit(params, skip_nonfinite=True, max_grad_norm=1.0, fused=True)
    for step in range(3):
        set_grads(params, step)
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_handful_of_launches_a_weight():
    params = weights("cuda", [(512, 512)] * 20, torch.bfloat16)
    optimizer = optim.AdamW8bit(params, fused=True)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    launches = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(launches) < 8 * 20
