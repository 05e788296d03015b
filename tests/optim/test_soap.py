"""SOAP in float32 against its textbook in float64, its formats, groups, checkpoints, and two processes.

Checkpoints that move between processes are tested for Muon here too: both keep states that no other optimizer has.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import optim
from lowbit.optim import SOAP
from lowbit.tensor import CodebookTensor
from lowbit.testing.launch import launch
from tests.optim.algorithms import decoded
from tests.optim.problems import FORMATS, parameters, rand, relative, run, saved, set_grads
from tests.optim.test_sharded import Model, checkpoint, full, same_state, shard, train

every = pytest.mark.parametrize("state", FORMATS)
FREQUENCY = 3


class Textbook:
    """The formula of lowbit.optim.soap for one matrix, in float64, with M in the gradients' own basis."""

    def __init__(self, weight, sides=("left", "right"), lr=0.01, betas=(0.9, 0.95), decay=0.1):
        self.weight, self.lr, self.betas, self.decay = weight.double().clone(), lr, betas, decay
        rows, cols = weight.shape
        self.bases = [torch.eye(n, dtype=torch.float64) for n in (rows, cols)]
        self.factors = [torch.zeros(n, n, dtype=torch.float64) for n in (rows, cols)]
        self.used = ["left" in sides, "right" in sides]
        self.m, self.v = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.t = -1

    def step(self, grad):
        grad, (beta1, beta2) = grad.double(), self.betas
        self.t += 1
        for factor, product in zip(self.factors, (grad @ grad.T, grad.T @ grad), strict=True):
            factor.mul_(beta2).add_((1 - beta2) * product)
        if self.t == 0:
            found = [torch.linalg.eigh(factor).eigenvectors.flip(-1) for factor in self.factors]
            pairs = zip(self.used, found, self.bases, strict=True)
            self.bases = [new if used else same for used, new, same in pairs]
            return
        left, right = self.bases
        self.m = beta1 * self.m + (1 - beta1) * grad
        self.v = beta2 * self.v + (1 - beta2) * (left.T @ grad @ right) ** 2
        numerator = (left.T @ self.m @ right) / (1 - beta1**self.t)
        update = numerator / ((self.v / (1 - beta2**self.t)).sqrt() + 1e-8)
        self.weight -= self.lr * (self.decay * self.weight + left @ update @ right.T)
        if self.t % FREQUENCY == 0:
            self.refresh()

    def refresh(self):
        for i in (0, 1):
            if self.used[i]:
                image = self.factors[i] @ self.bases[i]
                order = (self.bases[i] * image).sum(0).argsort(descending=True)
                self.v = self.v.index_select(i, order)
                self.bases[i] = torch.linalg.qr(image[:, order]).Q


@pytest.mark.parametrize("fused", [None, False], ids=["kernel", "operations"])
@pytest.mark.parametrize(
    ("shape", "sides"),
    [((24, 24), ("left", "right")), ((17, 70), ("left",)), ((70, 17), ("right",)), ((70, 71), ())],
    ids=str,
)
def test_float32_is_the_textbook(shape, sides, fused):
    """On full-rank gradients: eigenvectors of the eigenvalue 0 are arbitrary. The longest preconditioned side is 24."""
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": fused}
    p = nn.Parameter(rand(*shape))
    start, book = p.detach().double().clone(), Textbook(p.detach(), sides)
    optimizer = SOAP(
        [p], state="fp32", precondition_frequency=FREQUENCY, max_precondition_dim=24, **options
    )
    for step in range(3 * FREQUENCY):
        set_grads([p], step)
        optimizer.step()
        book.step(p.grad)
        assert relative(p.detach().double() - start, book.weight - start) < 1e-3, step
    assert set(optimizer.state[p]) == {
        "step", "exp_avg", "exp_avg_sq", *sides, *(f"{side}_basis" for side in sides)
    }  # fmt: skip


def test_the_first_gradient_makes_bases_only():
    (p,) = parameters((20, 30))
    before = p.detach().clone()
    optimizer = SOAP([p], state="fp32")
    run(optimizer, [p], 1)
    basis = optimizer.state[p]["left_basis"]
    assert torch.equal(p, before) and optimizer.state[p]["step"] == 1
    assert relative(basis.T @ basis, torch.eye(20)) < 1e-5
    optimizer.zero_grad()
    run(optimizer, [p], 1, first=1)
    assert not torch.equal(p, before)


@pytest.mark.parametrize(
    "state", ["8bit", "float8", "bf16"]
)  # with 4-bit moments bases have 8 bits
@pytest.mark.usefixtures("steps")
def test_bases_stay_orthogonal_in_few_bits(state):
    """The error is that of rounding the last basis once: it doesn't add up over refreshes."""
    (p,) = parameters((96, 80))
    optimizer = SOAP([p], state=state, precondition_frequency=2)
    run(optimizer, [p], 21)
    for name, side in (("left_basis", 96), ("right_basis", 80)):
        basis = optimizer.state[p][name]
        assert isinstance(basis, CodebookTensor) == (state != "bf16")
        basis = basis.dequantize() if isinstance(basis, CodebookTensor) else basis.float()
        assert relative(basis.T @ basis, torch.eye(side)) < 0.06


@pytest.mark.usefixtures("steps")
def test_training_against_float32_states():
    inputs = rand(512, 64, seed=1) * rand(64, seed=9).exp()
    targets = (inputs @ rand(64, 64, seed=2) / 16).tanh() @ rand(64, 64, seed=3) / 8

    def loss(state):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        optimizer = SOAP(model.parameters(), lr=5e-3, state=state)
        for step in range(60):
            at = torch.randint(512, (64,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            found = (model(inputs[at]) - targets[at]).square().mean()
            found.backward()
            optimizer.step()
        return (model(inputs) - targets).square().mean().item()

    expected = loss("fp32")
    assert expected < 0.3 * targets.square().mean()
    for state, bound in {"4bit": 1.1, "8bit": 1.05, "float8": 1.1, "bf16": 1.05}.items():
        assert loss(state) < bound * expected, state


def test_groups():
    """1-D parameters, and groups that ask for it, take AdamW's steps to the bit."""
    params, others = parameters((20, 30), (30,), (64, 96)), parameters((20, 30), (30,), (64, 96))
    groups = [{"params": params[:2]}, {"params": params[2:], "precondition": False, "lr": 0.1}]
    optimizer = optim.SOAP8bit(groups, lr=0.01)
    assert [g["precondition"] for g in optimizer.param_groups] == [True, False, False]
    options = {"betas": (0.95, 0.95), "state": "8bit"}
    reference = optim.AdamW(
        [{"params": others[:2], "lr": 0.01}, {"params": others[2:], "lr": 0.1}], **options
    )
    run(optimizer, params, 3)
    run(reference, others, 3)
    assert [torch.equal(p, q) for p, q in zip(params, others, strict=True)] == [False, True, True]
    with pytest.raises(ValueError, match=r"precondition=True takes matrices, got .*\(5,\)"):
        SOAP([{"params": parameters((5,)), "precondition": True}])
    with pytest.raises(ValueError, match="stacked=True if it holds 4 matrices of 8 x 9"):
        SOAP(parameters((4, 8, 9)))
    with pytest.raises(ValueError, match="precondition_frequency must be a whole number of at"):
        SOAP(parameters((8, 9)), precondition_frequency=0)
    for name in ("use_muon", "use_soap", "adamw_lr"):
        with pytest.raises(
            TypeError, match=f"SOAP has no option '{name}' of a group; accepted: prec"
        ):
            SOAP([{"params": parameters((8, 9)), name: False}])
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": parameters((3,))})
    assert not copied.param_groups[-1]["precondition"] and not copied._counts


def test_stacks_are_their_matrices():
    stack = nn.Parameter(rand(3, 20, 24))
    parts = [nn.Parameter(m.clone()) for m in stack.detach()]
    whole, separate = SOAP([stack], state="fp32", stacked=True), SOAP(parts, state="fp32")
    for step in range(13):
        stack.grad = rand(3, 20, 24, seed=step) + 0.3
        for p, grad in zip(parts, stack.grad, strict=True):
            p.grad = grad.clone()
        whole.step()
        separate.step()
    for p, q in zip(stack, parts, strict=True):
        assert relative(p, q) < 1e-4  # batched QR and eigenvectors round otherwise


@every
@pytest.mark.usefixtures("steps")
def test_a_checkpoint_resumes_to_the_bit(state):
    """Saved between two refreshes."""
    options = {"state": state, "precondition_frequency": 4, "bf16_stochastic_round": True}
    shapes = [(70, 80), (33, 130), (9,)]
    params = parameters(*shapes, dtype=torch.bfloat16)
    optimizer = SOAP(params, **options)
    run(optimizer, params, 6)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    again = SOAP(others, **{**options, "lr": 1.0})
    again.load_state_dict(saved(optimizer.state_dict()))
    run(optimizer, params, 4, first=6)
    run(again, others, 4, first=6)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    low = optim.SOAP8bit(parameters(*shapes, dtype=torch.bfloat16))
    low.load_state_dict(optimizer.state_dict())
    assert low.state[low.param_groups[0]["params"][0]]["left_basis"].format == "8bit"
    bad = optimizer.state_dict()
    bad["state"][0]["left"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"left has shape \(3, 3\)"):
        low.load_state_dict(bad)
    del bad["state"][0]["left"]
    with pytest.raises(ValueError, match=r"SOAP8bit takes .*'left', 'left_basis'"):
        low.load_state_dict(bad)


@every
def test_a_gradient_of_zeros_or_nan(state):
    params = parameters((16, 512), (64, 64))
    optimizer = SOAP(params, state=state, lr=0.01, weight_decay=0.0)
    before = [p.detach().clone() for p in params]
    for step in range(12):
        for p in params:
            p.grad = torch.zeros_like(p)
        if step == 1:
            params[1].grad[3, 5] = torch.nan
        optimizer.step()
    assert torch.equal(params[0], before[0])
    assert not params[1].isfinite().any()  # the bases mix all elements
    fresh = SOAP(parameters((8, 8)), state=state)
    (p,) = fresh.param_groups[0]["params"]
    p.grad = torch.full_like(p, torch.inf)
    for _ in range(2):
        fresh.step()
    assert not p.isfinite().all()


@pytest.mark.parametrize("fused", [None, False], ids=["kernel", "operations"])
@pytest.mark.parametrize("state", ["4bit", "8bit", "float8", "bf16"])
def test_rows_and_columns_without_gradients_do_not_leap(state, fused):
    """A refreshed basis in few bits turns moments of other directions into theirs, whose second moment is nearly 0.
    With float32 states noise moves these rows by up to 11 here, too."""
    params = parameters((64, 256), (64, 256))
    optimizer = SOAP(
        params, lr=1.0, weight_decay=0.0, state=state, precondition_frequency=2, fused=fused
    )
    for step in range(8):
        before = [p.detach().clone() for p in params]
        set_grads(params, step)
        params[0].grad[::2] = 0
        params[1].grad[:, ::2] = 0
        optimizer.step()
        for p, start in zip(params, before, strict=True):
            assert (p.detach() - start).abs().max() < 20, step


def test_gradients_of_an_embedding_with_few_tokens():
    """G G^T has 500 rows and low rank: LAPACK's float32 solver does not converge for some of these."""
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(500, 64, generator=generator) * 0.02
        grad[torch.rand(500, generator=generator) < 0.8] = 0
        weight = nn.Parameter(torch.zeros(500, 64))
        weight.grad = grad
        optimizer = SOAP([weight], state="fp32")
        optimizer.step()
        basis = optimizer.state[weight]["left_basis"].double()
        assert relative(basis.mT @ basis, torch.eye(500, dtype=torch.float64)) < 1e-5
        turned = basis.mT @ grad.double() @ grad.double().mT @ basis
        assert relative(turned.diagonal().diag(), turned) < 1e-5


@pytest.mark.parametrize("state", ["8bit", "fp32"])
def test_states_that_get_optimizer_state_dict_makes_are_no_step(state):
    """torch makes them by a step with gradients of zeros, whose eigenvectors are the identity."""
    results = []
    for asked in (False, True):
        model = nn.Linear(70, 80)
        model.load_state_dict({"weight": rand(80, 70), "bias": rand(80)})
        optimizer = SOAP(model.parameters(), state=state)
        if asked:
            held = get_optimizer_state_dict(model, optimizer)["state"]
            assert held["weight"]["step"] == 0
        run(optimizer, [model.weight], 4)
        results.append((model.weight, decoded(optimizer.state[model.weight]["left_basis"])))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@every
def test_a_run_begins_again_after_its_states_were_cleared(state):
    """Without a count that is left over, by which new states would have bases."""
    weight = nn.Parameter(rand(70, 80))
    optimizer = SOAP([weight], state=state, precondition_frequency=FREQUENCY)
    run(optimizer, [weight], 3)
    optimizer.state.clear()
    weight.data = rand(70, 80)
    run(optimizer, [weight], 5)
    other = nn.Parameter(rand(70, 80))
    run(SOAP([other], state=state, precondition_frequency=FREQUENCY), [other], 5)
    assert torch.equal(weight, other)


def test_clipping_and_steps_in_backward():
    params, others = parameters((24, 24)), parameters((24, 24))
    clipped, plain = SOAP(params, state="fp32", max_grad_norm=0.5), SOAP(others, state="fp32")
    for step in range(3):
        set_grads(params, step)
        set_grads(others, step)
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        clipped.step()
        plain.step()
    assert relative(params[0], others[0]) < 1e-5
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Linear(24, 20))
        optimizer = optim.SOAP8bit(model.parameters())
        if in_backward:
            optim.step_in_backward(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(rand(8, 20, seed=step)).square().mean().backward()
            optimizer.step()
        results.append([*model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@every
def test_a_side_that_gets_a_preconditioner_later(state):
    """Until its first refresh it has the identity, as before."""
    params, others = parameters((64, 80)), parameters((64, 80))
    optimizer = SOAP(params, state=state, max_precondition_dim=8, precondition_frequency=100)
    plain = SOAP(others, state=state, max_precondition_dim=8)
    for step in range(6):
        if step == 3:
            optimizer.param_groups[0]["max_precondition_dim"] = 70
        run(optimizer, params, 1, first=step)
        run(plain, others, 1, first=step)
    assert "left_basis" in optimizer.state[params[0]]
    assert relative(params[0], others[0]) < 1e-6
    optimizer.param_groups[0]["precondition_frequency"] = 1
    run(optimizer, params, 3, first=6)
    assert params[0].isfinite().all()


# ---- ranks --------------------------------------------------------------------------------------------------


def check_sharded(rank, world_size):
    """Sharded by uneven rows and by columns: weights and states are those of one process, also after loading."""
    mesh = init_device_mesh("cpu", (world_size,))
    for state in ("8bit", "4bit", "fp32"):
        for dim, shape in ((0, (33, 130)), (1, (16, 512)), (0, (1, 40))):
            options = {"state": state, "bf16_stochastic_round": True, "precondition_frequency": 2}
            options["max_precondition_dim"] = 200
            values = rand(*shape).bfloat16()
            whole = nn.Parameter(values.clone())
            part = nn.Parameter(distribute_tensor(values.clone(), mesh, [Shard(dim)]))
            reference, optimizer = SOAP([whole], **options), SOAP([part], **options)
            for step in range(6):
                whole.grad = rand(*shape, seed=step + 1).bfloat16() + 0.3
                part.grad = distribute_tensor(
                    whole.grad, mesh, [(Shard(dim), Replicate())[step % 2]]
                )
                reference.step()
                optimizer.step()
                if step == 3:
                    again = SOAP([part], **options)
                    again.load_state_dict(optimizer.state_dict())
                    optimizer = again
            assert torch.equal(part.full_tensor(), whole), (state, dim)
            for name in ("left", "left_basis", "right_basis"):
                if name in reference.state[whole]:
                    pair = optimizer.state[part][name], reference.state[whole][name]
                    same = [t.dequantize() if isinstance(t, CodebookTensor) else t for t in pair]
                    assert torch.equal(*same), (state, dim, name)
    return True


def test_two_processes():
    assert launch(check_sharded, 2) == [True, True]


RESHARDED = {
    "SOAP8bit": {"precondition_frequency": 3, "max_precondition_dim": 80},
    "SOAP4bit": {"precondition_frequency": 3, "max_precondition_dim": 80},
    "Muon8bit": {"row_beta2": 0.9},
    "Muon4bit": {},
}


def optimizer_of(name, model, lr=0.01):
    return getattr(optim, name)(model.parameters(), lr=lr, stacked=False, **RESHARDED[name])


def check_part(rank, world_size, folder, part):
    """Two steps under FSDP2, from the checkpoint of the part before. Returns the weights and the states."""
    mesh = init_device_mesh("cpu", (world_size,))
    result = {}
    for name in RESHARDED:
        model = shard(Model(), mesh)
        optimizer = optimizer_of(name, model, lr=0.01 if part == 0 else 9.0)
        if part:
            loaded = checkpoint(model, optimizer)
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}-{part - 1}")
            model.load_state_dict(loaded["model"])
            set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        train(model, optimizer, 2, first=2 * part)
        dcp.save(checkpoint(model, optimizer), checkpoint_id=f"{folder}/{name}-{part}")
        states = [{k: full(v) for k, v in optimizer.state[p].items()} for p in model.parameters()]
        result[name] = [p.full_tensor().detach() for p in model.parameters()], states
    return result


def test_a_run_that_moves_from_two_processes_to_one_and_to_two(tmp_path):
    """Shards of an odd number of rows, one without rows: the bits are those of one process that never stopped."""
    for part, world_size in enumerate((2, 1, 2)):
        found = launch(check_part, world_size, str(tmp_path), part)
    for name in RESHARDED:
        model = Model()
        optimizer = optimizer_of(name, model)
        train(model, optimizer, 6)
        for rank in (0, 1):
            weights, states = found[rank][name]
            for p, q, state in zip(model.parameters(), weights, states, strict=True):
                assert torch.equal(p, q), (name, rank)
                assert state.keys() == optimizer.state[p].keys()
                for key, expected in optimizer.state[p].items():
                    assert same_state(state[key], expected), (name, rank, key)
