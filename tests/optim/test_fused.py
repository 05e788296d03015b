"""The compiled step against the step in PyTorch operations: the CPU's kernel, and the CUDA one, on a GPU or emulated
on a CPU (tests/kernels/emulator.py)."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import pytest
import torch
from torch import nn

from lowbit import Int8MixedPrecision, MixedPrecisionTensor, optim
from tests.optim.counted import LAUNCHES, launched
from tests.optim.problems import FORMATS, rand, relative

SHAPES = [(16, 256), (15, 300), (5, 7, 130), (1,), (0, 4), (300,), (40, 101), (3, 1000), (64, 64)]
ALGORITHMS = {
    "AdamW": (optim.AdamW, {}),
    "AdamW-amsgrad": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "Lion": (optim.Lion, {"weight_decay": 0.1}),
    "SGD": (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "lr": 1e-2}),
    "SGD-nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "lr": 1e-2}),
    "SGD-plain": (optim.SGD, {"lr": 1e-2}),
    "AdEMAMix": (optim.AdEMAMix, {"weight_decay": 0.1, "t_alpha_beta3": 10}),
}


def parameters(device, shapes=SHAPES, dtype=torch.float32):
    return [nn.Parameter(rand(*s, seed=i, dtype=dtype).to(device)) for i, s in enumerate(shapes)]


def set_grads(params, step, scale=1.0):
    for i, p in enumerate(params):
        p.grad = (rand(*p.shape, seed=1000 * step + i) * scale).to(p)


def pair(device, make, dtype=torch.float32, shapes=SHAPES):
    """(parameters, optimizer) with the kernel, and without it."""
    made = []
    for fused_or_not in (None, False):
        params = parameters(device, shapes, dtype)
        made.append((params, make(params, fused=fused_or_not)))
    return made


def decoded(state):
    return state.dequantize() if hasattr(state, "dequantize") else state.float()


def check_alike(made, weight_bound, state_bound):
    (params, own), (others, reference) = made
    for p, q in zip(params, others, strict=True):
        if p.numel() == 0:
            continue
        assert relative(p, q) < weight_bound, p.shape
        mine, theirs = own.state[p], reference.state[q]
        assert mine.keys() == theirs.keys()
        assert mine["step"] == theirs["step"]
        for name in mine:
            assert type(mine[name]) is type(theirs[name]), name
            assert relative(decoded(mine[name]), decoded(theirs[name])) < state_bound, (
                name,
                p.shape,
            )


@pytest.mark.cover(
    "pairs", state=lambda state: ()
)  # each rule on each device, with formats in turn
@pytest.mark.parametrize("state", FORMATS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_as_the_step_in_pytorch(device, name, state):
    cls, options = ALGORITHMS[name]
    made = pair(device, functools.partial(cls, state=state, **options))
    for params, optimizer in made:
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
    assert launched() >= 3
    # near the boundary of two codes one may differ, near zero the sign of Lion may
    bound = 2e-3 if name == "Lion" else 1e-5
    check_alike(made, bound, {"fp32": 1e-6, "bf16": 1e-3}.get(state, 2e-3))


@pytest.mark.cover("values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", ["4bit", "8bit", "float8"])
def test_narrow_weights(device, dtype, state):
    made = pair(device, functools.partial(optim.AdamW, state=state, lr=1e-2), dtype)
    for params, optimizer in made:
        for step in range(2):
            set_grads(params, step)
            optimizer.step()
    assert launched()
    # some numbers of few bits lie in the middle of two codes: the rounding of the sum decides
    check_alike(made, 1e-3, 1e-2)


@pytest.mark.parametrize(
    "options",
    [{"bf16_stochastic_round": True, "seed": 5}, {"weight_correction": "8bit"}, {"state": "bf16"}],
    ids=["stochastic", "corrected", "bf16-states"],
)
def test_rounding_by_chance_and_corrections(device, options):
    """The random bits are those of PyTorch operations: results differ only where the float32 values do."""
    made = pair(device, functools.partial(optim.AdamW8bit, lr=1e-2, **options), torch.bfloat16)
    for params, optimizer in made:
        set_grads(params, 0)
        optimizer.step()
    assert launched()
    (params, own), (others, reference) = made
    for p, q in zip(params, others, strict=True):
        if p.numel() == 0:
            continue
        assert (p != q).float().mean() < 2e-3 if p.numel() > 1000 else torch.equal(p, q)
        if "weight_correction" in options:
            mine, theirs = (o.state[x]["weight_correction"] for o, x in ((own, p), (reference, q)))
            assert (mine != theirs).float().mean() < 0.02
            assert mine.abs().max() > 0


def test_one_launch_for_all_of_a_kind(device):
    params = parameters(device, [(32, 128)] * 10 + [(7,)] * 5)
    optimizer = optim.AdamW8bit(params)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    assert launched() == 3 * 2  # 8-bit states, and the small ones' float32


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", [(33, 300), (20, 255), (17, 261), (6, 1023), (5, 777)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"state": "4bit", "bf16_stochastic_round": True},
        {"state": "8bit", "bf16_stochastic_round": True},
        {"state": "8bit", "weight_correction": "8bit"},
        {"state": "float8"},
        {"state": "bf16"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_any_address_gives_the_same_bits(device, options, shape):
    """Misaligned views of weights and gradients, as FSDP makes them; rows of any length."""
    results = []
    size = shape[0] * shape[1]
    for offset in (0, 1, 3):
        weight = torch.zeros(size + 8, dtype=torch.bfloat16, device=device)
        flat = weight[offset : offset + size].view(shape)
        flat.copy_(rand(*shape, seed=1))
        param = nn.Parameter(flat)
        grad = torch.zeros(size + 8, dtype=torch.bfloat16, device=device)
        optimizer = optim.AdamW([param], lr=1e-2, **options)
        for step in range(2):
            view = grad[offset : offset + size].view(shape)
            view.copy_(rand(*shape, seed=2 + step))
            param.grad = view
            optimizer.step()
        assert not weight[:offset].any() and not weight[offset + size :].any()
        values = optimizer.state[param].values()
        stored = [[v.codes, v.scale] if hasattr(v, "codes") else [v] for v in values]
        results.append([param.detach().clone(), *(t for parts in stored for t in parts)])
    assert launched() == 6
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradients_that_are_not_contiguous(device):
    param, other = parameters(device, [(48, 320), (48, 320)])
    other.data.copy_(param.data)
    one, two = optim.AdamW8bit([param]), optim.AdamW8bit([other])
    grad = rand(320, 48, seed=9).to(device)
    param.grad, other.grad = grad.t(), grad.t().contiguous()
    one.step()
    two.step()
    assert torch.equal(param, other) and launched() == 2


def test_gradients_come_and_go(device):
    """A parameter without a gradient stays as it is; groups added later, frozen parameters, new addresses each step."""
    params = parameters(device, [(64, 128), (64, 128), (9,), (64, 256)])
    optimizer = optim.AdamW8bit(params[:3])
    set_grads(params[:3], 0)
    params[1].grad = None
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before) and params[1] not in optimizer.state
    optimizer.zero_grad(set_to_none=True)
    set_grads(params[:3], 1)
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1 and optimizer.state[params[0]]["step"] == 2
    optimizer.add_param_group({"params": [params[3]], "lr": 0.1, "state": "fp32"})
    set_grads(params, 2)
    before = params[3].detach().clone()
    optimizer.step()
    assert (params[3] - before).abs().mean() > 0.05
    assert optimizer.state[params[3]]["exp_avg"].dtype == torch.float32
    optimizer.zero_grad(set_to_none=True)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("state", ["8bit", "4bit"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
def test_more_tiles_than_warps(device, state, offset):
    """Blocks process several rounds of tiles, and prefetch whole ones into the L2 cache."""
    rows = 200 if device.type == "cpu" else 40_000  # of one tile each
    made = []
    for fused in (None, False):
        whole = rand(rows * 256 + offset, dtype=torch.bfloat16).to(device)[offset:]
        params = [nn.Parameter(whole.view(rows, 256))]
        made.append((params, optim.AdamW(params, state=state, fused=fused)))
        run_steps(made[-1][1], params, 2)
    check_alike(made, 1e-2, 1e-2)  # bf16 gradients have more ties


def test_options_are_read_at_every_step(device):
    """Changes of lr (a number or a tensor), betas and weight decay compile nothing and take effect."""
    kernels = set()
    for lr in (1e-3, torch.tensor(1e-3), torch.tensor(1e-3, dtype=torch.float64, device=device)):

        def make(params, lr=lr, **options):
            return optim.AdamW8bit(params, lr=copy.deepcopy(lr), **options)

        made = pair(device, make, shapes=[(64, 256)])
        for params, optimizer in made:
            for step in range(3):
                set_grads(params, step)
                optimizer.step()
                group = optimizer.param_groups[0]
                group["betas"], group["weight_decay"] = (0.8, 0.9), 0.3 * (step + 1)
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(2)
                else:
                    group["lr"] *= 2
        check_alike(made, 1e-5, 2e-3)
    kernels.update(LAUNCHES)
    assert len(kernels) == 1


def test_clipping_and_skipping(device):
    made = pair(
        device,
        functools.partial(optim.AdamW8bit, max_grad_norm=0.5, skip_nonfinite=True, lr=1e-2),
        shapes=[(64, 256), (33, 300), (9,)],
    )
    for params, optimizer in made:
        set_grads(params, 0, scale=100.0)
        optimizer.step()
        kept = [p.detach().clone() for p in params]
        states = [{k: decoded(v).clone() for k, v in optimizer.state[p].items()} for p in params]
        set_grads(params, 1)
        params[1].grad[3, 4] = float("nan")
        optimizer.step()
        for p, before, state in zip(params, kept, states, strict=True):
            assert torch.equal(p, before)
            assert all(torch.equal(decoded(optimizer.state[p][k]), v) for k, v in state.items())
        set_grads(params, 2)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2
    assert launched()
    check_alike(made, 1e-5, 2e-3)


def test_skipping_asks_the_device_only(device, monkeypatch):
    def looked_at(tensor):
        raise AssertionError("the host waits for it")

    params = parameters(device, [(64, 256), (300,)])
    optimizer = optim.AdamW8bit(params, skip_nonfinite=True, max_grad_norm=1.0)
    if device.type == "cpu":  # the host may look only before the first step
        run_steps(optimizer, params, 1)
    set_grads(params, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__bool__", looked_at)
        optimizer.step()


def test_a_gradient_that_is_not_finite_shows(device):
    param = parameters(device, [(4, 1024)])[0]
    optimizer = optim.AdamW8bit([param])
    set_grads([param], 0)
    param.grad[1, 300] = float("nan")
    optimizer.step()
    bad = optimizer.state[param]["exp_avg"].dequantize().isnan()
    expected = torch.zeros(4, 1024, dtype=torch.bool, device=device)
    expected[1, 256:512] = True
    assert torch.equal(bad, expected)
    assert torch.equal(param.isnan().nonzero().cpu(), torch.tensor([[1, 300]]))


@pytest.mark.parametrize(("scale", "eps"), [(1e-30, 1e-8), (1e-12, 0.0), (1e12, 0.0), (3e19, 0.0)])
def test_tiny_and_huge_gradients(device, scale, eps):
    """Also gradients whose squares overflow, although their share in the second moment does not."""
    made = pair(
        device, functools.partial(optim.AdamW8bit, eps=eps, lr=1e-2), shapes=[(64, 256), (33, 300)]
    )
    for params, optimizer in made:
        for step in range(2):
            set_grads(params, step, scale)
            optimizer.step()
    check_alike(made, 1e-4, 3e-3)


def test_loading_makes_new_launches(device):
    params = parameters(device, [(64, 256)])
    optimizer = optim.AdamW8bit(params)
    run_steps(optimizer, params, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = params[0].detach().clone()
    run_steps(optimizer, params, 2, first=2)
    after = params[0].detach().clone()
    with torch.no_grad():
        params[0].copy_(weights)
    optimizer.load_state_dict(saved)
    run_steps(optimizer, params, 2, first=2)
    assert torch.equal(params[0], after)


def run_steps(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        optimizer.step()


def test_parameters_without_a_kernel(device):
    """float64 weights and transposed ones are updated by PyTorch operations, in the same step."""
    params = [
        nn.Parameter(rand(64, 128, dtype=torch.float64).to(device)),
        nn.Parameter(rand(64, 128).to(device).t()),
        nn.Parameter(rand(64, 128).to(device)),
    ]
    before = [p.detach().clone() for p in params]
    optimizer = optim.AdamW8bit(params, lr=0.1)
    for _ in range(2):
        for i, p in enumerate(params):
            p.grad = rand(*p.shape, seed=i).to(p)
        optimizer.step()
    assert all((p - b).abs().mean() > 0.1 for p, b in zip(params, before, strict=True))
    assert launched() == 2
    strict = optim.AdamW8bit([params[0]], fused=True)
    with pytest.raises(RuntimeError, match=r"fused=True.*\(64, 128\).*float64"):
        strict.step()


@pytest.mark.parametrize("fused", [None, False], ids=["kernel", "rest"])
def test_gradients_are_not_kept(device, fused):
    """A gradient that the optimizer keeps alive would be missing memory in the next backward."""
    params = parameters(device, [(64, 256), (300,)])
    optimizer = optim.Muon8bit(params, fused=fused)
    for step in range(2):
        set_grads(params, step)
        grads = [weakref.ref(p.grad) for p in params]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [g() for g in grads] == [None, None]


def test_training_goes_down(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    x = rand(32, 64, seed=1).to(device)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0] and launched() == 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_behind_low_bit_products_are_written_to_directly(device, dtype):
    shapes = [(64, 256), (33, 300)]
    made = pair(device, optim.AdamW8bit, dtype, shapes)
    params, own = made[0]
    scheme = Int8MixedPrecision(always=True)
    low = [nn.Parameter(MixedPrecisionTensor(p.detach(), scheme)) for p in params]
    made[0] = (low, optim.AdamW8bit(low))
    for params, optimizer in made:
        for step in range(3):
            set_grads(params, step)
            optimizer.step()
    weights = made[0][1]._fused.launches[0].weights
    assert launched() >= 3 and weights.numbers()[0] == low[0].master().data_ptr()
    masters = [p.master() for p in low]
    state = {m: made[0][1].state[p] for m, p in zip(masters, low, strict=True)}
    own.state.update(state)
    check_alike([(masters, own), made[1]], 1e-5 if dtype is torch.float32 else 1e-3, 2e-3)
