"""Codebooks: the tables as specified, and the nearest code exactly, ties and boundaries included."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.numerics.codebook import (
    ABSMAX_FLOOR,
    Codebook,
    dequantize_blockwise,
    quantize_blockwise,
)

SQUARES, POWERS = Codebook(4, True), Codebook(4, False)
BOOKS = [Codebook(bits, signed) for bits, signed in itertools.product((4, 8), (True, False))]
FORMATS = [*BOOKS, torch.float8_e4m3fn]
IDS = ["signed4", "unsigned4", "signed8", "unsigned8", "float8"]


def name(book: Codebook) -> str:
    return f"{'signed' if book.signed else 'unsigned'}{book.bits}"


def encode_by_search(book: Codebook, x: torch.Tensor) -> torch.Tensor:
    """The oracle of `Codebook.encode`: a binary search over exact float64 midpoints."""
    values = book.table(x.device).double()
    midpoints = (values[:-1] + values[1:]) / 2
    return torch.searchsorted(midpoints, x.double(), right=False).to(torch.uint8)


def largest_error(book: Codebook | torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """The largest error of an element ``x`` (float64), in units of its block's absmax."""
    if not isinstance(book, Codebook):
        return x.abs() / 16 + 2.0**-10 / 448
    if (
        book == POWERS
    ):  # half a distance, and the smallest value, of a scale up to twice the largest
        return x.abs() / 3 + 2.0**-14
    table = book.table()[:15].double() if book == SQUARES else book.table().double()
    below = table[0] - (-1 if book.signed else 0)
    return torch.full_like(x, max(float(table.diff().max()) / 2, float(below)) + 1e-6)


def test_4_bit_tables() -> None:
    squares = [i * i / 49 for i in range(9)]
    expected = [-v for v in reversed(squares[1:8])] + squares
    assert torch.equal(SQUARES.table(), torch.tensor(expected))
    assert POWERS.table().tolist() == [2.0**-k for k in range(15, -1, -1)]


@pytest.mark.parametrize("signed", [True, False], ids=["signed8", "unsigned8"])
def test_8_bit_tables_are_the_dynamic_map(signed: bool) -> None:
    # Decade by decade, as arXiv 2110.02861 builds it: means of 2**k equal parts of [0.1, 1].
    values = [0.0, 1.0]
    for k in range(0 if signed else 1, 7 if signed else 8):
        edges = np.linspace(0.1, 1, 2**k + 1)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (k - (6 if signed else 7))
        values += [*means, *(-means if signed else [])]
    expected = torch.tensor(sorted(values), dtype=torch.float64)
    table = Codebook(8, signed).table()
    assert table.dtype == torch.float32 and len(values) == 256
    assert torch.allclose(table.double(), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("book", "digest"),
    [
        (SQUARES, "69d3cf129f1e0c4a"),
        (POWERS, "7e026c92d3a8759e"),
        (Codebook(8, True), "035c4114538df2a0"),
        (Codebook(8, False), "02a9b523750e2134"),
    ],
    ids=IDS[:4],
)
def test_the_tables_never_change(book: Codebook, digest: str) -> None:
    table = book.table()
    assert (table.diff() > 0).all()
    assert hashlib.sha256(table.numpy().tobytes()).hexdigest()[:16] == digest


def float32_midpoints(book: Codebook) -> torch.Tensor:
    values = book.table().double()
    return ((values[1:] + values[:-1]) / 2).float()


def around(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """Every float32 within ``ulps`` of each element of ``x``."""
    steps = torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return (x.contiguous().view(torch.int32)[:, None] + steps).flatten().view(torch.float32)


def assert_nearest(book: Codebook, x: torch.Tensor) -> None:
    codes, expected = book.encode(x), encode_by_search(book, x)
    wrong = (codes != expected).nonzero().flatten()[:5]
    assert torch.equal(codes, expected), (
        f"{len(wrong)}+ wrong: x={x[wrong].tolist()} codes={codes[wrong].tolist()} "
        f"expected={expected[wrong].tolist()}"
    )


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_search_is_the_nearest(book: Codebook) -> None:
    """The oracle itself, against distances in float64."""
    x = torch.cat([torch.linspace(-1.2, 1.2, 4001), float32_midpoints(book), book.table()])
    distance = (x.double()[:, None] - book.table().double()).abs()
    assert torch.equal(encode_by_search(book, x).long(), distance.argmin(dim=1))


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_nearest_at_every_boundary(book: Codebook) -> None:
    centres = torch.cat([float32_midpoints(book), book.table()])
    assert_nearest(book, around(centres, 8))
    assert_nearest(book, around(-centres, 8))


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_an_exact_tie_takes_the_lower_code(book: Codebook) -> None:
    values = book.table().double()
    midpoints = (values[1:] + values[:-1]) / 2
    exact = midpoints.float().double() == midpoints
    assert exact.sum() >= (15 if book == POWERS else 1)
    assert torch.equal(book.encode(midpoints[exact].float()).long(), exact.nonzero().flatten())


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_nearest_at_special_values(book: Codebook) -> None:
    tiny = [0.0, 2.0**-149, 2.0**-148, 2.0**-127, 2.0**-126, 1e-38, 1e-12, 1e-7]
    large = [1.0, 1.0 - 2.0**-24, 1.0 + 2.0**-23, 1.5, 2.0, 1e10, 3.4e38, math.inf]
    x = torch.tensor(tiny + large)
    assert_nearest(book, torch.cat([x, -x]))
    assert book.encode(torch.tensor([-0.0])) == book.encode(torch.tensor([0.0]))
    top = 2**book.bits - 1
    assert book.encode(torch.tensor([7.0, math.inf])).tolist() == [top] * 2
    assert book.encode(torch.tensor([1.0])) == (14 if book == SQUARES else top)
    assert book.encode(torch.tensor([-1.0, -7.0, -math.inf])).tolist() == [0] * 3
    assert (book.encode(torch.tensor([math.nan, -math.nan])) <= top).all()


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_nearest_at_millions_of_values(book: Codebook) -> None:
    magnitude = 10 ** (-10 * torch.rand(2_000_000)) * 1.1
    assert_nearest(book, torch.cat([magnitude, -magnitude]))
    assert_nearest(book, torch.linspace(-1, 1, 2_000_001))


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_nearest_at_the_edges_of_every_cell(book: Codebook) -> None:
    edges = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = torch.cat([edges, edges + 1, edges | 0xFFFF, edges | 0x8000]).view(torch.float32)
    assert_nearest(book, x[~x.isnan()])


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_decode_then_encode_is_the_identity(book: Codebook) -> None:
    codes = torch.arange(2**book.bits, dtype=torch.uint8).reshape(2, -1)
    values = book.decode(codes)
    assert values.dtype == torch.float32
    assert torch.equal(values.flatten(), book.table())
    assert torch.equal(book.encode(values), codes)


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_strides_and_empty_tensors(book: Codebook) -> None:
    x = torch.rand(7, 12)
    assert torch.equal(book.encode(x.t()[::2]), book.encode(x.t()[::2].contiguous()))
    codes = book.encode(x)
    assert torch.equal(book.decode(codes.t()), book.decode(codes).t())
    assert book.encode(torch.empty(3, 0)).shape == (3, 0)
    assert book.encode(torch.tensor(0.3)).shape == ()


@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_operators_are_registered_well(book: Codebook) -> None:
    x = torch.rand(3, 5)
    arguments = (x, book.bits, book.signed)
    torch.library.opcheck(torch.ops.lowbit.codebook_encode.default, arguments)
    arguments = (book.encode(x), book.bits, book.signed)
    torch.library.opcheck(torch.ops.lowbit.codebook_decode.default, arguments)


@pytest.mark.parametrize("book", FORMATS, ids=IDS)
def test_compiles_and_equals_eager(book: Codebook | torch.dtype) -> None:
    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return dequantize_blockwise(*quantize_blockwise(x, book, 64), book, 64)

    x = torch.rand(3, 150)
    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(compiled, round_trip(x), rtol=1e-6, atol=0)


def test_a_fake_tensor_leaves_no_trace() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert BOOKS[0].encode(torch.rand(3)).shape == (3,)
    assert BOOKS[0].encode(torch.tensor([1.0])).item() == 14


def naive_blockwise(x: torch.Tensor, book: Codebook | torch.dtype, block: int) -> torch.Tensor:
    """Quantized and back, a block at a time."""
    out = torch.empty(x.shape)
    for index in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], block):
            piece = x[index][start : start + block].float()
            scale = piece.abs().max().clamp_min(ABSMAX_FLOOR)
            if book == POWERS:
                scale = 2.0 ** scale.double().log2().ceil().float()
            if isinstance(book, Codebook):
                codes = encode_by_search(book, piece / scale)
                out[index][start : start + block] = book.table()[codes.long()] * scale
            else:
                scale = scale / 448
                out[index][start : start + block] = (piece / scale).to(book).float() * scale
    return out


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("shape", [(1,), (5, 1), (3, 129), (2, 3, 64), (4, 0), (0, 70), (2, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("book", FORMATS, ids=IDS)
def test_blockwise(book: Codebook | torch.dtype, dtype: torch.dtype, shape: tuple) -> None:
    x = torch.randn(shape, dtype=dtype)
    if isinstance(book, Codebook) and not book.signed:
        x = x.abs()
    before = x.clone()
    codes, scale = quantize_blockwise(x, book, 64)
    assert torch.equal(x, before)
    assert codes.shape == x.shape and codes.is_contiguous()
    assert codes.dtype == (torch.uint8 if isinstance(book, Codebook) else book)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 64)) and scale.dtype == torch.float32
    y = dequantize_blockwise(codes, scale, book, 64)
    assert y.dtype == torch.float32
    assert torch.equal(y, naive_blockwise(x, book, 64))


@pytest.mark.parametrize("book", FORMATS, ids=IDS)
def test_blockwise_of_a_slice_is_the_slice(book: Codebook | torch.dtype) -> None:
    x = torch.rand(9, 100)
    codes, scale = quantize_blockwise(x, book, 32)
    for rows in (slice(0, 4), slice(4, 9), slice(3, 3)):
        part_codes, part_scale = quantize_blockwise(x[rows], book, 32)
        assert torch.equal(part_codes.view(torch.uint8), codes[rows].view(torch.uint8))
        assert torch.equal(part_scale, scale[rows])
    whole = dequantize_blockwise(codes, scale, book, 32)
    assert torch.equal(dequantize_blockwise(codes[2:5], scale[2:5], book, 32), whole[2:5])


@given(
    book=st.sampled_from(FORMATS),
    cols=st.integers(1, 40),
    block=st.integers(1, 50),
    exponent=st.integers(-9, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_blockwise_laws(
    book: Codebook | torch.dtype, cols: int, block: int, exponent: int, seed: int
) -> None:
    x = torch.from_numpy(np.random.default_rng(seed).uniform(-1, 1, (2, cols))).float()
    if isinstance(book, Codebook) and not book.signed:
        x = x.abs()
    x = x * 10.0**exponent
    y = dequantize_blockwise(*quantize_blockwise(x, book, block), book, block)
    absmax = torch.stack([part.abs().amax(-1) for part in x.split(block, -1)], -1)
    absmax = absmax.repeat_interleave(block, -1)[:, :cols].double()
    error = (y.double() - x.double()).abs() / absmax
    assert (error <= largest_error(book, x.double() / absmax)).all()
    # The largest element of a block keeps its value, where the table ends at +1.
    top = (x.double() == absmax) & (absmax > ABSMAX_FLOOR)
    if book != POWERS:
        assert torch.allclose(y[top], x[top], rtol=1e-6)
    # A second round trip changes nothing, as long as the first kept a largest element.
    if isinstance(book, Codebook) and not book.signed:
        again = dequantize_blockwise(*quantize_blockwise(y, book, block), book, block)
        assert torch.equal(again, y)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("book", FORMATS, ids=IDS)
def test_a_bad_value_stays_visible_in_its_block_only(
    book: Codebook | torch.dtype, bad: float
) -> None:
    x = torch.rand(2, 70)
    x[1, 65] = bad
    codes, scale = quantize_blockwise(x, book, 32)
    assert scale.isnan().tolist() == [[False] * 3, [False, False, True]]
    y = dequantize_blockwise(codes, scale, book, 32)
    assert y[1, 64:].isnan().all() and y[0].isfinite().all() and y[1, :64].isfinite().all()


@pytest.mark.parametrize("book", FORMATS, ids=IDS)
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-30, 1e-12, 1e30, 3.4e38])
def test_extreme_magnitudes(book: Codebook | torch.dtype, value: float) -> None:
    codes, scale = quantize_blockwise(torch.full((1, 5), value), book, 4)
    assert scale.isfinite().all() and (scale > 0).all()
    y = dequantize_blockwise(codes, scale, book, 4)
    assert y.isfinite().all()
    largest = value / 2 if book == POWERS else value * 1e-6  # a factor of two at 3.4e38
    assert ((y.double() - value).abs() <= max(ABSMAX_FLOOR, largest)).all()


def test_wrong_arguments() -> None:
    x = torch.rand(2, 8)
    book = Codebook(8, True)
    with pytest.raises(ValueError, match="bits=5"):
        Codebook(5, True)
    with pytest.raises(ValueError, match="signed must be"):
        Codebook(8, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"encode takes float32, got torch\.float64"):
        book.encode(x.double())
    with pytest.raises(TypeError, match=r"decode takes uint8 codes, got torch\.int64"):
        book.decode(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="block must be a whole number"):
        quantize_blockwise(x, book, 0)
    with pytest.raises(TypeError, match=r"float8_e4m3fn, got torch\.float8_e5m2"):
        quantize_blockwise(x, torch.float8_e5m2, 4)
    with pytest.raises(TypeError, match=r"got torch\.int32"):
        quantize_blockwise(x.int(), book, 4)
    with pytest.raises(ValueError, match="0-d"):
        quantize_blockwise(torch.tensor(1.0), book, 4)
    codes, scale = quantize_blockwise(x, book, 4)
    with pytest.raises(ValueError, match=r"take a scale of shape \(2, 3\), got \(2, 2\)"):
        dequantize_blockwise(codes, scale, book, 3)
    with pytest.raises(TypeError, match=r"float8_e4m3fn, got torch\.uint8"):
        dequantize_blockwise(codes, scale, torch.float8_e4m3fn, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("book", BOOKS, ids=name)
def test_nearest_for_every_float32(book: Codebook) -> None:
    chunk = 2**27
    for start in range(-(2**31), 2**31, chunk):
        bits = torch.arange(start, start + chunk, dtype=torch.int64, device="cuda")
        x = bits.to(torch.int32).view(torch.float32)
        right = (book.encode(x) == encode_by_search(book, x)) | x.isnan()
        assert right.all(), x[~right][:5].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("book", FORMATS, ids=IDS)
def test_cuda_equals_cpu(book: Codebook | torch.dtype) -> None:
    x = torch.rand(33, 1000)
    codes, scale = quantize_blockwise(x, book, 128)
    y = dequantize_blockwise(codes, scale, book, 128)
    x_cuda = x.cuda()
    quantize_blockwise(x_cuda, book, 128)  # uploads the tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes_cuda, scale_cuda = quantize_blockwise(x_cuda, book, 128)
        y_cuda = dequantize_blockwise(codes_cuda, scale_cuda, book, 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(codes_cuda.cpu().view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(scale_cuda.cpu(), scale)
    assert torch.equal(y_cuda.cpu(), y)
