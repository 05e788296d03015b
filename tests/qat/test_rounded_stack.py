"""Experts with learned scales, rounded in their grouped products: the bits of rounded ones, and no copy is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowbit import Int4WeightOnly, Int8WeightOnly, NVFP4WeightOnly, qat, quantize_
from lowbit.layers import rounded_stack
from lowbit.layers.rounded_stack import RoundedStack
from lowbit.linear import fused_rounding
from lowbit.numerics import learned_scales
from lowbit.numerics.spec import Spec
from tests.schemes import relative_error

ROWS = [5, 0, 3, 9]  # an expert without a row
OFFSETS = torch.tensor(ROWS).cumsum(0).int()
SCHEMES = {
    "int4": Int4WeightOnly(16, "symmetric"),
    "int4-asymmetric": Int4WeightOnly(16, "asymmetric"),
    "int8": Int8WeightOnly(),
}
Product = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """A stack that is multiplied as [E, N, K], as linears are, or as [E, K, N]; groups run along the last dimension."""

    def __init__(self, product: Product, sizes: tuple[int, int], turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.turned = turned
        self.up = nn.Parameter(torch.randn(len(ROWS), *sizes).bfloat16())
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.up.transpose(-2, -1) if self.turned else self.up)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight, offs=OFFSETS)


class Squared(torch.autograd.Function):
    """Sees no function of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        values = weight + 0
        ctx.save_for_backward(x, values)
        return x[0] * values.square().sum((0, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, values = ctx.saved_tensors
        of_x = torch.zeros_like(x)
        of_x[0] = grad * values.square().sum((0, 2))
        return of_x, 2 * values * (grad * x[0])[:, None]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the kernel runs; its op's reference stands for it."""

    def runs(spec: Spec, x: Tensor, in_backward: bool = False, given: bool = False) -> bool:
        in_rows = all(size == 1 for size in spec.block_size(x.shape)[:-1])
        return in_rows and spec.scales is None and x.numel() > 0

    monkeypatch.setattr(fused_rounding, "runs", runs)
    yield


def prepared(
    name: str, product: Product = grouped, sizes: tuple[int, int] = (24, 32), turned: bool = True
) -> nn.Module:
    model = Experts(product, sizes, turned)
    if name == "stored":  # absolute scales
        quantize_(model, SCHEMES["int4"], lambda module, name: True)
        qat.prepare_(model, scales="learned")
    else:
        qat.prepare_(model, SCHEMES[name], lambda module, name: True, scales="learned")
    return model.requires_grad_(True)


def outcome(model: nn.Module) -> dict[str, Tensor]:
    x = torch.randn(sum(ROWS), 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    x.requires_grad_()
    y = model(x)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    y.backward(weights)
    found = {"y": y.detach(), "x": x.grad}
    return found | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def rounded_before(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(rounded_stack, "_rounds_later", lambda weight: False)
        return outcome(model)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and "up_scale" in found
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("turned", [True, False], ids=["[E, N, K]", "[E, K, N]"])
@pytest.mark.parametrize("name", [*SCHEMES, "stored"])
def test_products_and_gradients_have_the_bits_of_rounded_experts(
    name: str, turned: bool, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (24, 32) if turned else (32, 24)
    made = [prepared(name, sizes=sizes, turned=turned) for _ in range(2)]
    multiplied = []
    own = RoundedStack._product
    monkeypatch.setattr(RoundedStack, "_product", lambda *a: multiplied.append(a) or own(*a))
    found = outcome(made[0])
    assert len(multiplied) == 1
    assert_same(found, rounded_before(made[1], monkeypatch))


OTHERS: dict[str, Product] = {
    "sum": lambda x, w: x[:, :24] * w.sum((0, 1)),
    "index": lambda x, w: x @ w[2],
    "bmm": lambda x, w: torch.bmm(x.expand(len(ROWS), -1, -1), w),
    "twice": lambda x, w: grouped(x, w) * w.amax() + grouped(x, w),
    "below autograd": Squared.apply,
}


@pytest.mark.parametrize("trains", [True, False], ids=["weight", "scales alone"])
@pytest.mark.parametrize("product", OTHERS)
def test_other_operations_read_the_values(
    product: str, trains: bool, kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [prepared("int4", OTHERS[product]) for _ in range(2)]
    for model in made:
        model.up.requires_grad_(trains)
    found, wanted = outcome(made[0]), rounded_before(made[1], monkeypatch)
    if product != "twice":  # two gradients of bfloat16 are added, each of them rounded
        assert_same(found, wanted)
    assert found.keys() == wanted.keys()
    assert all(relative_error(found[name], wanted[name]) < 1e-2 for name in wanted)


def test_sizes_that_torch_does_not_take(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(prepared("int4", sizes=(20, 32)))
    wanted = outcome(
        prepared(
            "int4", lambda x, w: grouped(x, torch.nn.functional.pad(w, (0, 4)))[:, :20], (20, 32)
        )
    )
    assert_same(found, wanted)


def test_a_graph_keeps_no_copy_of_the_stack(kernel: None) -> None:
    model = prepared("int4")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(sum(ROWS), 32).bfloat16().requires_grad_())
    weight: Any = model.up
    others = [t for t in kept if t.numel() >= weight.numel()]
    assert others and all(t.data_ptr() == weight.weight.data_ptr() for t in others)


def test_second_derivatives_are_refused(kernel: None) -> None:
    x = torch.randn(sum(ROWS), 32).bfloat16().requires_grad_()
    with pytest.raises(NotImplementedError, match="rounded experts does not support second"):
        torch.autograd.grad(prepared("int4")(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4"])
def test_present_scales_of_few_experts_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of all at once, where experts do not share a part of their scales."""
    from lowbit import MXFP4WeightOnly

    schemes = {"mxfp4": MXFP4WeightOnly(), "nvfp4": NVFP4WeightOnly(), "int4": SCHEMES["int4"]}
    spec = schemes[name].weight
    x = torch.randn(5, 24, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[1], x[2, 0, 0] = 0, torch.nan
    found = []
    for part in (2**24, 1, 2 * 24 * 96):
        monkeypatch.setattr(learned_scales, "PART", part)
        own = x.clone().requires_grad_()
        y = fused_rounding.fake_quantize(own, spec)
        y.backward(x.flip(0).nan_to_num())
        found.append((y, own.grad))
    expected = x.clone().requires_grad_()
    whole = spec.fake_quantize(expected)
    whole.backward(x.flip(0).nan_to_num())
    for y, grad in found:
        assert torch.equal(y.nan_to_num(9), whole.nan_to_num(9)) and torch.equal(
            grad, expected.grad
        )
