"""`tensor[i]` of a low-bit matrix is its row; writes to a part arrive or are refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowbit import (
    AffineTensor,
    Int,
    Int4WeightOnly,
    Int8WeightOnly,
    NVFP4WeightOnly,
    PerTensor,
    Scheme,
    Spec,
)
from lowbit.tensor import CodebookTensor, TableTensor
from tests.tensor.cases import (
    CASES,
    by_class,
    every_case,
    every_master,
    every_trainable,
    over,
    same_bits,
)

every_transposable = over([case for case in CASES if case.is_transposable])
every_copying = over([case for case in CASES if not case.has_master])


def rows_of(case, t) -> Tensor:
    """The expected rows: those of the high-precision values where the weight keeps them."""
    return (t.master() if case.has_master else t.dequantize()).clone()


@every_case
def test_an_index_gives_a_row(case) -> None:
    t = case.make((8, 96))
    full = rows_of(case, t)
    for i in (0, 3, 7, -1, -8, np.int64(2), torch.tensor(5)):
        row = t[i]
        assert not isinstance(row, AffineTensor | CodebookTensor) and row.shape == (96,)
        assert row.dtype is t.dtype and same_bits(row, full[int(i)])
    assert same_bits(t.select(0, -3), full[5]) and same_bits(torch.select(t, 0, 2), full[2])
    assert t[3, 5].item() == full[3, 5].item() and same_bits(t[3, 2:7], full[3, 2:7])
    if case.is_weight and "tensor" not in case.name:
        expert = case.make((3, 8, 96))[1]
        assert same_bits(expert[4], rows_of(case, expert)[4])


@every_transposable
def test_rows_of_a_transpose_are_columns(case) -> None:
    t = case.make((8, 96))
    full = rows_of(case, t)
    for i in (0, 95, -2):
        assert same_bits(t.t()[i], full[:, i])
    for row, expected in zip(t.t().unbind(), full.unbind(1), strict=True):
        assert same_bits(row, expected)


@pytest.mark.cover("values")
@every_case
@pytest.mark.parametrize("position", [8, -9, torch.tensor(8)], ids=str)
def test_out_of_range(case, position) -> None:
    t = case.make((8, 96))
    for read in (lambda: t[position], lambda: t.select(0, int(position))):
        with pytest.raises(IndexError):
            read()
    with pytest.raises(IndexError, match=r"out of range for a dimension of 8"):
        t[position] = 0.0
    with pytest.raises(IndexError):
        case.make((0, 96))[0]


@every_case
def test_all_rows_in_turn(case) -> None:
    t = case.make((8, 96))
    full = rows_of(case, t)
    assert len(t) == 8
    for rows in (list(t), t.unbind(), torch.unbind(t, 0)):
        assert len(rows) == 8
        assert all(same_bits(row, plain) for row, plain in zip(rows, full, strict=True))
    assert list(case.make((0, 96))) == []


@every_case
def test_other_indices_are_right_or_say_what_to_do(case) -> None:
    t = case.make((8, 96))
    assert t[...].shape == t[:].shape == t[..., :].shape == (8, 96)
    mask = torch.zeros(8, 96, dtype=torch.bool)
    if case.is_trainable:
        assert t[mask].shape == (0,)
    for wrong in (
        *(lambda: t[None], lambda: t[:, 0], lambda: t[..., 0], lambda: t.unbind(1)),
        *(() if case.is_trainable else (lambda: t[mask], lambda: t[True])),
    ):
        with pytest.raises(NotImplementedError, match="dequantize"):
            wrong()


def test_a_mask_has_an_element_a_row() -> None:
    weight = AffineTensor.from_float(torch.randn(8, 32), Int4WeightOnly(32))
    for length in (5, 9):
        with pytest.raises(IndexError, match=f"a mask of {length} elements over the 8 rows"):
            weight[torch.zeros(length, dtype=torch.bool)]


# ---- a row that is a copy -------------------------------------------------------------------------------------


@every_copying
def test_a_copied_row_reads_like_a_tensor_and_takes_no_writes(case) -> None:
    t = case.make((8, 96))
    before = t.dequantize()
    row = t[2]
    assert type(row + 1) is type(row.clone()) is type(row.float() * 2) is Tensor
    assert row.tolist() == before[2].tolist() and row.numpy().shape == (96,)
    assert torch.equal(row, before[2]) and torch.dot(row, row) > 0
    for write in (
        *(lambda: row.zero_(), lambda: row.__iadd__(1), lambda: row.__setitem__(0, 1.0)),
        *(lambda: row[3:5].fill_(0), lambda: torch.neg(before[2], out=row), lambda: row.copy_(row)),
        *(
            lambda: nn.init.zeros_(row),
            lambda: next(iter(t)).mul_(2),
            lambda: t.unbind()[0].zero_(),
        ),
        lambda: t.select(0, 1).zero_(),
    ):
        with pytest.raises(NotImplementedError, match=r"is a copy.*tensor\[i\] = values"):
            write()
    assert torch.equal(t.dequantize(), before)
    own = row.clone().zero_()
    assert not own.any()


def test_a_number_of_a_copied_row_is_formatted() -> None:
    t = AffineTensor.from_float(torch.randn(4, 32), Int8WeightOnly())
    assert f"{t[1][2]:.3f} {t[1, 2]:6.2e}" == f"{t[1][2].item():.3f} {t[1, 2].item():6.2e}"
    assert f"{t[1]}" == str(t[1])


def test_a_copied_row_is_pickled_as_the_plain_tensor() -> None:
    row = AffineTensor.from_float(torch.randn(8, 32), Int4WeightOnly(32))[3]
    assert type(pickle.loads(pickle.dumps(row))) is Tensor
    file = io.BytesIO()
    torch.save({"row": row}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["row"]
    assert type(loaded) is Tensor and torch.equal(loaded, row)
    assert torch.equal(copy.deepcopy(row), row)


@every_master
def test_a_row_of_kept_values_is_a_view(case) -> None:
    t = case.make((8, 96))
    t[2].zero_()
    t[3][5:7] = 9.0
    assert not t.master()[2].any() and t.master()[3, 5:7].tolist() == [9.0, 9.0]
    if not case.is_cast:  # its dtype is then not that of the values inside
        cast = t.to(torch.bfloat16)
        assert cast[1].dtype is torch.bfloat16
        with pytest.raises(NotImplementedError, match="is a copy"):
            cast[1].zero_()


@every_trainable
def test_a_gradient_through_a_row(case) -> None:
    t = case.make((8, 96)).requires_grad_()
    t[3].square().sum().backward()
    assert t.grad.shape == (8, 96) and t.grad[3].any()
    assert torch.allclose(t.grad[3], 2 * rows_of(case, t)[3]) and not t.grad[:3].any()


def test_compiled() -> None:
    torch._dynamo.reset()
    weight = AffineTensor.from_float(torch.randn(8, 32), Int4WeightOnly(32))
    found = torch.compile(lambda w: w[3] * 2, fullgraph=True, backend="aot_eager")(weight)
    assert torch.equal(found, weight.dequantize()[3] * 2)
    torch._dynamo.reset()


# ---- writing to a part ----------------------------------------------------------------------------------------


@by_class
@every_case
@pytest.mark.parametrize(
    "index",
    [2, -1, slice(0, 2), slice(None), ..., (1, slice(0, 32)), (slice(None), slice(0, 32)), (2, 5)],
    ids=str,
)
def test_writes_arrive_or_are_refused(case, index) -> None:
    """Before, a part of a weight of one scale took the scale along, and changed all the rest."""
    t = case.make((8, 96))
    expected = case.values_of(t).clone()
    before = t.clone()
    expected[index] = values = torch.rand_like(expected[index]) + 0.5
    try:
        t[index] = values
    except NotImplementedError as error:
        assert "dequantize" in str(error)
        assert same_bits(case.values_of(t), case.values_of(before))
        return
    found = case.values_of(t)
    untouched = torch.ones_like(expected, dtype=torch.bool)
    untouched[index] = False
    assert same_bits(found[untouched], case.values_of(before)[untouched])
    if not case.is_qat:
        written = case.encode(values if values.ndim == 2 else values[None].expand(1, -1))
        if values.shape[-1:] == (96,) and case.kind is not CodebookTensor:
            assert same_bits(found[index].reshape(-1, 96), case.values_of(written))


PARTS = {
    "rows": lambda t: t[:4],
    "columns": lambda t: t[:, :32],
    "rows, then columns": lambda t: t[:4][:, :32],
    "columns, then rows": lambda t: t[:, :32][:4],
    "detached columns": lambda t: t[:, :32].detach(),
    "columns of the transpose": lambda t: t.t()[:32],
    "a chunk": lambda t: t.chunk(3, 1)[0],
}
WRITES = {
    "mul_": lambda part: part.mul_(3),
    "add_": lambda part: part.add_(5),
    "copy_": lambda part: part.copy_(torch.full(tuple(part.shape), 7.0)),
    "a list": lambda part: torch._foreach_copy_([part], [torch.full(tuple(part.shape), 7.0)]),
}


@by_class
@every_case
@pytest.mark.filterwarnings("ignore:.* takes new values")
@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_changes_of_a_slice_leave_the_rest_or_are_refused(case, part) -> None:
    try:
        rest = PARTS[part](torch.arange(8 * 96.0).reshape(8, 96)).long()
        PARTS[part](case.make((8, 96)))
    except NotImplementedError:
        pytest.skip("it has no such part")
    for name, write in WRITES.items():
        t = case.make((8, 96))
        before = case.values_of(t).clone()
        is_rest = torch.ones(8 * 96, dtype=torch.bool)
        is_rest[rest.flatten()] = False
        try:
            write(PARTS[part](t))
        except NotImplementedError:
            is_rest[:] = True
        is_rest = is_rest.view(8, 96)
        assert same_bits(case.values_of(t)[is_rest], before[is_rest]), name


@torch.no_grad()
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, torch.clone, lambda t: pickle.loads(pickle.dumps(t)), lambda t: t.bfloat16()],
    ids=["deepcopy", "clone", "pickle", "bfloat16"],
)
def test_a_copy_of_a_part_takes_new_values(copied) -> None:
    whole = AffineTensor.from_float(torch.randn(8, 64), Int8WeightOnly())
    before = whole.dequantize()
    part = copied(whole[:, :32])
    part.copy_(torch.full((8, 32), 7.0, dtype=part.dtype))
    assert (part.dequantize() == 7).all() and same_bits(whole.dequantize(), before)


@torch.no_grad()
def test_a_part_whose_rest_is_zeros_takes_values_of_any_size() -> None:
    """FSDP2 pads shards with zeros, and torch's broadcast of a state dict writes to what is not padding."""
    one_scale = Scheme(Spec(Int(8), PerTensor()))
    for kind, scheme in ((AffineTensor, one_scale), (TableTensor, NVFP4WeightOnly())):
        x = torch.randn(7, 64) * 5
        padded: Any = kind.from_float(x, scheme).new_zeros((9, 64))
        padded[:7].copy_(x)
        assert (padded.dequantize()[:7] - x).norm() < 0.12 * x.norm()
        assert padded.dequantize()[7:].count_nonzero() == 0
        with pytest.raises(NotImplementedError, match="with the rest"):
            padded[7:].copy_(x[:2] * 9)


def test_a_number_and_a_low_bit_row_are_written_too() -> None:
    a, b = (AffineTensor.from_float(torch.randn(8, 32), Int8WeightOnly()) for _ in range(2))
    a[3] = 0.0
    assert not a[3].any() and a[2].any()
    a[4:6] = b[:2]
    assert torch.equal(a[4:6], b[:2])
    a[6] = b[7]
    assert torch.allclose(a[6], b[7], rtol=0.01, atol=0.01)


def test_writes_to_a_copied_row_by_other_ways_are_refused() -> None:
    weight = AffineTensor.from_float(torch.randn(8, 64), Int8WeightOnly())
    row = weight[0]
    writes = (
        lambda: torch._foreach_add_([row], 1.0),
        lambda: torch.max(torch.randn(64, 4), 1, out=(row, torch.zeros(64, dtype=torch.int64))),
        lambda: setattr(row, "data", torch.zeros(64)),
    )
    for write in writes:
        with pytest.raises(NotImplementedError, match="a row of a low-bit tensor is a copy"):
            write()
    with pytest.raises(ValueError, match="read-only"):
        row.numpy()[0] = 5
    assert row.to_sparse().layout is torch.sparse_coo


def test_a_copied_row_enters_a_compiled_function() -> None:
    row = AffineTensor.from_float(torch.randn(8, 64), Int8WeightOnly())[1]
    compiled = torch.compile(lambda x: x.view(8, 8) * 2, backend="aot_eager")
    assert torch.equal(compiled(row), row.view(8, 8) * 2)


def test_a_low_bit_tensor_may_be_any_argument() -> None:
    weight, plain = (
        AffineTensor.from_float(torch.randn(8, 64), Int8WeightOnly()),
        torch.zeros(9, 64),
    )
    plain[:8] = weight
    assert torch.equal(plain[:8], weight.dequantize())
    assert torch.equal(torch.select(input=weight, dim=0, index=1), weight[1])
    assert len(torch.unbind(input=weight)) == 8


FROZEN = [case for case in CASES if case.is_weight and not case.is_trainable]
HAVE_ZERO = [case for case in FROZEN if "half-integer" not in case.name]


@over(HAVE_ZERO)
def test_a_part_takes_zeros_whatever_it_shares(case) -> None:
    """Zero is a code of every scale, so no other value changes."""
    for part in ((0,), (slice(1, 3),), (slice(None), slice(96, 192)), (slice(4, None), slice(96))):
        t = case.make((8, 192))
        if "8x16" in case.name and part[0] != slice(None):
            continue  # a block has all 8 rows
        expected = t.dequantize().clone()
        expected[part] = 0
        found = [t, t.clone()]
        t[part] = 0
        found[1][slice(1) if part == (0,) else part].zero_()  # a row is a copy
        for written in found:
            assert torch.equal(written.dequantize(), expected), part
        assert t.dequantize().any()


@over([case for case in HAVE_ZERO if "float-zero-point" not in case.name])
def test_zeros_by_a_mask_keep_all_other_values(case) -> None:
    """As pruning writes them, without the warning of values that are rounded."""
    for write in (
        lambda t, mask: t.masked_fill_(mask, 0),
        lambda t, mask: t.masked_fill_(mask, torch.zeros(())),
        lambda t, mask: t.__setitem__(mask, 0),
        lambda t, mask: t.__setitem__(mask, torch.zeros(int(mask.sum()), dtype=t.dtype)),
        lambda t, mask: t.mul_((~mask).to(t.dtype)),
    ):
        t = case.make((8, 192)).to(torch.bfloat16)
        mask, expected = torch.rand(8, 192) > 0.5, t.dequantize()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            write(t, mask)
            write(case.make((0, 192)), mask[:0])
        assert torch.equal(t.dequantize(), expected.masked_fill(mask, 0))
        t.index_fill_(0, torch.tensor([2, 5]), 0)
        assert not t.dequantize()[[2, 5]].any()
        t.fill_(torch.zeros(()))
        assert not t.dequantize().any()


@pytest.mark.gpu
@over(FROZEN)
def test_values_of_the_host_are_written_on_a_gpu(case) -> None:
    t, new = case.make((16, 192)), torch.randn(16, 192)
    found, expected = t.cuda(), t.cuda()
    found.copy_(t.dequantize())
    assert same_bits(found.cpu(), t)
    found.copy_(new)
    expected.copy_(new.cuda())
    assert same_bits(found, expected)
