"""CodebookTensor: layout, encoding, exact slices, and torch operations on optimizer states."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.numerics.codebook import Codebook, dequantize_blockwise, quantize_blockwise
from lowbit.tensor import CodebookTensor
from lowbit.tensor.frozen.codebook_tensor import FORMATS, row_layout

CASES = [(name, signed) for name in FORMATS for signed in (True, False)]
cases = pytest.mark.parametrize(
    "name,signed", CASES, ids=[f"{n}-{'signed' if s else 'unsigned'}" for n, s in CASES]
)


def values_of(shape, signed, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x if signed else x.square()


def make(shape, name="4bit", signed=True, seed=0):
    return CodebookTensor.from_float(values_of(shape, signed, seed), name, signed=signed)


def same(a, b):
    return (
        type(a) is type(b)
        and a.shape == b.shape
        and a.meta() == b.meta()
        and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        and torch.equal(a.scale, b.scale)
    )


@pytest.mark.parametrize(
    "shape,block,lead,cols",
    [
        ((8, 512), 128, (8,), 512),
        ((8, 100), 128, (8,), 100),
        ((8, 3, 200), 128, (8, 3), 200),
        ((8, 3, 50), 128, (8,), 150),
        ((8, 2, 3, 3, 3), 128, (8,), 54),
        ((8, 5, 16, 3, 3), 128, (8, 5), 144),
        ((1000,), 128, (1000,), 1),
        ((), 128, (), 1),
        ((0, 300), 128, (0,), 300),
        ((7, 0), 128, (7,), 0),
    ],
    ids=str,
)
def test_rows_are_the_fewest_trailing_dimensions_that_reach_a_block(shape, block, lead, cols):
    assert row_layout(shape, block) == (lead, cols)
    t = CodebookTensor.zeros(shape, "4bit", signed=True, block_size=block)
    assert t.codes.shape == (*lead, math.ceil(cols / 2))
    assert t.scale.shape == (*lead, math.ceil(cols / block))


@cases
@pytest.mark.parametrize(
    "shape",
    [(3, 300), (5, 257), (2, 3, 31), (1, 1), (6,), (), (0, 300), (4, 0), (2, 3, 8, 5)],
    ids=str,
)
def test_values_are_the_tables_nearest_of_each_block(name, signed, shape):
    x = values_of(shape, signed)
    t = CodebookTensor.from_float(x, name, signed=signed)
    form = FORMATS[name]
    lead, cols = row_layout(shape, form.block_size)
    book = torch.float8_e4m3fn if name == "float8" else Codebook(form.bits, signed)
    codes, scale = quantize_blockwise(x.reshape(*lead, cols), book, form.block_size)
    expected = dequantize_blockwise(codes, scale, book, form.block_size).view(shape)
    got = t.dequantize()
    assert got.shape == x.shape and got.dtype == torch.float32
    positive = signed | (expected > 0)  # unsigned formats replace zeros, tested below
    assert torch.equal(torch.where(positive, got, 0), torch.where(positive, expected, 0))


@cases
def test_zeros_dequantize_to_exact_zeros_and_encoded_zeros_nearly(name, signed):
    zeros = CodebookTensor.zeros((4, 300), name, signed=signed)
    assert torch.equal(zeros.dequantize(), torch.zeros(4, 300))
    encoded = CodebookTensor.from_float(torch.zeros(4, 300), name, signed=signed)
    assert encoded.dequantize().abs().max() <= 1e-24  # too small to matter in a step


@pytest.mark.parametrize("name", FORMATS)
def test_a_positive_second_moment_never_becomes_zero(name):
    x = torch.full((2, 256), 1e-30)
    x[:, 0] = 1.0
    low = CodebookTensor.from_float(x, name, signed=False).dequantize()
    assert (low > 0).all()
    assert low[:, 1:].max() <= 1 / 16
    assert torch.equal(low[:, 0], x[:, 0])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("magnitude", [2.0**-66, 2.0**-46, 1.0, 2.0**66])
def test_relative_error_does_not_depend_on_the_magnitude(name, magnitude):
    x = values_of((8, 512), False)
    at_one = CodebookTensor.from_float(x, name, signed=False).dequantize()
    scaled = CodebookTensor.from_float(x * magnitude, name, signed=False).dequantize()
    assert torch.allclose(scaled / magnitude, at_one, rtol=1e-2, atol=1e-5)


@cases
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_stay_visible_in_their_block_only(name, signed, bad):
    x = values_of((2, 512), signed)
    x[1, 300] = bad
    got = CodebookTensor.from_float(x, name, signed=signed).dequantize()
    block = FORMATS[name].block_size
    first = 300 // block * block
    assert got[1, first : first + block].isnan().all()
    got[1, first : first + block] = 0
    assert got.isfinite().all()


@cases
@given(rows=st.integers(1, 9), cols=st.integers(1, 300), data=st.data())
def test_encoding_a_slice_is_slicing_the_encoding(name, signed, rows, cols, data):
    start = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(start, rows))
    x = values_of((rows, cols), signed, seed=rows * 1000 + cols)
    whole = CodebookTensor.from_float(x, name, signed=signed)
    assert same(whole[start:end], CodebookTensor.from_float(x[start:end], name, signed=signed))


@cases
def test_dimension_0_takes_every_kind_of_slice(name, signed):
    t = make((7, 3, 150), name, signed)
    full = t.dequantize()
    assert torch.equal(t.narrow(0, 2, 3).dequantize(), full[2:5])
    for low, high in zip(t.chunk(3), full.chunk(3), strict=True):
        assert torch.equal(low.dequantize(), high)
    for low, high in zip(t.split([4, 0, 3]), full.split([4, 0, 3]), strict=True):
        assert torch.equal(low.dequantize(), high)
    assert same(torch.cat([t[:2], t[2:2], t[2:]]), t)
    t[1:3].copy_(torch.zeros(2, 3, 150))
    assert t.dequantize()[1:3].abs().max() < 1e-10, "a slice shares memory"


@cases
def test_other_dimensions_are_cut_between_blocks_only(name, signed):
    block = FORMATS[name].block_size
    t = make((4, 3 * block), name, signed)
    assert torch.equal(t[:, block : 2 * block].dequantize(), t.dequantize()[:, block : 2 * block])
    with pytest.raises(NotImplementedError, match=r"\[64:128\] along dimension 1.*dequantize"):
        t[:, 64:128]
    cube = make((4, 6, block + 2), name, signed)
    assert torch.equal(cube[:, 2:5].dequantize(), cube.dequantize()[:, 2:5])


@cases
def test_copies(name, signed):
    t, other = make((5, 200), name, signed), make((5, 200), name, signed, seed=1)
    clone = t.clone()
    assert same(clone, t) and clone.codes.data_ptr() != t.codes.data_ptr()
    clone.copy_(other)
    assert same(clone, other)
    clone.copy_(values_of((5, 200), signed).double().t().contiguous().t())
    assert same(clone, t)
    plain = torch.empty(5, 200, dtype=torch.bfloat16)
    assert torch.equal(plain.copy_(t), t.dequantize().bfloat16())
    assert same(copy.deepcopy(t), t)
    assert same(t.detach(), t) and t.detach().codes.data_ptr() == t.codes.data_ptr()
    assert same(t.to("cpu"), t) and same(t.cpu(), t)
    new = t.new_zeros((9, 200))
    assert isinstance(new, CodebookTensor) and torch.equal(new.dequantize(), torch.zeros(9, 200))
    assert same(t.view(-1).view(5, 200), t)
    flat = t.view(-1)
    assert torch.equal(flat.dequantize(), t.dequantize().view(-1))
    flat.copy_(other.dequantize().view(-1))
    assert torch.allclose(t.dequantize(), other.dequantize(), rtol=0.2)


def test_copying_between_formats_says_what_to_do():
    with pytest.raises(ValueError, match=r"stored differently.*dequantize"):
        make((4, 300), "4bit").copy_(make((4, 300), "8bit"))
    with pytest.raises(ValueError, match="cannot copy shape"):
        make((4, 300)).copy_(torch.zeros(4, 299))


@cases
def test_saved_and_pickled(name, signed):
    t = make((5, 200), name, signed)
    buffer = io.BytesIO()
    torch.save({"state": t}, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True)["state"], t)
    assert same(pickle.loads(pickle.dumps(t)), t)


@cases
def test_flattened_and_rebuilt(name, signed):
    t = make((5, 200), name, signed)
    names, context = t.__tensor_flatten__()
    assert set(names) == {"codes", "scale"}
    inner = {n: getattr(t, n) for n in names}
    assert same(CodebookTensor.__tensor_unflatten__(inner, context, t.shape, t.stride()), t)
    assert f"format={name!r}" in repr(t)


@cases
def test_bytes_an_element(name, signed):
    t = make((16, 1024), name, signed)
    stored = t.codes.nbytes + t.scale.nbytes
    assert stored / t.numel() == {"4bit": 0.53125, "8bit": 1.015625, "float8": 1.015625}[name]


def test_refuses_values_that_it_cannot_store():
    with pytest.raises(ValueError, match=r"'4bit', '8bit', 'float8', got 'int4'"):
        CodebookTensor.zeros((4, 4), "int4", signed=True)
    for block in (0, 3, 2.0, True):
        with pytest.raises(ValueError, match="positive even integer"):
            CodebookTensor.zeros((4, 4), "4bit", signed=True, block_size=block)
    with pytest.raises(NotImplementedError, match=r"CodebookTensor.*aten.mul.*dequantize"):
        make((4, 300)) * 2


def test_compiles_without_a_graph_break():
    t = make((4, 300))
    compiled = torch.compile(lambda s: s.dequantize() * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(t), t.dequantize() * 2)


def test_can_be_gathered_also_where_lowbit_is_imported_before_torch_distributed():
    code = """
        import lowbit.optim
        import torch
        from lowbit.tensor import CodebookTensor
        from torch.distributed._functional_collectives import _maybe_wrap_tensor
        t = CodebookTensor.zeros((4, 300), "4bit", signed=True)
        assert type(_maybe_wrap_tensor(t)) is CodebookTensor
    """
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, check=True, timeout=120, env=path)
