"""torch.einsum, broadcast matmul and their kind over low-bit weights: right, with the gradient of the input, or refused
by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowbit
from lowbit import (
    AffineTensor,
    Float8DynamicActivationFloat8Weight,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    qat,
)
from tests.schemes import relative_error
from tests.tensor.cases import BY_NAME, CASES, by_class, every_weight, over, values

N, K, B, E = 24, 96, 5, 3
X, VECTOR, ROWS = values((B, K), 1), values((K,), 2), values((B, N), 3)
SEQUENCES, STACK = values((2, B, K), 4), values((E, B, K), 5)
FROZEN = [c for c in CASES if issubclass(c.kind, AffineTensor)]
Form = tuple[Callable[[Tensor, Any], Tensor], Tensor]

EINSUMS: dict[str, tuple[str, Tensor]] = {
    "bk,nk->bn": ("bk,nk->bn", X),
    "implicit": ("bk,nk", X),
    "output first": ("bk,nk->nb", X),
    "b s k": ("bsk, nk -> bsn", SEQUENCES),
    "...k,nk->...n": ("...k,nk->...n", SEQUENCES),
    "k,nk->n": ("k,nk->n", VECTOR),
    "sum of the input": ("bsk,nk->sn", SEQUENCES),
    "bn,nk->bk": ("bn,nk->bk", ROWS),
}
STACKED_EINSUMS: dict[str, tuple[str, Tensor]] = {
    "ebk,enk->ebn": ("ebk,enk->ebn", STACK),
    "bek,enk->ben": ("bek,enk->ben", STACK.transpose(0, 1)),
    "bk,enk->ebn": ("bk,enk->ebn", X),
    "bsk,enk->bsen": ("bsk,enk->bsen", SEQUENCES),
    "sum of experts": ("ebk,enk->bn", STACK),
    "k,enk->en": ("k,enk->en", VECTOR),
    "ebn,enk->ebk": ("ebn,enk->ebk", values((E, B, N), 6)),
}
MATRIX: dict[str, Form] = {
    "w @ x": (lambda x, w: w @ x.T, X),
    "mm(w, x)": (lambda x, w: torch.mm(w, x.T), X),
    "w @ vector": (lambda x, w: w @ x, VECTOR),
    "w @ sequences": (lambda x, w: w @ x.mT, SEQUENCES),
    "linalg.matmul": (lambda x, w: torch.linalg.matmul(x, w.T), X),
    "mv": (lambda x, w: torch.mv(w, x), VECTOR),
    "addmv": (lambda x, w: torch.addmv(torch.ones(N), w, x, beta=2, alpha=0.5), VECTOR),
    "inner": (torch.inner, SEQUENCES),
    "inner(w, x)": (lambda x, w: torch.inner(w, x), X),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [1])), SEQUENCES),
    "lists of dimensions": (lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]), X),
    "multi_dot": (lambda x, w: torch.linalg.multi_dot([x, w.T, ROWS.T]), X),
    "tensordot(w, x)": (lambda x, w: torch.tensordot(w, x.T, dims=1), X),
}
STACKED: dict[str, Form] = {
    "x @ experts": (lambda x, w: torch.matmul(x, w.transpose(1, 2)), X),
    "x[None] @ experts": (lambda x, w: torch.matmul(x[None], w.mT), X),
    "x[:, None] @ experts": (lambda x, w: x[:, None] @ w.mT, SEQUENCES),
    "stack @ experts": (lambda x, w: x @ w.mT, STACK),
    "vector @ experts": (lambda x, w: x @ w.mT, VECTOR),
    "experts @ x": (lambda x, w: w @ x.T, X),
    "experts @ vector": (lambda x, w: w @ x, VECTOR),
    "experts @ x[:, None]": (lambda x, w: w @ x[:, None].mT, SEQUENCES),
    "x @ one expert": (lambda x, w: x @ w[:1].mT, STACK),
    "baddbmm": (lambda x, w: torch.baddbmm(torch.ones(N), x, w.mT, beta=2, alpha=0.5), STACK),
    "addbmm": (lambda x, w: torch.addbmm(torch.ones(B, N), x, w.mT), STACK),
    "experts + a product": (lambda x, w: torch.baddbmm(w, torch.ones(E, N, 1), x[:, :1]), STACK),
    "inner(x, experts)": (torch.inner, X),
    "tensordot(x, experts)": (lambda x, w: torch.tensordot(x, w, dims=([1], [2])), X),
}


def made(case: Any, shape: tuple[int, ...]) -> Any:
    return nn.Parameter(case.make(shape), requires_grad=case.is_trainable)


def found_and_gradient(run: Callable[[Tensor, Any], Tensor], x: Tensor, w: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = run(x, w)
    (grad,) = torch.autograd.grad((y * values(y.shape, 7)).sum(), x)
    return [y.detach(), grad]


def check(case: Any, run: Callable[[Tensor, Any], Tensor], x: Tensor, w: Any) -> None:
    """Against the plain values; the input and what is rounded of it have scales of their own."""
    expected = found_and_gradient(run, x, w.dequantize())
    bound = 1e-5 if case.activation is None else 0.06
    for y, e in zip(found_and_gradient(run, x, w), expected, strict=True):
        assert type(y) is Tensor and y.shape == e.shape
        assert relative_error(y, e) < bound
    with torch.inference_mode():
        assert relative_error(run(x, w), expected[0]) < bound


@by_class
@pytest.mark.parametrize("form", EINSUMS)
@over(FROZEN)
def test_einsum_of_a_matrix(case: Any, form: str) -> None:
    equation, x = EINSUMS[form]
    w = made(case, (N, K))
    check(case, lambda x, w: torch.einsum(equation, x, w), x, w)
    if form == "bk,nk->bn":
        assert torch.equal(torch.einsum(equation, x, w), F.linear(x, w))
        assert torch.equal(torch.einsum("nk,bk->bn", [w, x]), F.linear(x, w))


@by_class
@pytest.mark.parametrize("form", STACKED_EINSUMS)
@over(FROZEN)
def test_einsum_of_experts(case: Any, form: str) -> None:
    equation, x = STACKED_EINSUMS[form]
    check(case, lambda x, w: torch.einsum(equation, x, w), x, made(case, (E, N, K)))


@by_class
@pytest.mark.parametrize("form", MATRIX)
@over(FROZEN)
def test_products_of_a_matrix(case: Any, form: str) -> None:
    run, x = MATRIX[form]
    check(case, run, x, made(case, (N, K)))


@by_class
@pytest.mark.parametrize("form", STACKED)
@over(FROZEN)
def test_products_of_experts(case: Any, form: str) -> None:
    run, x = STACKED[form]
    if form == "x @ one expert" and case.shares_rows:
        pytest.skip("experts share scales, so that none is sliced")
    check(case, run, x, made(case, (E, N, K)))


@every_weight
def test_einsum_is_the_linear_of_every_weight(case: Any) -> None:
    """Trained weights too, which get their gradient."""
    w, twin = made(case, (N, K)), made(case, (N, K))
    y, expected = torch.einsum("bk,nk->bn", X, w), F.linear(X, twin)
    torch.testing.assert_close(y, expected)
    if case.is_trainable:
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(w.grad, twin.grad)


@over(FROZEN)
def test_other_contractions(case: Any) -> None:
    """They read the values of a weight-only weight. What rounds inputs does not say which operand of them is one."""
    w = made(case, (N, K))
    forms = {"nk,nk->n": values((N, K), 8), "bk,nk->bnk": X, "nn,nk->k": values((N, N), 9)}
    for equation, x in forms.items():
        if case.activation is None:
            check(case, lambda x, w, e=equation: torch.einsum(e, x, w), x, w)
            continue
        with pytest.raises(NotImplementedError, match=r"torch\.einsum\('.*accepted: .*'bk,nk->bn'"):
            torch.einsum(equation, x, w)


class Reads(nn.Module):
    """Contracts the weight of its linear, as latent attention does."""

    def __init__(self, run: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.run, self.proj = run, nn.Linear(K, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.proj.weight)


IN_FORWARD: dict[str, Form] = {
    **{f: (lambda x, w, e=e: torch.einsum(e, x, w), x) for f, (e, x) in EINSUMS.items()},  # type: ignore[misc]
    **{f: MATRIX[f] for f in ("mv", "addmv", "inner", "inner(w, x)", "tensordot", "linalg.matmul")},
    **{f: MATRIX[f] for f in ("multi_dot", "lists of dimensions")},
}
PREPARED = {
    "int4": Int4WeightOnly(16),
    "int8-int4": Int8DynamicActivationInt4Weight(16),
    "float8-float8": Float8DynamicActivationFloat8Weight(),
}


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("scales", ["present", "learned"])
@pytest.mark.parametrize("scheme", PREPARED.values(), ids=PREPARED)
@pytest.mark.parametrize("form", IN_FORWARD)
def test_prepared_contractions_equal_the_converted_ones(
    form: str, scheme: Any, scales: Any
) -> None:
    """Their inputs are rounded too."""
    run, x = IN_FORWARD[form]
    model = Reads(run)
    qat.prepare_(model, scheme, scales=scales)
    y = model(x)
    y.square().sum().backward()
    assert all(bool(p.grad.any()) for p in model.parameters())  # type: ignore[union-attr]
    qat.convert_(model)
    if scheme.activation is not None:
        assert torch.equal(model(x), y)
    else:  # plain values, which torch may add in another order
        assert relative_error(y, model(x)) < 1e-6


REFUSED: dict[str, Callable[[Tensor, Any], Any]] = {
    "two weights": lambda x, w: torch.einsum("bk,nk->bn", w, w),
    "out=": lambda x, w: torch.tensordot(x, w, dims=([1], [1]), out=torch.empty(B, N)),
    "a sum with out=": lambda x, w: torch.addmv(torch.ones(N), w, VECTOR, out=torch.empty(N)),
    "bilinear": lambda x, w: F.bilinear(x, x, w[None]),
    "cdist": lambda x, w: torch.cdist(x, w),
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused_by_name(form: str) -> None:
    w = made(BY_NAME["int4-g32"], (N, K))
    with pytest.raises(NotImplementedError, match=r"AffineTensor.*\.dequantize\(\)"):
        REFUSED[form](X, w)


def test_equations_that_do_not_fit_are_torchs_errors() -> None:
    w = made(BY_NAME["int4-g32"], (N, K))
    for equation in ("bk,nk->bz", "bk->b", "bkz,nk->bn"):
        with pytest.raises((RuntimeError, ValueError)):
            torch.einsum(equation, X, w)
    with pytest.raises((RuntimeError, ValueError)):
        torch.einsum("bk,nk->bn", ROWS, w)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_an_adapter_added_to_frozen_experts(transposed: bool, autocast: bool) -> None:
    """As PEFT adds it: in the memory of the values, with the sum of torch, gradients to both factors, and the weight
    as it was."""
    torch.manual_seed(0)
    weight: Any = lowbit.AffineTensor.from_float(
        torch.randn(E, N, 64).bfloat16(), lowbit.Int8WeightOnly()
    )
    weight = weight.transpose(1, 2) if transposed else weight
    plain = weight.dequantize()
    dtype = torch.float32 if autocast else torch.bfloat16
    found = []
    for w in (weight, plain):
        torch.manual_seed(1)
        a, b = (
            torch.randn(E, *size, dtype=dtype).requires_grad_()
            for size in ((w.shape[1], 3), (3, w.shape[2]))
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = torch.baddbmm(w, a, b, alpha=0.5)
        assert y.dtype is torch.bfloat16
        (y.float() ** 2).sum().backward()
        found.append((y.detach(), a.grad, b.grad))
    for own, wanted in zip(*found, strict=True):
        assert relative_error(own, wanted) < 2**-7
    assert torch.equal(weight.dequantize(), plain)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        saved: list[Tensor] = []
        torch.baddbmm(weight, a.bfloat16(), b.bfloat16())
    assert all(t.numel() < plain.numel() for t in saved)
