"""Every state format against float32 states: error, convergence, bytes, shapes and dtypes of parameters."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lowbit import optim
from lowbit.schemes.presets import Int4WeightOnly
from lowbit.tensor import CodebookTensor, FakeQuantizedTensor
from lowbit.tensor.frozen.codebook_tensor import FORMATS as BLOCKWISE
from tests.optim.problems import FORMATS, LOW, parameters, rand, relative, run, set_grads

low = pytest.mark.parametrize("state", LOW)
every = pytest.mark.parametrize("state", FORMATS)
algorithms = pytest.mark.parametrize("cls", [optim.AdamW, optim.Adam], ids=lambda c: c.__name__)
# relative error of the change in 30 steps with independent gradients: measured 0.25, 0.011, 0.033 and 0.002
BOUND = {"4bit": 0.3, "8bit": 0.02, "float8": 0.05, "bf16": 0.005}


def change(cls, state, grads, *, eps=1e-30, **options):
    """The change of a parameter that starts at zero."""
    p = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = cls([p], lr=1e-3, eps=eps, state=state, **options)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return p.detach()


def gradients(steps=30, scale=1.0, spread=0.0):
    """Gradients with a mean, of magnitudes that differ between elements by exp(spread * normal)."""
    magnitude = scale * (spread * rand(16, 512, seed=99)).exp()
    return [(rand(16, 512, seed=i) + 0.5) * magnitude for i in range(steps)]


@pytest.mark.usefixtures("operations")
@low
@algorithms
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_error_against_float32_states(cls, state, amsgrad):
    grads = gradients()
    full = change(cls, "fp32", grads, amsgrad=amsgrad)
    assert relative(change(cls, state, grads, amsgrad=amsgrad), full) < BOUND[state]


@pytest.mark.usefixtures("operations")
@low
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1e4, 1e10])
def test_the_error_does_not_depend_on_the_scale_of_gradients(state, scale):
    grads = gradients(scale=scale)
    assert (
        relative(change(optim.AdamW, state, grads), change(optim.AdamW, "fp32", grads))
        < BOUND[state]
    )


@pytest.mark.usefixtures("operations")
@low
@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_updates_stay_bounded_where_gradients_of_a_block_differ(state, spread):
    """A second moment rounded to zero would make updates thousands of times too large."""
    grads = gradients(spread=spread)
    found = change(optim.AdamW, state, grads).abs().max()
    if state == "4bit":  # what moments can do at most that are exact
        assert found <= sum(largest_update(step) for step in range(1, len(grads) + 1))
    else:
        assert found < 2 * change(optim.AdamW, "fp32", grads).abs().max()


def largest_update(step, lr=1e-3, beta1=0.9, beta2=0.999):
    """The largest change of a weight in a step of Adam with exact moments: the Cauchy-Schwarz inequality."""
    terms = [(beta1**2 / beta2) ** k for k in range(10_000)]
    ratio = (1 - beta1) * math.sqrt(sum(terms) / (1 - beta2))
    return 1.001 * lr * ratio * math.sqrt(1 - beta2**step) / (1 - beta1**step)


kernel_or_not = pytest.mark.parametrize("fused", [None, False], ids=["kernel", "eager"])


@kernel_or_not
@pytest.mark.parametrize("cls", [optim.AdamW4bit, optim.AdEMAMix4bit], ids=lambda c: c.__name__)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)], ids=str)
def test_no_update_is_larger_than_exact_moments_allow(betas, cls, fused):
    """Small first moments that are rounded up. A NaN stays visible."""
    p = nn.Parameter(torch.zeros(64, 512))
    slow = {"alpha": 0.0} if cls is optim.AdEMAMix4bit else {}  # a slow moment has no bound
    betas = (*betas, 0.9999) if slow else betas
    optimizer = cls([p], lr=1e-3, betas=betas, weight_decay=0.0, fused=fused, **slow)
    scales = 10.0 ** -(4 * torch.rand(64, 512))
    for step in range(1, 20):
        before = p.detach().clone()
        p.grad = rand(64, 512, seed=step) * scales
        optimizer.step()
        assert (p - before).abs().max() <= largest_update(step, 1e-3, *betas[:2])
    p.grad[3, 5] = math.nan
    optimizer.step()
    assert p[3, 5].isnan() and p[0].isfinite().all()


@kernel_or_not
def test_float32_states_follow_torch_when_betas_change(fused):
    """Then moments may differ more than constant betas allow, and only 4 bits are clamped."""
    params = parameters((64, 128)), parameters((64, 128))
    mine = optim.AdamW(params[0], lr=1e-3, state="fp32", fused=fused)
    theirs = torch.optim.AdamW(params[1], lr=1e-3)
    for step in range(60):
        for optimizer in (mine, theirs):
            if step == 50:
                optimizer.param_groups[0]["betas"] = (0.9, 0.95)
        for p in (params[0][0], params[1][0]):
            p.grad = torch.ones_like(p)
        mine.step()
        theirs.step()
    assert relative(params[0][0], params[1][0]) < 1e-5


@kernel_or_not
def test_a_maximum_collects_no_rounding(fused):
    """amsgrad keeps the largest second moment of all steps."""
    params = {state: nn.Parameter(torch.zeros(32, 128)) for state in ("4bit", "fp32")}
    made = {
        state: optim.AdamW([p], state=state, betas=(0.9, 0.99), amsgrad=True, lr=0.0, fused=fused)
        for state, p in params.items()
    }
    for step in range(300):
        for state, p in params.items():
            p.grad = rand(32, 128, seed=step)
            made[state].step()
    stored, exact = (made[s].state[params[s]]["max_exp_avg_sq"] for s in ("4bit", "fp32"))
    assert stored.format == "8bit" and relative(stored.dequantize(), exact) < 0.1


@every
@pytest.mark.parametrize("scale", [1e-7, 1.0])
def test_the_first_step_is_exact_also_after_one_without_gradients(state, scale):
    """Fresh states decode to zeros, or to numbers too small to matter in the first update."""
    grads = gradients(1, scale)
    assert relative(change(optim.AdamW, state, grads), -1e-3 * grads[0].sign()) < 1e-5
    warmed = [torch.zeros(16, 512), *grads]
    full = change(optim.AdamW, "fp32", warmed)
    assert relative(change(optim.AdamW, state, warmed), full) < (1e-5 if scale == 1.0 else 2e-3)


@every
def test_a_step_without_gradients_changes_no_weight(state):
    p = nn.Parameter(rand(64, 128))
    before = p.detach().clone()
    optimizer = optim.AdamW([p], lr=1.0, weight_decay=0.0, state=state)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)


def test_second_moments_in_bfloat16_decay():
    p = nn.Parameter(torch.zeros(64, 128))
    optimizer = optim.AdamW([p], state="bf16")
    p.grad = torch.ones_like(p)
    optimizer.step()
    start = optimizer.state[p]["exp_avg_sq"].float().mean()
    for _ in range(300):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    left = optimizer.state[p]["exp_avg_sq"].float().mean() / start
    assert left == pytest.approx(0.999**300, rel=0.02)


@pytest.mark.parametrize(
    "shape,state,stored",
    [
        ((64, 64), "4bit", "4bit"),
        ((63, 65), "4bit", "fp32"),  # 4095 elements
        ((10000,), "8bit", "fp32"),
        ((), "4bit", "fp32"),
        ((1000, 31), "8bit", "fp32"),  # short rows
        ((1000, 32), "8bit", "8bit"),
        ((64, 3, 3, 3), "float8", "fp32"),
        ((256, 4, 3, 3), "float8", "float8"),
        ((1000, 31), "bf16", "bf16"),
        ((10000,), "bf16", "fp32"),
    ],
    ids=str,
)
def test_small_parameters_keep_float32_states(shape, state, stored):
    params = parameters(shape)
    optimizer = optim.AdamW(params, state=state)
    run(optimizer, params, 1)
    for name in ("exp_avg", "exp_avg_sq"):
        value = optimizer.state[params[0]][name]
        if stored in BLOCKWISE:
            assert isinstance(value, CodebookTensor) and value.format == stored
            assert value.signed == (name == "exp_avg")
        else:
            assert value.dtype == (torch.float32 if stored == "fp32" else torch.bfloat16)


@pytest.mark.usefixtures("steps")
def test_bfloat16_weights_decay_with_the_update():
    """Below 1, the step of bfloat16 is 2**-8: neither an update nor a decay of 1e-3 changes the weight, both together
    do."""
    results = []
    for weight_decay in (0.0, 1.0):
        p = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optim.AdamW4bit([p], lr=1e-3, weight_decay=weight_decay).step()
        results.append(p.unique().item())
    assert results == [1.0, 1.0 - 2**-8]


@every
def test_strides_of_parameter_and_gradient_do_not_matter(state):
    values, grads = rand(96, 130), [rand(96, 130, seed=i + 1) for i in range(3)]
    plain = nn.Parameter(values.clone())
    turned = nn.Parameter(values.t().contiguous().t())
    assert not turned.is_contiguous()
    # no kernel updates the other one, so none may update the first one either
    options = {"state": state, "fused": False}
    first, second = optim.AdamW([plain], **options), optim.AdamW([turned], **options)
    for grad in grads:
        plain.grad = grad.t().contiguous().t()
        turned.grad = grad.clone()
        first.step()
        second.step()
    assert torch.equal(plain, turned)
    assert torch.equal(plain.grad, grads[-1]), "the gradient is left alone"
    images = nn.Parameter(rand(32, 16, 5, 5).to(memory_format=torch.channels_last))
    copy = nn.Parameter(images.detach().contiguous())
    for p in (images, copy):
        run(optim.AdamW([p], **options), [p], 2)
    assert torch.equal(images, copy)


def test_fake_quantized_weights_train_through_their_master():
    model, plain = nn.Linear(128, 64, bias=False), nn.Linear(128, 64, bias=False)
    values = rand(64, 128)
    plain.weight = nn.Parameter(values.clone())
    weight = FakeQuantizedTensor(values.clone(), Int4WeightOnly(group_size=32))
    model.weight = nn.Parameter(weight)
    for m in (model, plain):
        optimizer = optim.AdamW4bit(m.parameters(), lr=0.01, fused=False)
        run(optimizer, list(m.parameters()), 3)
    assert torch.equal(model.weight.master(), plain.weight)


@pytest.mark.gpu
@every
def test_on_a_gpu_as_on_the_cpu(state):
    here = parameters((96, 260), (300,))
    there = [nn.Parameter(p.detach().cuda()) for p in here]
    cpu = optim.AdamW(here, lr=0.01, state=state)
    gpu = optim.AdamW(there, lr=torch.tensor(0.01, device="cuda"), state=state)
    for step in range(5):
        set_grads(here, step)
        for p, q in zip(here, there, strict=True):
            q.grad = p.grad.cuda()
        cpu.step()
        gpu.step()
    for p, q, start in zip(here, there, parameters((96, 260), (300,)), strict=True):
        # another rounding of the sum moves a code
        assert relative(q.cpu() - start, p - start) < 0.1 * BOUND.get(state, 1e-4)


@pytest.mark.gpu
@every
def test_captured_in_a_cuda_graph(state):
    captured = [nn.Parameter(p.detach().cuda()) for p in parameters((96, 260), (300,))]
    optimizer = optim.AdamW(captured, lr=torch.tensor(0.01, device="cuda"), state=state)
    grads = [torch.ones_like(p) for p in captured]
    for p, grad in zip(captured, grads, strict=True):
        p.grad = grad
    optimizer.step()
    eager = [nn.Parameter(p.detach().clone()) for p in captured]
    other = optim.AdamW(eager, lr=0.01, state=state)
    other.load_state_dict(optimizer.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(3):
        for p, q, grad in zip(captured, eager, grads, strict=True):
            grad.copy_(rand(*p.shape, seed=step))
            q.grad = grad.clone()
        graph.replay()
        other.step()
    for p, q in zip(captured, eager, strict=True):
        assert torch.equal(p, q)
    assert optimizer.state[captured[0]]["step"].item() == 4


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu():
    params = [nn.Parameter(p.detach().cuda()) for p in parameters((96, 260), (300,))]
    optimizers = [optim.AdamW(params, state=state) for state in FORMATS]
    for p in params:
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for optimizer in optimizers:
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
