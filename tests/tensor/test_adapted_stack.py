"""Frozen experts with an adapter: products beside each other against float64, and the sum for all that reads it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import lowbit
from lowbit.linear import lazy_stack as module
from lowbit.linear.frozen.adapted_stack import AdaptedStack
from lowbit.linear.lazy_stack import GROUPED
from lowbit_kernels.matmul import add_grouped_mm
from lowbit_kernels.matmul.add_grouped_mm import add_grouped_mm_
from lowbit_kernels.runtime.launches import counted
from tests.kernels.interpreted import interpreted
from tests.schemes import relative_error

E, N, K, S = 5, 24, 96, 0.5
ROWS = [3, 0, 7, 1, 0]  # two experts without a row
SCHEMES = {
    "int4": lowbit.Int4WeightOnly(32),
    "mxfp4": lowbit.MXFP4WeightOnly(),
    "int8": lowbit.Int8WeightOnly(),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
Operands = tuple[Any, Tensor, Tensor, Tensor, Tensor]


def operands(
    scheme: str = "int4",
    dtype: torch.dtype = torch.float32,
    rank: int = 3,
    turned: bool = True,
    sizes: tuple[int, int] = (N, K),
) -> Operands:
    """Experts [E, K, N], factors [E, K, R] and [E, R, N] with views as PEFT has them, x [M, K] and offsets."""
    torch.manual_seed(0)
    size = (E, *sizes) if turned else (E, sizes[1], sizes[0] + 8)
    weight: Any = lowbit.AffineTensor.from_float(torch.randn(size).to(dtype), SCHEMES[scheme])
    weight = weight.mT if turned else weight
    _, k, n = weight.shape
    a = torch.randn(E, rank, k).to(dtype).mT.requires_grad_()
    b = torch.randn(n, rank, E).to(dtype).permute(2, 1, 0).requires_grad_()
    with torch.no_grad():
        a.mul_(0.5)  # so that a and b have changed a different number of times
    x = torch.randn(sum(ROWS), k).to(dtype).requires_grad_()
    return weight, a, b, x, torch.tensor(ROWS).cumsum(0).int()


def added(weight: Any, a: Tensor, b: Tensor) -> Any:
    return torch.baddbmm(weight, a, b, alpha=S)


def results(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """y, and the gradients of x, a and b for a fixed gradient of y."""
    torch.manual_seed(1)
    grads = torch.autograd.grad(y, (x, a, b), torch.randn(y.shape).to(y))
    return dict(zip(("y", "x", "a", "b"), (y.detach(), *grads), strict=True))


def expected(weight: Any, a: Tensor, b: Tensor, x: Tensor) -> dict[str, Tensor]:
    """In float64, expert by expert."""
    a, b, x = (t.detach().double().requires_grad_() for t in (a, b, x))
    w = weight.dequantize().double() + S * (a @ b)
    parts = zip(x.split(ROWS), w, strict=True)
    return results(torch.cat([own @ matrix for own, matrix in parts]), x, a, b)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    bound = 6e-3 if dtype is torch.bfloat16 else 1e-6
    for name, own in found.items():
        assert own.dtype is dtype and relative_error(own.double(), wanted[name]) < bound, name


# ---- products --------------------------------------------------------------------------------------------------------


@every_scheme
@dtypes
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("rank", [1, 8, 19])
def test_products_beside_each_other(
    scheme: str, dtype: torch.dtype, turned: bool, rank: int
) -> None:
    weight, a, b, x, offsets = operands(scheme, dtype, rank, turned)
    stack = added(weight, a, b)
    with counted() as calls:
        y = GROUPED[-1](x, stack, offs=offsets)
    assert calls["add_grouped_mm", "torch"] == 1 and not stack.is_read
    assert_near(results(y, x, a, b), expected(weight, a, b, x), dtype)


def test_second_derivatives_and_transforms_are_refused() -> None:
    weight, a, b, x, offsets = operands()
    y = GROUPED[-1](x, added(weight, a, b), offs=offsets)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda a: added(weight, a, b).sum())(a.detach())


def test_of_a_transpose() -> None:
    """As transformers multiplies stacks [E, N, K]."""
    weight, a, b, x, offsets = operands()
    for turn in (
        lambda t: t.mT,
        lambda t: t.transpose(-2, -1),
        lambda t: torch.swapaxes(t, 2, 1),
        lambda t: t.mT.mT.mT,
    ):
        stack = added(weight.mT, b.mT, a.mT)
        y = torch._grouped_mm(x, turn(stack), offs=offsets)
        assert not stack.is_read
        assert_near(results(y, x, a, b), expected(weight, a, b, x), torch.float32)


@pytest.mark.parametrize("learning", ["x", "a", "b", ""])
def test_only_what_is_asked_for(learning: str) -> None:
    weight, a, b, x, offsets = operands()
    wanted = expected(weight, a, b, x)
    named = {"x": x, "a": a, "b": b}
    for name, t in named.items():
        t.requires_grad_(name == learning)
    y = torch._grouped_mm(x, added(weight, a, b), offs=offsets)
    assert y.requires_grad == bool(learning)
    if learning:
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(y, named[learning], torch.randn(y.shape))
        assert_near({learning: grad}, wanted, torch.float32)


@dtypes
@pytest.mark.parametrize("sizes", [(N, 99), (23, K), (21, 50)], ids=str)
def test_sizes_that_torch_does_not_take(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Rows of other lengths than multiples of 16 bytes."""
    weight, a, b, x, offsets = operands("int8", dtype, sizes=sizes)
    with pytest.raises(RuntimeError, match="strides"):
        plain = weight.dequantize().requires_grad_()
        torch._grouped_mm(x, plain, offs=offsets).sum().backward()
    wanted = expected(weight, a, b, x)
    for read_first in (False, True):
        stack = added(weight.mT, b.mT, a.mT)
        if read_first:
            stack.sum()
        y = torch._grouped_mm(x, stack.mT, offs=offsets)
        assert_near(results(y, x, a, b), wanted, dtype)


@dtypes
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("rank", [8, 16])
def test_factors_in_any_memory(dtype: torch.dtype, start: int, rank: int) -> None:
    """Parts of wider tensors, whose rows begin anywhere."""
    weight, a, b, x, offsets = operands("int8", dtype, rank)
    wanted = expected(weight, a, b, x)
    for turn in (False, True):
        parts = []
        for factor in (a.detach(), b.detach()):
            own = factor.mT if turn else factor
            wide = own.new_empty(E, own.shape[1] + 3, own.shape[2] + start + 2)
            part = wide[:, 1:-2, start : start + own.shape[2]].copy_(own)
            parts.append((part.mT if turn else part).requires_grad_())
        y = torch._grouped_mm(x, added(weight, *parts), offs=offsets)
        assert_near(results(y, x, *parts), wanted, dtype)


def test_no_rows_at_all() -> None:
    weight, a, b, x, offsets = operands()
    x = x.detach()[:0].requires_grad_()
    y = torch._grouped_mm(x, added(weight, a, b), offs=torch.zeros_like(offsets))
    grads = torch.autograd.grad(y.sum(), (x, a, b))
    assert y.shape == (0, N) and not any(g.any() for g in grads)


def _saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten._grouped_mm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _saves_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("policy", [None, _saves_products, _saves_all])
def test_recomputed(policy: Callable[..., CheckpointPolicy] | None) -> None:
    weight, a, b, x, offsets = operands()
    chosen = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}

    def layer(x: Tensor) -> Tensor:
        return torch._grouped_mm(x, added(weight, a, b), offs=offsets).sin()

    wanted = results(layer(x), x, a, b)
    found = results(
        checkpoint(layer, x, use_reentrant=False, **(chosen if policy else {})), x, a, b
    )
    for name, own in found.items():
        assert relative_error(own, wanted[name]) < 1e-6, name


@pytest.mark.parametrize("learns", [True, False])
def test_what_is_kept(learns: bool) -> None:
    """x and t = x · A, beside what was there before: no stack, and nothing of x where only its gradient is wanted."""
    weight, a, b, x, offsets = operands(rank=8)
    a, b = (t.detach().requires_grad_(learns) for t in (a, b))
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        torch._grouped_mm(x, added(weight.mT, b.mT, a.mT).mT, offs=offsets)
    packed = [t for t in saved if isinstance(t, lowbit.LowbitTensor)]
    parts = [[p.data_ptr() for p in w.inner_tensors().values()] for w in (*packed, weight)]
    assert len(packed) == 1 and parts[0] == parts[1]
    plain = {t.data_ptr(): tuple(t.shape) for t in saved if type(t) is Tensor}
    assert (x.data_ptr() in plain) == learns
    for known in (a, b, x, offsets):
        plain.pop(known.data_ptr(), None)
    assert list(plain.values()) == ([(len(x), 8)] if learns else [])


# ---- the sum ---------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "sum": lambda s, x, o: s.sum(),
    "arithmetic": lambda s, x, o: 2 * s + s,
    "matmul": lambda s, x, o: x @ s,
    "bmm": lambda s, x, o: torch.bmm(x.expand(E, -1, -1), s),
    "one expert": lambda s, x, o: x @ s[2],
    "linear": lambda s, x, o: F.linear(x, s[2].T),
    "einsum": lambda s, x, o: torch.einsum("mk,ekn->emn", x, s),
    "cat": lambda s, x, o: torch.cat([s, s]),
    "permute": lambda s, x, o: s.permute(2, 0, 1) * 2,
    "transposed": lambda s, x, o: s.mT * 2,
    "float64": lambda s, x, o: s.to(torch.float64) * 2,
    "clone": lambda s, x, o: s.clone(),
    "other groups": lambda s, x, o: torch._grouped_mm(x.expand(E, -1, -1), s),
    "other autograd function": lambda s, x, o: _Twice.apply(s),
    "in place": lambda s, x, o: (s.mul_(2), torch._grouped_mm(x, s, offs=o))[1],
    "in place of a transpose": lambda s, x, o: (s.mT.mul_(2), torch._grouped_mm(x, s, offs=o))[1],
    "in place without gradients": lambda s, x, o: (_doubled(s), torch._grouped_mm(x, s, offs=o))[1],
    "read without gradients": lambda s, x, o: (_read(s), s.sin())[1],
}


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


@torch.no_grad()
def _doubled(stack: Tensor) -> None:
    stack.mul_(2)


@torch.no_grad()
def _read(stack: Tensor) -> Tensor:
    return stack.sum()


@pytest.mark.parametrize("name", READS)
def test_reads_get_the_sum_with_its_gradients(name: str) -> None:
    weight, a, b, x, offsets = operands()
    found = []
    for w in (weight, weight.dequantize()):
        y = READS[name](added(w, a, b), x, offsets)
        assert type(y) is Tensor
        torch.manual_seed(1)
        grad = torch.randn(y.shape, dtype=y.dtype)
        found.append((y, *torch.autograd.grad(y, (x, a, b), grad, allow_unused=True)))
    for own, wanted in zip(*found, strict=True):
        assert (own is None) == (wanted is None)
        assert own is None or relative_error(own, wanted) < 1e-6


def test_what_describes_it_makes_no_sum() -> None:
    weight, a, b, _, _ = operands()
    stack, plain = added(weight, a, b), added(weight.dequantize(), a, b)
    assert stack.requires_grad and stack.is_leaf is False
    stack = added(weight, a, b)
    for read in (
        lambda t: (t.shape, t.size(1), len(t), t.numel(), t.ndim, t.dim()),
        lambda t: (t.dtype, t.device, t.layout, t.is_cuda, t.is_floating_point()),
    ):
        assert read(stack) == read(plain)
    assert not stack.is_read


def test_no_gradients_of_a_sum_without_them() -> None:
    weight, a, b, x, offsets = operands()
    with torch.no_grad():
        stack = added(weight, a, b)
    assert not stack.requires_grad
    y = torch._grouped_mm(x, stack, offs=offsets)
    grads = torch.autograd.grad(y.sum(), (x, a, b), allow_unused=True)
    assert grads[0] is not None and grads[1] is grads[2] is None
    assert not torch._grouped_mm(x.detach(), stack, offs=offsets).requires_grad


@torch.no_grad()
def test_copies_and_text_are_those_of_the_sum() -> None:
    weight, a, b, _, _ = operands()
    plain = added(weight.dequantize(), a, b)
    for read in (copy.deepcopy, copy.copy, lambda t: pickle.loads(pickle.dumps(t))):
        found = read(added(weight, a, b))
        assert type(found) is Tensor and relative_error(found, plain) < 1e-6
    assert str(added(weight, a, b)) == str(plain) and added(weight, a, b).tolist()


@pytest.mark.parametrize("name", ["a", "b", "weight"])
@pytest.mark.parametrize("read", [lambda s, x, o: s.sum(), READS["matmul"]], ids=["sum", "product"])
def test_a_change_before_the_sum_is_refused(name: str, read: Any) -> None:
    """torch would have added before the change."""
    weight, a, b, x, offsets = operands()
    stack = added(weight, a, b)
    with torch.no_grad():
        {"a": a, "b": b, "weight": weight}[name].mul_(2)
    with pytest.raises(RuntimeError, match="their adapter changed in place before"):
        read(stack, x, offsets)
    with pytest.raises(RuntimeError, match="their adapter changed in place before"):
        torch._grouped_mm(x, stack, offs=offsets)


def test_below_autograd_it_is_refused_by_name() -> None:
    weight, a, b, _, _ = operands()
    stack = added(weight, a, b)
    refused = pytest.raises(NotImplementedError, match=r"call \.values\(\) for plain values first")
    with torch._C.DisableTorchFunctionSubclass(), refused:
        stack + 1


# ---- what is not taken so ----------------------------------------------------------------------------------------


def test_other_sums_are_as_they_were() -> None:
    weight, a, b, _, _ = operands()
    plain = weight.dequantize()
    assert type(torch.baddbmm(plain, a, b)) is Tensor
    others: dict[str, Callable[[Any], Tensor]] = {
        "beta": lambda w: torch.baddbmm(w, a, b, beta=2, alpha=S),
        "one for all": lambda w: torch.baddbmm(w[:1], a, b),
        "dtype": lambda w: torch.baddbmm(w, a.double(), b.double()),
    }
    for name, other in others.items():
        found = other(weight)
        assert type(found) is Tensor, name
        wanted = other(plain.double() if name == "dtype" else plain)
        assert relative_error(found, wanted) < 1e-6, name
    rounding: Any = lowbit.AffineTensor.from_float(
        torch.randn(E, N, K), lowbit.Int8DynamicActivationInt4Weight(32)
    ).mT
    found = added(rounding, a, b)
    assert type(found) is Tensor
    assert relative_error(found, added(rounding.dequantize(), a, b)) < 1e-6


def test_compiled() -> None:
    weight, a, b, x, offsets = operands(dtype=torch.bfloat16, rank=8)

    def layer(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch._grouped_mm(x, added(weight, a, b), offs=offsets) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(x, a, b), layer(x, a, b)) < 1e-2
    wanted = results(layer(x, a, b), x, a, b)
    for name, own in results(compiled(x, a, b), x, a, b).items():
        assert relative_error(own, wanted[name]) < 1e-2, name


@pytest.mark.parametrize("is_product", [True, False])
def test_handed_to_a_compiled_function(is_product: bool) -> None:
    """Made by eager code, as where a block is compiled and the parametrization around it is not."""
    weight, a, b, x, offsets = operands(dtype=torch.bfloat16, rank=8)

    def layer(x: Tensor, stack: Tensor) -> Tensor:
        if is_product:
            return torch._grouped_mm(x, stack, offs=offsets) * 2
        return stack.float().sum(1) + x.float().mean()

    compiled = torch.compile(layer, backend="aot_eager")
    wanted = results(layer(x, added(weight, a, b)), x, a, b)
    for name, own in results(compiled(x, added(weight, a, b)), x, a, b).items():
        assert relative_error(own, wanted[name]) < 1e-2, name


def test_ranks_and_dtypes_of_factors_in_inference() -> None:
    with torch.inference_mode():
        weight, a, b, x, offsets = operands(rank=2)
        stack = added(weight, a, b)
        assert isinstance(stack, AdaptedStack)
        y = torch._grouped_mm(x, stack, offs=offsets)
        assert relative_error(y, torch._grouped_mm(x, stack.values(), offs=offsets)) < 1e-6
    assert module._are_last(-1, 1) and not module._are_last(0, 1) and not module._are_last(4, 2)


# ---- the kernel --------------------------------------------------------------------------------------------------

INTERPRETED = """
import json
from tests.tensor.test_adapted_stack import errors_of_kernel
print(json.dumps(errors_of_kernel("cpu")))
"""


def errors_of_kernel(device: str) -> dict[str, float]:
    """Relative errors against float64 by case; rows after the last expert's stay."""
    found = {}
    for dtype in (torch.float16, torch.float32):
        torch.manual_seed(0)
        experts, m, n, r = 5, 150, 300, 19
        offsets = torch.tensor([0, 70, 70, 75, 140], dtype=torch.int32, device=device)
        a = torch.randn(m, r, device=device).to(dtype)
        for name, size, order in (
            ("rows", (experts, r, n), (0, 1, 2)),
            ("columns", (experts, n, r), (0, 2, 1)),
            ("experts last", (n, r, experts), (2, 1, 0)),
        ):
            b = torch.randn(size, device=device).to(dtype).permute(order)
            y = torch.randn(m, n, device=device).to(dtype)
            wanted, start = y.double(), 0
            for e, end in enumerate(offsets.tolist()):
                wanted[start:end] += S * (a[start:end].double() @ b[e].double())
                start = end
            add_grouped_mm_(y, a, b, offsets, S)
            found[f"{name} {dtype}"] = float((y.double() - wanted).norm() / wanted.norm())
        y = torch.randn(m, n, device=device).to(dtype)
        wanted = y.double() + S * (a.double() @ b[1].double())
        add_grouped_mm_(y, a, b[1:2], None, S)
        found[f"one expert {dtype}"] = float((y.double() - wanted).norm() / wanted.norm())
        with mock.patch.object(add_grouped_mm, "MOST_TILES", 4), counted() as calls:
            add_grouped_mm_(y, a, b[1:2], None, S)  # of 5 tiles
        assert calls == {("add_grouped_mm", "torch"): 1}
    return found


def test_sums_in_place() -> None:
    for found in (errors_of_kernel("cpu"), interpreted(INTERPRETED)):
        for name, error in found.items():
            assert error < (1e-3 if "16" in name else 1e-6), name


@pytest.mark.gpu
def test_sums_in_place_on_cuda() -> None:
    with counted() as calls:
        found = errors_of_kernel("cuda")
    assert calls == {("add_grouped_mm", "triton"): 8, ("add_grouped_mm", "torch"): 2}
    for name, error in found.items():
        assert error < (1e-3 if "16" in name else 1e-6), name


@pytest.mark.gpu
@every_scheme
@pytest.mark.parametrize(("rank", "columns"), [(16, N), (19, N), (16, 23)])
def test_products_on_cuda(scheme: str, rank: int, columns: int) -> None:
    weight, a, b, x, offsets = operands(scheme, torch.bfloat16, rank, sizes=(columns, K))
    wanted = expected(weight, a, b, x)
    a, b, x = (t.detach().cuda().requires_grad_() for t in (a, b, x))
    y = torch._grouped_mm(x, added(weight.cuda(), a, b), offs=offsets.cuda())
    found = {name: t.cpu() for name, t in results(y, x, a, b).items()}
    assert_near(found, wanted, torch.bfloat16)
