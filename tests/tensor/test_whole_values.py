"""Operations that no class of trained weights implements: they compute with the values, as on a plain parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import lowbit

TRAINED = {
    "int8-products": lowbit.Int8MixedPrecision(always=True),
    "float8-blocks": lowbit.Float8BlockMixedPrecision(always=True),
    "mxfp8": lowbit.MXFP8MixedPrecision(always=True),
    "int8": lowbit.Int8Weight(),
    "int4": lowbit.Int4Weight(group_size=32),
    "bitnet": lowbit.BitNet(),
    "qat": lowbit.Int4WeightOnly(group_size=32),
    "qat-int8": lowbit.Int8DynamicActivationInt8Weight(),
}
IN_CODES = ("int8", "int4")
READS: dict[str, Callable[[Tensor], Any]] = {
    "gram": lambda w: (w.T @ w - torch.eye(64)).square().sum(),
    "gram-of-rows": lambda w: torch.einsum("nk,mk->nm", w, w),
    "inner": lambda w: torch.inner(w, w),
    "inner-of-number": lambda w: torch.inner(torch.tensor(2.0), w),
    "linear": lambda w: nn.functional.linear(w, w),
    "three": lambda w: torch.einsum("bk,nk,n->b", torch.ones(3, 64), w, torch.ones(96)),
    "rows": lambda w: torch.einsum("nk->n", w),
    "singular-values": torch.linalg.svdvals,
    "nuclear": lambda w: torch.linalg.matrix_norm(w, "nuc"),
    "variance": lambda w: w.var(1),
    "clamp": lambda w: w.clamp(-0.05, 0.05),
    "largest": lambda w: w.max(1).values,
    "median": lambda w: w.median(),
    "quantile": lambda w: torch.quantile(w, 0.3),
    "topk": lambda w: w.flatten().topk(7).values,
    "sort": lambda w: w.sort(0).values,
    "mask": lambda w: w[w > 0],
    "flat-mask": lambda w: w.view(-1)[w.view(-1) > 0],
    "flat": lambda w: w.flatten().abs(),
    "columns": lambda w: w.index_select(1, torch.tensor([3, 1])),
    "cat": lambda w: torch.cat([w, torch.zeros(1, 64)]),
    "flip": lambda w: w.flip(0),
    "distances": lambda w: torch.cdist(w, w + 1.0),
    "cosines": lambda w: nn.functional.cosine_similarity(w, torch.ones(64)),
    "pairs": lambda w: nn.functional.pairwise_distance(w, torch.ones(1, 64)),
    "kronecker": lambda w: torch.kron(torch.eye(2), w),
    "column": lambda w: w[torch.tensor([3, 4]), 2],
    "differences": lambda w: torch.diff(w, dim=1),
    "trapezoid": lambda w: torch.trapezoid(w, dim=1),
}
WITHOUT_GRADIENT: dict[str, Callable[[Tensor], Any]] = {
    "histogram": lambda w: torch.histc(w.detach(), 10),
    "numpy": lambda w: torch.from_numpy(w.detach().cpu().numpy()),
    "array": lambda w: torch.from_numpy(numpy.array(w.detach(), "float64")),
    "list": lambda w: torch.tensor(w.tolist()),
    "zeros": torch.count_nonzero,
    "close": lambda w: torch.tensor(torch.allclose(w, w)),
    "argmax": lambda w: w.argmax(1),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda w: w.masked_fill_(w > 0, 0.0),
    "index": lambda w: w.__setitem__(w.abs() > 0.05, 0.0),
    "renorm": lambda w: w.renorm_(2, 0, 0.1),
    "sign": lambda w: w.sign_(),
    "flat": lambda w: w.view(-1).clamp_(min=-0.01),
    "flat-sign": lambda w: w.view(-1).sign_(),
    "smallest": lambda w: w.clamp_min_(0),
    "add": lambda w: w.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 64)),
    "addmm": lambda w: w.addmm_(torch.ones(96, 2), torch.ones(2, 64)),
    "eye": nn.init.eye_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda w: nn.init.sparse_(w, 0.5),
    "column": lambda w: w.__setitem__((torch.tensor([3, 4]), 2), 1.0),
}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 96, bias=False)

    def forward(self, reading: Callable[[Tensor], Any]) -> Any:
        return reading(self.inner.weight)


def made(name: str) -> tuple[Reader, Tensor]:
    """A prepared model, and the values of its weight as a plain parameter."""
    torch.manual_seed(0)
    model = Reader()
    flow = lowbit.qat if name.startswith("qat") else lowbit.train
    plain = model.inner.weight.detach().clone()
    flow.prepare_(model, TRAINED[name])
    if name in IN_CODES:
        plain = model.inner.weight.detach().dequantize().clone()
    return model, plain.requires_grad_()


@pytest.mark.parametrize("name", TRAINED)
def test_a_read_outside_of_a_forward_pass_has_the_values_and_the_gradient_of_the_master(
    name: str,
) -> None:
    model, plain = made(name)
    weight: Any = model.inner.weight
    for what, read in READS.items():
        weight.grad = plain.grad = None
        found, expected = read(weight), read(plain)
        assert type(found) is Tensor and found.shape == expected.shape, what
        torch.testing.assert_close(found, expected, msg=what)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert type(weight.grad) is Tensor, what
        torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-4, atol=1e-4, msg=what)
    for what, read in WITHOUT_GRADIENT.items():
        torch.testing.assert_close(read(weight), read(plain), msg=what)


@pytest.mark.parametrize("name", ["int8-products", *IN_CODES])
def test_a_read_in_a_forward_pass_has_the_same_values_where_nothing_rounds_them_later(
    name: str,
) -> None:
    model, plain = made(name)
    for what, read in READS.items():
        torch.testing.assert_close(model(read), read(plain), msg=what)


@pytest.mark.parametrize("name", TRAINED)
def test_a_write_changes_the_weight_and_is_counted(name: str) -> None:
    for what, write in WRITES.items():
        model, plain = made(name)
        weight: Any = model.inner.weight
        version = weight._version
        for own in (weight, plain):
            torch.manual_seed(1)
            with torch.no_grad():
                write(own)
        assert weight._version > version, what
        error = (weight.detach().master() - plain.detach()).norm() / plain.detach().norm()
        most = {"int8": 0.02, "int4": 0.2}.get(name, 1e-6)
        assert error <= most, (what, error)


@pytest.mark.parametrize("name", TRAINED)
@torch.no_grad()
def test_a_wide_weight_becomes_orthogonal(name: str) -> None:
    """`nn.init.orthogonal_` transposes a new tensor like it in place."""
    model = nn.Sequential(nn.Linear(96, 64, bias=False))
    (lowbit.qat if name.startswith("qat") else lowbit.train).prepare_(model, TRAINED[name])
    weight: Any = model[0].weight
    nn.init.orthogonal_(weight)
    gram = weight.master() @ weight.master().T
    assert (gram - torch.eye(64)).norm() <= {"int8": 0.1, "int4": 1.2}.get(name, 1e-5)
    turned = weight.detach().clone()
    assert turned.t_() is turned and turned.shape == (96, 64)
    assert torch.equal(turned.dequantize(), weight.dequantize().T)


@pytest.mark.parametrize("name", TRAINED)
@torch.no_grad()
def test_writes_to_a_flat_copy_of_the_transpose_reach_the_copy(name: str) -> None:
    weight: Any = made(name)[0].inner.weight.detach()
    before = weight.master().clone()
    for write in (
        lambda t: t.clamp_(min=0),
        lambda t: t.masked_fill_(t >= 0, 1.0),
        lambda t: t.fill_(0.5),
        lambda t: t.copy_(torch.linspace(-0.1, 0.1, 96 * 64)),
    ):
        flat = weight.t().flatten()
        write(flat)
        expected = before.t().flatten()
        write(expected)
        most = {"int8": 0.02, "int4": 0.3}.get(name, 0)
        assert (flat * 1 - expected).norm() <= most * expected.norm()
    assert torch.equal(weight.master(), before)


@pytest.mark.parametrize("name", TRAINED)
@torch.no_grad()
def test_a_flat_view_takes_a_vector(name: str) -> None:
    """As `parameter.view(-1).copy_(vector[start:end])` gives a model its parameters back."""
    weight: Any = made(name)[0].inner.weight
    vector = torch.randn(96 * 64)
    weight.view(-1).copy_(vector)
    error = (weight.master() - vector.view(96, 64)).norm() / vector.norm()
    assert error <= {"int8": 0.02, "int4": 0.2}.get(name, 0)


@pytest.mark.parametrize("name", TRAINED)
def test_reads_have_the_dtype_of_the_weight(name: str) -> None:
    weight: Any = made(name)[0].inner.weight
    for dtype in (torch.bfloat16, torch.float64):
        cast = weight.to(dtype)
        for read in (torch.exp, torch.sum, torch.sort):
            found = read(cast)
            assert (found if isinstance(found, Tensor) else found.values).dtype is dtype
        assert torch.softmax(weight, 1, dtype=dtype).dtype is dtype


@pytest.mark.parametrize("name", TRAINED)
def test_shards_that_are_padded_below_autograd_keep_their_class(name: str) -> None:
    """DTensor pads those with fewer rows before it gathers. Ranks whose shards stay must send the same tensors."""
    weight: Any = made(name)[0].inner.weight.detach()
    with torch._C._AutoDispatchBelowAutograd():
        padded = nn.functional.pad(weight, (0, 0, 0, 1))
    assert type(padded) is type(weight) and padded.shape == (97, 64)


@pytest.mark.parametrize("name", ["int8-products", "int8", "bitnet", "qat"])
def test_the_weight_multiplies_from_the_left(name: str) -> None:
    model, _ = made(name)
    weight, x = model.inner.weight, torch.randn(64, 5)
    for found, expected in (
        (weight @ x, (x.T @ weight.T).T),
        (weight.T @ torch.ones(96), torch.ones(96) @ weight),
        (torch.matmul(weight, x[None]), (x.T @ weight.T).T[None]),
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", TRAINED)
def test_views_stacks_and_changes_of_shape_stay_refused(name: str) -> None:
    weight = made(name)[0].inner.weight
    for refused in (
        lambda: weight.diagonal(),
        lambda: weight.expand(2, 96, 64),
        lambda: weight.detach().unsqueeze_(0),
        lambda: weight[:, 3],
        lambda: weight[:, ::2],
        lambda: torch.func.stack_module_state([made(name)[0], made(name)[0]]),
        lambda: torch.cat(
            [weight, lowbit.AffineTensor.from_float(weight.detach().master(), TRAINED["qat"])]
        ),
    ):
        with pytest.raises(NotImplementedError, match=r"filter_fn"):
            refused()


def test_an_array_of_a_frozen_weight_is_refused_with_the_way_out() -> None:
    weight: Any = lowbit.AffineTensor.from_float(torch.randn(8, 64), lowbit.Int8WeightOnly())
    for refused in (weight.numpy, lambda: numpy.asarray(weight)):
        with pytest.raises(
            NotImplementedError, match=r"AffineTensor does not become.*dequantize\(\)"
        ):
            refused()
    assert (numpy.asarray(weight.dequantize()) == weight.dequantize().numpy()).all()
