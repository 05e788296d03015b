"""Slices, splits, cats, views, experts: equal to the same on the values, to the bit, or refused by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit import IntxWeightOnly
from lowbit.tensor import AffineTensor, BitNetTensor, CodebookTensor, FakeQuantizedTensor
from tests.tensor.cases import (
    CASES,
    by_class,
    check,
    each_structure,
    every_case,
    every_frozen_weight,
    every_trainable,
    every_weight,
    over,
    same,
    same_bits,
    shares_memory,
    values,
)

pytestmark = each_structure

every_transposable = over([case for case in CASES if case.is_transposable])


def cuts_well(size: int, start: int, end: int, step: int) -> bool:
    return all(edge % step == 0 or edge == size for edge in (start, end))


@every_case
@settings(max_examples=12)
@given(data=st.data())
def test_a_slice_is_the_slice_of_the_values_or_refused(case, data):
    shape = data.draw(st.tuples(st.integers(0, 20), st.integers(1, 300)), label="shape")
    dim = data.draw(st.integers(0, 1), label="dim")
    step = (case.row_step, case.column_step)[dim]
    edge = st.integers(0, shape[dim]) | st.integers(0, shape[dim] // step).map(lambda n: n * step)
    start, end = sorted((data.draw(edge, label="start"), data.draw(edge, label="end")))
    t = case.make(shape)
    index = (slice(None),) * dim + (slice(start, end),)
    if start == end:
        start = end = 0  # elsewhere an empty slice may be refused
        index = (*index[:-1], slice(0, 0))
    if (start, end) != (0, shape[dim]) and not cuts_well(shape[dim], start, end, step):
        with pytest.raises(
            NotImplementedError, match=rf"{case.kind.__name__}.*slicing.*dequantize"
        ):
            t[index]
        return
    piece = t[index]
    check(piece)
    assert same_bits(case.values_of(piece), case.values_of(t)[index].contiguous())
    assert same(t.narrow(dim, start, end - start), piece)
    if start:
        assert same(torch.ops.aten.slice(t, dim, start - shape[dim], end), piece)


@every_case
def test_a_slice_of_rows_shares_memory(case):
    t = case.make((24, 100))
    assert shares_memory(t[:8], t) and shares_memory(t.view(-1), t)
    part = case.make((8, 100), seed=1)
    try:
        t[8:16].copy_(part)
    except NotImplementedError:
        pytest.fail("copying into a slice of rows is what FSDP2 and DCP do")
    whole = case.values_of(t)
    if getattr(t, "scale", None) is None or t.scale.shape[0] > 1:
        assert same_bits(case.values_of(part), whole[8:16])


@every_case
def test_split_and_cat_give_the_tensor_back(case):
    t = case.make((24, 100))
    assert same(torch.cat(t.split([8, 0, 16])), t) and same(torch.cat([t]), t)
    wide = case.make((7, 3 * 384 + 5))
    pieces = wide.split([case.column_step * 2, wide.shape[1] - case.column_step * 2], 1)
    if case.kind is CodebookTensor:
        with pytest.raises(NotImplementedError, match=r"CodebookTensor.*cat.*dequantize"):
            torch.cat(pieces, 1)
        return
    whole = torch.cat(pieces, 1)
    check(whole)
    assert same(whole, wide)


@pytest.mark.cover("values")
@every_case
@pytest.mark.parametrize("sizes", [[8, 8], [16, 16], [32, -8]], ids=str)
def test_split_refuses_sizes_of_another_sum(case, sizes):
    t = case.make((24, 100))
    with pytest.raises(RuntimeError, match="a split of dimension 0"):
        t.split(sizes)


@by_class
@every_case
@pytest.mark.parametrize("dim", [0, 1])
def test_cat_of_two_tensors_is_the_cat_of_the_values_or_refused(case, dim):
    first, second = case.make((8, 101)), case.make((8, 101), seed=1)
    try:
        whole = torch.cat([first, second], dim)
    except NotImplementedError as error:
        assert "cat" in str(error) and "dequantize" in str(error)
        assert dim or case.row_step > 1 or case.shares_rows, "rows with their own scales join"
        return
    check(whole)
    full = torch.cat([case.values_of(first), case.values_of(second)], dim)
    assert same_bits(case.values_of(whole), full)


@every_frozen_weight
def test_cat_of_parts_that_end_within_a_byte_or_a_block_is_refused(case):
    t = case.make((7, 101))
    whole_bytes = 101 * case.bits % 8 == 0 and case.column_step == 1
    if not whole_bytes:
        with pytest.raises(NotImplementedError, match=r"cat.*dequantize"):
            torch.cat([t, t], 1)
    odd_groups = AffineTensor.from_float(values((4, 3)), IntxWeightOnly(4, 3))
    with pytest.raises(NotImplementedError, match=r"within a byte.*dequantize"):
        torch.cat([odd_groups, odd_groups], 1)


@every_case
def test_cat_refuses_strangers(case):
    """Trained weights have values for plain neighbours, and refuse frozen weights."""
    t = case.make((8, 96))
    stranger = next(c for c in CASES if c.how != case.how and not c.is_trainable).make((8, 96))
    plain = [[t, t.dequantize()], [t.dequantize(), t]]
    for pair in plain if case.is_trainable else ():
        joined = torch.cat(pair)
        assert type(joined) is torch.Tensor and joined.shape == (16, 96)
    for others in ([t, stranger], *(() if case.is_trainable else plain)):
        with pytest.raises(NotImplementedError, match=r"cat.*stored differently.*dequantize"):
            torch.cat(others)


@every_case
def test_flattened_and_viewed_back(case):
    for shape in ((7, 101), (1, 33), (1, 1), (3, 8, 48)):
        t = case.make(shape)
        for flat in (t.view(-1), t.reshape(-1), t.flatten(), t.view(t.numel())):
            assert flat.shape == (t.numel(),) and type(flat) is case.kind
            assert same_bits(flat.dequantize(), t.dequantize().reshape(-1))
            assert same(flat.view(shape), t) and same(flat.view(-1, *shape[1:]), t)
        flat = t.view(-1)
        assert same(flat.clone().view(shape), t) and same(flat.to(torch.float32), flat)
        assert same(flat.bfloat16().view(shape), t.bfloat16())
        assert torch.equal(flat, t.clone().view(-1))
        if len(t) > 1:
            for op in (lambda f: f[1:], lambda f: f.split(2), lambda f: f.view(1, -1)):
                with pytest.raises(NotImplementedError, match="dequantize"):
                    op(flat)


@every_case
def test_views_that_cut_blocks_are_refused(case):
    t = case.make((6, 100))
    for shape in ((100, 6), (6, 10, 10), (3, 2, 10, 10), (12, 50), (600, 1)):
        with pytest.raises(NotImplementedError, match=rf"{case.kind.__name__}.*view.*dequantize"):
            t.view(shape)
    assert same(t.view(6, 100), t) and same(t.view(6, -1), t) and same(t.view_as(t), t)


@every_case
def test_a_step_is_refused(case):
    with pytest.raises(NotImplementedError, match=r"step 2.*dequantize"):
        case.make((8, 96))[::2]


@every_weight
def test_leading_dimensions_merge_and_split(case):
    t = case.make((3, 8, 96))
    full = case.values_of(t)
    try:
        merged = t.view(24, 96)
    except NotImplementedError:
        assert case.row_step > 1 or case.shares_rows, "one scale a row: rows may be regrouped"
        return
    check(merged)
    assert same_bits(case.values_of(merged), full.view(24, 96))
    assert same(merged.view(3, 8, 96), t) and same(t.flatten(0, 1), merged)
    assert same(merged.unflatten(0, (3, 8)), t)


@every_weight
def test_experts_of_a_3d_weight(case):
    t = case.make((3, 16, 96))
    full = case.values_of(t)
    if "tensor" in case.name:
        with pytest.raises(NotImplementedError, match=r"expert.*dequantize"):
            t[1]
        return
    for expert, plain in zip(t, full, strict=True):
        check(expert)
        assert expert.shape == (16, 96) and same_bits(case.values_of(expert), plain)
    assert same(t[-1], t[2]) and same(t.select(0, 1), t[1]) and same(t.unbind()[2], t[2])
    assert shares_memory(t[0], t)
    assert same_bits(case.values_of(t[1:]), full[1:])
    for position in (3, -4):
        with pytest.raises(IndexError):
            t[position]
    for wrong in (lambda: t[:, 1], lambda: t[..., 0], lambda: t[0][:, 0]):
        with pytest.raises(NotImplementedError, match=r"select.*dequantize"):
            wrong()


@every_transposable
def test_transposed(case):
    for shape in ((7, 101), (16, 96), (1, 33), (0, 96), (3, 8, 96)):
        t = case.make(shape)
        full = torch.empty(shape).copy_(t.dequantize())
        turned = t.transpose(-2, -1)
        check(turned)
        assert turned.shape == full.mT.shape and turned.stride() == full.mT.stride()
        assert same_bits(turned.dequantize(), full.mT)
        assert shares_memory(turned, t) and same(turned.mT, t)
        # FSDP2 shards a stack by experts, and asks whether it is contiguous
        assert turned.is_contiguous() == (t.ndim == 3 or full.mT.is_contiguous())
        assert same_bits(turned.clone().dequantize(), full.mT)
        assert same_bits(turned.bfloat16().dequantize(), full.mT.bfloat16())
        assert same(t.transpose(0, 0), t)
        if t.ndim == 2:
            assert same(t.t(), turned) and same(t.T, turned) and same(t.t().t(), t)
    with pytest.raises(NotImplementedError, match=r"the last two.*dequantize"):
        case.make((3, 8, 96)).transpose(0, 1)


@every_case
def test_new_tensors_of_the_same_rows(case):
    """By these FSDP2 pads a shard, and gives a rank without rows one."""
    t = case.make((24, 100))
    for rows in (0, 1, 24, 33):
        zeros = t.new_zeros((rows, 100))
        assert type(zeros) is case.kind and zeros.shape == (rows, 100)
        check(zeros)
        if not case.is_trainable:
            assert torch.equal(zeros.dequantize(), torch.zeros(rows, 100))
        check(t.new_empty((rows, 100)))
        assert t.new_empty((rows, 100), dtype=torch.bfloat16).dtype is torch.bfloat16
    assert case.kind is type(t.new_empty((24, 100), device="meta"))
    for other in ((24, 99), (100,), (2, 24, 100), ()):
        assert type(t.new_zeros(other)) is torch.Tensor and t.new_zeros(other).shape == other
    if not case.is_trainable:
        assert torch.equal(torch.zeros_like(t).dequantize(), torch.zeros(24, 100))
    if case.is_transposable and not case.is_trainable:
        turned = torch.zeros_like(t.t())
        check(turned)
        assert torch.equal(turned.dequantize(), torch.zeros(100, 24))


@over([c for c in CASES if c.is_transposable and c.kind is not FakeQuantizedTensor])
def test_slices_of_a_transposed_weight(case):
    t = case.make((24, 100))
    full = t.dequantize().t()
    step = case.column_step if case.column_step < 100 else 100
    for index in (slice(0, 8), slice(8, 24), slice(16, 24)):
        assert same_bits(t.t()[:, index].dequantize(), full[:, index])
    assert same_bits(t.t()[step:].dequantize(), full[step:])
    assert same_bits(t.t()[:, 8:][:step].t().dequantize(), full[:, 8:][:step].t())


@over([case for case in CASES if case.kind is FakeQuantizedTensor])
def test_rows_of_a_transposed_qat_weight(case):
    """Parts of columns would have other scales, as those of the weight itself."""
    t = case.make((24, 96))
    step = max(case.row_step, 1)
    assert same_bits(t.t()[:, 8:16].dequantize(), t.dequantize().t()[:, 8:16]), step
    assert t.t()[:, :8].t().shape == (8, 96)


@every_transposable
def test_copy_into_a_transposed_weight(case):
    t, other = case.make((7, 101)), case.make((7, 101), seed=1)
    t.t().copy_(other.t())
    assert same(t, other)
    t.t().copy_(case.make((7, 101), seed=2).dequantize().t())
    assert same(t, case.encode(case.make((7, 101), seed=2).dequantize()))


@over([case for case in CASES if issubclass(case.kind, AffineTensor)])
def test_rows_by_index_and_mask(case):
    t = case.make((24, 100))
    full = t.dequantize()
    rows = torch.tensor([5, 0, 5, 23])
    mask = torch.arange(24) % 3 == 0
    if case.row_step > 1:
        with pytest.raises(NotImplementedError, match=r"share scales.*dequantize"):
            t[rows]
        return
    for index in (rows, mask, [1, 2], rows[:0]):
        assert same_bits(t[index].dequantize(), full[index])
        check(t[index])
    assert same(t.index_select(0, rows), t[rows])
    for wrong in (
        lambda: t[rows, rows],
        lambda: t.index_select(1, rows),
        lambda: t[rows.view(2, 2)],
    ):
        with pytest.raises(NotImplementedError, match=r"indexing.*dequantize"):
            wrong()


@every_trainable
def test_gradients_reach_a_trainable_weight_through_cuts(case):
    for cut in (lambda w: w[8:], lambda w: w.split(8)[1], lambda w: w.view(3, 8, 96)[1]):
        w = case.make((24, 96)).requires_grad_()
        if case.kind is BitNetTensor:
            with pytest.raises(NotImplementedError, match=r"part of a weight.*precompute_bitnet"):
                torch.nn.functional.linear(torch.randn(5, 96), cut(w))
            continue
        plain = w.detach().master().clone().requires_grad_()
        x = torch.randn(5, 96)
        torch.nn.functional.linear(x, cut(w)).sum().backward()
        again = case.encode(plain.detach()).requires_grad_()
        torch.nn.functional.linear(x, cut(again)).sum().backward()
        assert type(w.grad) is torch.Tensor and w.grad.shape == w.shape
        assert torch.equal(w.grad, again.grad) and w.grad.abs().sum() > 0
