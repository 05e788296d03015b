"""Muon by batches: kernels against PyTorch operations, when a plan is kept, stacks, and ranks that share matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lowbit import optim
from lowbit.optim import Muon
from lowbit.optim.step import matrix_step, muon_step, row_exchange
from lowbit.testing.launch import launch
from tests.distributed.test_bytes import device
from tests.optim.problems import FORMATS, parameters, rand, relative, run, set_grads
from tests.optim.test_sharded import full, same_state

every = pytest.mark.parametrize("state", FORMATS)
SHAPES = [(65, 96), (65, 96), (96, 65), (70, 70), (64, 7, 9), (65, 96), (8, 8)]


def plans_of(optimizer):
    return list(optimizer._plans.values())


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_against_operations(state, dtype):
    made = [parameters(*SHAPES, dtype=dtype) for _ in range(2)]
    options = {"lr": 0.05, "state": state, "max_grad_norm": 3.0, "stacked": False}
    fused = Muon(made[0], fused=True, **options)
    eager = Muon(made[1], fused=False, **options)
    for optimizer, params in zip((fused, eager), made, strict=True):
        run(optimizer, params, 3)
    for p, q in zip(*made, strict=True):
        assert relative(p, q) < (1e-2 if state == "4bit" else 3e-3)
        assert fused.state[p]["step"] == eager.state[q]["step"] == 3
    assert all(b.directions and not b.eager for b in plans_of(fused)[0].batches)
    assert all(b.eager and not b.directions for b in plans_of(eager)[0].batches)


@pytest.mark.parametrize(
    "options", [{"weight_correction": "8bit"}, {"bf16_stochastic_round": True}]
)
def test_rounding_of_weights_equals_that_of_operations(options):
    """The same random bits: the step counts once, though it has two launches."""
    made = [parameters(*SHAPES, dtype=torch.bfloat16) for _ in range(2)]
    for fused, params in zip((True, False), made, strict=True):
        optimizer = Muon(params, fused=fused, lr=0.05, state="fp32", stacked=False, **options)
        run(optimizer, params, 4)
    for p, q in zip(*made, strict=True):
        assert (p != q).float().mean() < 0.02, p.shape


def test_fused_names_the_obstacle():
    optimizer = Muon([nn.Parameter(rand(8, 8).double())], fused=True)
    optimizer.param_groups[0]["params"][0].grad = rand(8, 8).double()
    with pytest.raises(
        RuntimeError, match=r"fused=True, but no kernel .*\(8, 8\): it has the dtype"
    ):
        optimizer.step()


def test_parameters_that_no_kernel_takes_are_stepped_beside_others():
    params = [nn.Parameter(rand(64, 80, seed=i)) for i in range(3)]
    params[1].data = rand(80, 64, seed=1).t()  # not contiguous
    others = [nn.Parameter(rand(64, 80, seed=i)) for i in range(3)]
    others[1].data = rand(80, 64, seed=1).t().contiguous()
    both = [Muon(p, lr=0.1, state="fp32") for p in (params, others)]
    run(both[0], params, 2)
    run(both[1], others, 2)
    (batch,) = plans_of(both[0])[0].batches
    assert batch.eager == [1] and [launch.positions for launch in batch.descents] == [[0, 2]]
    for p, q in zip(params, others, strict=True):
        assert relative(p, q) < 1e-5


def test_empty_parameters_count_steps():
    params = parameters((0, 8), (8, 8))
    optimizer = Muon(params)
    run(optimizer, params, 2)
    assert [optimizer.state[p]["step"] for p in params] == [2, 2]


def test_how_matrices_are_batched_changes_no_bit(monkeypatch):
    results = []
    for batch in (1, 30 * 40 * 2, 2**24):
        monkeypatch.setattr(matrix_step, "BATCH", batch)
        params = parameters(*[(30, 40)] * 5, (40, 30))
        optimizer = Muon(params, lr=0.1)
        run(optimizer, params, 2)
        sizes = [len(b.positions) for b in plans_of(optimizer)[0].batches]
        assert sizes == {1: [1] * 6, 2400: [2, 2, 1, 1], 2**24: [5, 1]}[batch]
        results.append(torch.cat([p.detach().flatten() for p in params]))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.filterwarnings("ignore:the optimizer's step of 2 parameters")
def test_a_plan_is_kept_until_something_changes():
    params = parameters((64, 80), (64, 80), (80,))
    optimizer = optim.Muon8bit(params)

    def plan():
        set_grads(params, 0)
        optimizer.step()
        return plans_of(optimizer)[-1]

    first = plan()
    assert plan() is first
    params[0].data = params[0].data.clone()
    second = plan()
    assert second is not first and plan() is second
    optimizer.param_groups[0]["fused"] = False
    assert plan() not in (first, second)
    optimizer.param_groups[0]["fused"] = None
    third = plan()
    optimizer.param_groups[0]["adjust_lr_fn"] = "match_rms_adamw"
    assert plan() is not third
    third = plan()
    optimizer.load_state_dict(optimizer.state_dict())
    assert plan() is not third
    params[1].grad = None
    optimizer.step()
    assert len(plans_of(optimizer)) == 2 and optimizer.state[params[1]]["step"] == 9
    assert not copy.deepcopy(optimizer)._plans


# ---- stacks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [name for name in FORMATS if name != "4bit"])
def test_a_stack_equals_its_matrices(state):
    """With 4 bits, random draws differ: they depend on the number of the parameter."""
    stack = nn.Parameter(rand(3, 80, 512))
    parts = [nn.Parameter(m.clone()) for m in stack.detach()]
    whole = Muon([stack], lr=0.1, state=state, stacked=True, adjust_lr_fn="match_rms_adamw")
    separate = Muon(parts, lr=0.1, state=state, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        stack.grad = rand(3, 80, 512, seed=10 + step)
        for p, grad in zip(parts, stack.grad, strict=True):
            p.grad = grad.clone()
        whole.step()
        separate.step()
    for p, q in zip(stack, parts, strict=True):
        assert torch.equal(p, q)


def test_stacks_are_refused_where_they_are_none():
    with pytest.raises(ValueError, match=r"stacked=True takes .*got a parameter of shape \(8, 8\)"):
        Muon(parameters((8, 8)), stacked=True)
    with pytest.raises(TypeError, match="stacked must be True, False or None, got 3"):
        Muon(parameters((8, 8)), stacked=3)
    Muon([{"params": parameters((8, 8)), "use_muon": False, "stacked": True}])
    optimizer = Muon(parameters((2, 8, 8), (8,)), stacked=True)
    assert [g["stacked"] for g in optimizer.param_groups] == [True, True]
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["stacked"]  # as an older version saved it
    again = Muon(parameters((2, 8, 8), (8,)), stacked=True)
    again.load_state_dict(saved)
    assert again.param_groups[0]["stacked"]


VARIANTS = [Muon, optim.Muon4bit, optim.Muon8bit, optim.MuonFp8]
THREE = r"of shape \(4, 8, 9\) .*stacked=True .* 4 matrices of 8 x 9.*stacked=False .*4 x 72"


@pytest.mark.parametrize("cls", VARIANTS)
@pytest.mark.parametrize("group", [{}, {"use_muon": True}, {"stacked": None}])
def test_three_dimensions_need_an_answer(cls, group):
    """Nothing shows whether they are experts or a Conv1d."""
    three, others = parameters((4, 8, 9)), parameters((8, 8), (4, 8, 3, 3), (2, 3, 2, 3, 2), (8,))
    with pytest.raises(ValueError, match=f"a parameter {THREE}"):
        cls([{"params": [*others[:3], *three], **group}])
    with pytest.raises(ValueError, match=f"parameter 'up' {THREE}"):
        cls([("up", three[0])], **{k: v for k, v in group.items() if k == "stacked"})
    with pytest.raises(ValueError, match=THREE):
        optim.CPUOffloadOptimizer(three, cls)
    optimizer = cls(others)  # 4 and 5 dimensions are convolutions
    with pytest.raises(ValueError, match=THREE):
        optimizer.add_param_group({"params": three, **group})
    assert [len(g["params"]) for g in optimizer.param_groups] == [3, 1]
    for stacked in (True, False):
        optimizer.add_param_group({"params": parameters((4, 8, 9)), "stacked": stacked})
    optimizer.add_param_group({"params": parameters((4, 8, 9)), "use_muon": False})
    cls(three, stacked=True)
    cls([*three, *others], stacked=False)


@pytest.mark.parametrize("cls", VARIANTS)
@pytest.mark.parametrize("stacked", [True, False])
def test_three_dimensions_of_either_kind(cls, stacked):
    """Each equals plain matrices."""
    (three,) = parameters((2, 64, 72))
    flat = three.detach().flatten(1)
    parts = [nn.Parameter(m.clone()) for m in (three.detach() if stacked else [flat])]
    optimizers = [cls([three], stacked=stacked, state="fp32"), cls(parts, state="fp32")]
    three.grad = rand(2, 64, 72, seed=5)
    for p, grad in zip(parts, three.grad if stacked else [three.grad.flatten(1)], strict=True):
        p.grad = grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    found = three.detach() if stacked else three.detach().flatten(1)[None]
    for p, own in zip(parts, found, strict=True):
        torch.testing.assert_close(own, p.detach())


def test_an_answer_resumes():
    optimizer = Muon(parameters((2, 8, 8)), stacked=False)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["stacked"]  # as torch.optim.Muon saves it
    again = Muon(parameters((2, 8, 8)), stacked=True)
    again.load_state_dict(saved)
    assert again.param_groups[0]["stacked"] is True
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["stacked"] is False


# ---- ranks --------------------------------------------------------------------------------------------------


def test_rows_of_ranks():
    for rows in (0, 1, 5, 8, 9, 64):
        for world in (1, 2, 3, 4, 7):
            chunks = [len(c) for c in torch.arange(rows).chunk(world)] if rows else []
            expected = chunks + [0] * (world - len(chunks))
            assert row_exchange.rows_of_ranks(rows, world) == expected, (rows, world)


def sharded(values, mesh, placements):
    return nn.Parameter(distribute_tensor(values.clone().to(device()), mesh, placements))


def check_ranks(rank, world_size, mesh_shape, placements, stacked=False):
    """Several matrices of a shape, more or fewer than ranks, few rows, large batches and small ones: to the bit."""
    mesh = init_device_mesh(device(), mesh_shape)
    shapes = [(65, 96)] * 5 + [(96, 65)] * 2 + [(1, 70), (64, 64), (64, 5, 16)]
    if stacked:
        shapes = [(5, 65, 512), (4, 512, 65), (5, 65, 512), (1, 64, 64)]
    has_rows = placements[-1].is_shard(0) or placements[-1].is_replicate()
    if not has_rows:  # blocks of codes are cut unless the parts of rows are whole blocks
        shapes = [(4, 6, 512)] * 3 if stacked else [(65, 512)] * 3
    for state in ("8bit", "fp32"):
        for dtype, batch in ((torch.bfloat16, 65 * 96), (torch.float32, 2**27)):
            matrix_step.BATCH = batch
            where = (state, dtype)
            start = [rand(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
            whole = [nn.Parameter(v.clone().to(device())) for v in start]
            parts = [sharded(v, mesh, placements) for v in start]
            options = {"lr": 0.02, "state": state, "stacked": stacked}
            options["bf16_stochastic_round"] = True
            reference, optimizer = Muon(whole, **options), Muon(parts, **options)
            for step in range(2):
                for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
                    p.grad = rand(*p.shape, seed=100 * step + i).to(device(), dtype)
                    q.grad = distribute_tensor(p.grad, mesh, placements)
                reference.step()
                optimizer.step()
                for p, q in zip(whole, parts, strict=True):
                    assert torch.equal(q.full_tensor(), p), (where, step, p.shape)
                    for key, expected in reference.state[p].items() if has_rows else ():
                        assert same_state(full(optimizer.state[q][key]), expected), (where, key)
    matrix_step.BATCH = 2**27
    return True


def check_unlike_ranks(rank, world_size):
    """A kernel takes the parameters of one rank only: the ranks still exchange in one order."""
    mesh = init_device_mesh(device(), (world_size,))
    start = [rand(65, 96, seed=i) for i in range(5)]
    whole = [nn.Parameter(v.clone()) for v in start]
    parts = [sharded(v, mesh, [Shard(0)]) for v in start]
    reference = Muon(whole, lr=0.1, state="fp32")
    optimizer = Muon(parts, lr=0.1, state="fp32", fused=None if rank else False)
    for step in range(2):
        for i, (p, q) in enumerate(zip(whole, parts, strict=True)):
            p.grad = rand(*p.shape, seed=100 * step + i)
            q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        reference.step()
        optimizer.step()
    for p, q in zip(whole, parts, strict=True):
        assert relative(q.full_tensor(), p) < 1e-5
    (batch,) = plans_of(optimizer)[0].batches
    assert bool(batch.eager) == (rank == 0) and batch.exchange is not None
    return True


def check_work_is_shared(rank, world_size):
    """Every rank orthogonalizes its share, and matrices that are left over go to ranks in turn."""
    mesh = init_device_mesh(device(), (world_size,))
    params = [sharded(rand(*s), mesh, [Shard(0)]) for s in [(64, 96)] * 5 + [(96, 64)] * 3]
    for p in params:
        p.grad = p.detach().clone()
    optimizer = Muon(params)
    sizes = []
    plain, muon_step.orthogonalize = muon_step.orthogonalize, None

    def counting(matrices, **options):
        sizes.append(len(matrices))
        return plain(matrices, **options)

    muon_step.orthogonalize = counting
    try:
        optimizer.step()
    finally:
        muon_step.orthogonalize = plain
    return sizes


LAYOUTS = {
    "rows": ((2,), [Shard(0)]),
    "replicas": ((2, 1), [Replicate(), Shard(0)]),
    "rows of two dimensions": ((1, 2), [Replicate(), Shard(0)]),
    "columns": ((2,), [Shard(1)]),
    "whole": ((2,), [Replicate()]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_process(layout):
    assert launch(check_ranks, 2, *LAYOUTS[layout]) == [True, True]


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_stacks_on_two_ranks(layout):
    assert launch(check_ranks, 2, *LAYOUTS[layout], True) == [True, True]


def test_unlike_ranks():
    assert launch(check_unlike_ranks, 2) == [True, True]


def test_work_is_shared():
    assert launch(check_work_is_shared, 2) == [[3, 1], [2, 2]]


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("world", [2, 4])
def test_gpus_equal_one(world):
    found = torch.cuda.device_count()
    if found < world:
        pytest.skip(f"needs {world} GPUs; torch.cuda.device_count() is {found} here")
    for layout in (((world,), [Shard(0)]), ((2, world // 2), [Replicate(), Shard(0)])):
        for stacked in (False, True):
            results = launch(check_ranks, world, *layout, stacked, nccl=True, timeout=300.0)
            assert results == [True] * world


@pytest.mark.gpu
@every
def test_a_step_on_a_gpu_equals_one_on_the_cpu(state):
    shapes = [(128, 256), (128, 256), (256, 128), (65, 97), (128, 128)]
    on_cpu = parameters(*shapes)
    on_gpu = [nn.Parameter(p.detach().cuda()) for p in on_cpu]
    both = [Muon(p, lr=0.1, state=state, weight_decay=0.0) for p in (on_cpu, on_gpu)]
    before = [p.detach().clone() for p in on_cpu]
    set_grads(on_cpu, 0)
    for p, q in zip(on_cpu, on_gpu, strict=True):
        q.grad = p.grad.cuda()
    for optimizer in both:
        optimizer.step()
    assert all(b.directions and not b.eager for b in plans_of(both[1])[0].batches)
    for p, q, old in zip(on_cpu, on_gpu, before, strict=True):
        assert relative(q.cpu() - old, p - old) < 2e-2, p.shape
