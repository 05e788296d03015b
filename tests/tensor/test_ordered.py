"""OrderedTensor: groups of any inputs, in products, slices, copies and files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lowbit as lb
from lowbit import AffineTensor, Int4WeightOnly, IntxWeightOnly
from lowbit.formats.experts import stacked
from lowbit.tensor.frozen.ordered_tensor import OrderedTensor
from tests.tensor.cases import FrozenContract, linear_of

ROWS, COLUMNS = 24, 128


def make(
    rows: int = ROWS,
    columns: int = COLUMNS,
    dtype: torch.dtype = torch.float32,
    scheme: lb.Scheme | None = None,
    seed: int = 0,
) -> OrderedTensor:
    torch.manual_seed(seed)
    matrix = AffineTensor.from_float(
        torch.randn(rows, columns).to(dtype), scheme or Int4WeightOnly(32)
    )
    return OrderedTensor.of_sorted(matrix, torch.randperm(columns))


def by_hand(w: OrderedTensor) -> Tensor:
    values = torch.empty(w.shape, dtype=w.dtype)
    values[:, w.order[0].long()] = w.sorted_matrix.dequantize()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme",
    [Int4WeightOnly(32), IntxWeightOnly(3, 64, "asymmetric"), IntxWeightOnly(8, 32, "symmetric")],
    ids=lambda s: str(s.weight.format),
)
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (7, 192), (1, 64), (0, 64), (5, 200)], ids=str)
def test_values_and_products(shape: tuple[int, int], scheme: lb.Scheme, dtype: torch.dtype) -> None:
    w = make(*shape, dtype, scheme)
    values = by_hand(w)
    assert torch.equal(w.dequantize(), values)
    x = torch.randn(2, 3, shape[1], dtype=dtype, requires_grad=True)
    bias = torch.randn(shape[0], dtype=dtype, requires_grad=True)
    y, wanted = F.linear(x, w, bias), F.linear(x, values, bias)
    torch.testing.assert_close(y, wanted, rtol=2e-2, atol=0.05 if dtype is torch.bfloat16 else 1e-4)
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, bias], grad, allow_unused=True)
    own = torch.autograd.grad(wanted, [x, bias], grad, allow_unused=True)
    for name, a, b in zip(("x", "bias"), got, own, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-2, msg=name)


def test_the_product_is_that_of_the_sorted_codes() -> None:
    """The kernels for int4 codes multiply them."""
    w = make(64, 128, torch.bfloat16)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    trace = lb.trace(linear_of(w), x)
    assert "ordered_linear" in str(trace)
    wanted = F.linear(x[:, w.order[0].long()], w.sorted_matrix)
    assert torch.equal(F.linear(x, w), wanted)


def test_rows_transposes_and_copies() -> None:
    w = make()
    values = w.dequantize()
    assert torch.equal(w[3:11].dequantize(), values[3:11])
    assert type(w[3:11]) is OrderedTensor
    assert torch.equal(w[5], values[5])
    assert torch.equal(w.T.dequantize(), values.T)
    x = torch.randn(3, ROWS)
    torch.testing.assert_close(x @ w, x @ values)
    assert torch.equal(torch.cat([w[:8], w[8:]]).dequantize(), values)
    assert torch.equal(w.index_select(0, torch.tensor([4, 1])).dequantize(), values[[4, 1]])
    index = torch.tensor([[0, 3], [5, 5]])
    assert torch.equal(F.embedding(index, w), values[index])
    for same in (w.clone(), w.detach(), copy.deepcopy(w), w.view(-1).view(w.shape), w[:, :]):
        assert type(same) is OrderedTensor
        assert torch.equal(same.dequantize(), values)
    assert torch.equal(w.to(torch.bfloat16).dequantize(), values.bfloat16())
    assert w.nbytes_stored() == w.sorted_matrix.nbytes_stored() + 4 * COLUMNS


def test_what_is_refused() -> None:
    w = make()
    with pytest.raises(NotImplementedError, match="slicing its inputs"):
        w[:, :64]
    with pytest.raises(NotImplementedError, match="slicing its inputs"):
        w.T[:64]
    with pytest.raises(NotImplementedError, match="cat along its inputs"):
        torch.cat([w, w], 1)
    with pytest.raises(NotImplementedError, match="different order"):
        torch.cat([w, make(seed=1)])
    matrix = w.sorted_matrix
    with pytest.raises(ValueError, match="not a permutation of 128 inputs"):
        OrderedTensor.of_sorted(matrix, torch.zeros(128, dtype=torch.int32))
    with pytest.raises(ValueError, match="weight-only"):
        eight = AffineTensor.from_float(torch.randn(8, 64), lb.Int8DynamicActivationInt8Weight())
        OrderedTensor.of_sorted(eight, torch.arange(64))


def test_a_last_group_that_is_not_full() -> None:
    w = make(8, 40)
    values = by_hand(w)
    for same in (w.clone(), copy.deepcopy(w), w[:], torch.cat([w[:3], w[3:]])):
        assert type(same) is OrderedTensor and torch.equal(same.dequantize(), values)
    again = w.clone()
    again.requantize_(values)
    assert torch.equal(again.dequantize(), values)
    assert torch.equal(stacked([w, w.clone()])[1].dequantize(), values)


def test_stacks() -> None:
    experts = [make(seed=seed) for seed in range(3)]
    w = stacked(experts)
    assert type(w) is OrderedTensor and w.order.shape == (3, 1, COLUMNS)
    values = torch.stack([t.dequantize() for t in experts])
    assert torch.equal(w.dequantize(), values)
    assert torch.equal(w.mT.dequantize(), values.mT)
    assert torch.equal(w[1].dequantize(), values[1]) and torch.equal(w[1:].dequantize(), values[1:])
    x = torch.randn(3, 5, COLUMNS)
    torch.testing.assert_close(torch.bmm(x, w.mT), torch.bmm(x, values.mT))
    again = w.clone()
    again.requantize_(values)
    assert torch.equal(again.dequantize(), values)


def test_writes_round_in_the_stored_order() -> None:
    w = make()
    values = w.dequantize()
    codes = w.codes.clone()
    delta = torch.zeros_like(values)
    delta[1:, 3] = 0.5
    with pytest.warns(UserWarning, match="takes new values"), torch.no_grad():
        w += delta
    assert torch.equal(w.codes[0], codes[0]) and not torch.equal(w.codes[1:], codes[1:])
    assert float((w.dequantize() - values - delta).norm() / values.norm()) < 0.15
    other = torch.randn_like(values)
    with torch.no_grad():
        w.copy_(other)
    assert type(w) is OrderedTensor
    assert float((w.dequantize() - other).norm() / other.norm()) < 0.15


class TestContract(FrozenContract):
    def encode(self, weight: Tensor) -> OrderedTensor:
        matrix = AffineTensor.from_float(weight, IntxWeightOnly(8, None, "asymmetric"))
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(weight.shape[1], generator=generator)
        return OrderedTensor.of_sorted(matrix, order.to(weight.device))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """By the kernels for int4 codes, with the gradient of the input."""
    w = make(512, 1024, dtype, Int4WeightOnly(128)).cuda()
    values = w.dequantize()
    assert torch.equal(values.cpu(), w.cpu().dequantize())
    x = torch.randn(rows, 1024, dtype=dtype, device="cuda", requires_grad=True)
    y, wanted = F.linear(x, w), x.detach() @ values.T
    assert float((y - wanted).norm() / wanted.norm()) < 5e-3
    (grad,) = torch.autograd.grad(y.sum(), x)
    own = torch.ones_like(y) @ values
    assert float((grad - own).norm() / own.norm()) < 5e-3
