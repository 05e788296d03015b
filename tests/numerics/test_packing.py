"""Packing: the bit stream as specified, the round trip, and that rows are independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.numerics.packing import pack, packed_size, unpack

BITS = range(1, 9)
SIZES = [0, 1, 2, 3, 7, 8, 9, 13, 64, 131]


def reference(row: list[int], bits: int) -> list[int]:
    """The definition: code i at bits [i * bits, (i + 1) * bits) of one little-endian integer."""
    stream = sum(code << (i * bits) for i, code in enumerate(row))
    return list(stream.to_bytes((len(row) * bits + 7) // 8, "little"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_matches_the_definition(bits: int, size: int) -> None:
    codes = torch.randint(0, 2**bits, (3, size))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.is_contiguous()
    assert packed.shape == (3, packed_size(size, bits))
    assert packed.tolist() == [reference(row, bits) for row in codes.tolist()]
    unpacked = unpack(packed, bits, size)
    assert unpacked.dtype == torch.uint8 and unpacked.is_contiguous()
    assert torch.equal(unpacked, codes.to(torch.uint8))


def test_int4_puts_the_even_code_in_the_low_nibble() -> None:
    assert pack(torch.tensor([0x1, 0x2, 0x3, 0x4, 0x5]), 4).tolist() == [0x21, 0x43, 0x05]


def test_int8_is_the_identity() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert pack(codes, 8).data_ptr() == codes.data_ptr()
    assert unpack(codes, 8, 256).data_ptr() == codes.data_ptr()


@given(
    bits=st.integers(1, 8),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    size=st.integers(0, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip(bits: int, shape: list[int], size: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, (*shape, size), dtype=np.uint8)
    codes_t = torch.from_numpy(codes)
    assert torch.equal(unpack(pack(codes_t, bits), bits, size), codes_t)


@given(
    bits=st.integers(1, 8),
    size=st.integers(1, 40),
    rows=st.integers(1, 9),
    cut=st.integers(0, 9),
)
def test_rows_are_independent(bits: int, size: int, rows: int, cut: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, size), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert torch.equal(pack(codes[:cut], bits), packed[:cut])
    assert torch.equal(torch.cat([pack(codes[:cut], bits), pack(codes[cut:], bits)]), packed)


@pytest.mark.parametrize("bits", BITS)
def test_non_contiguous_input(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (24, 5), dtype=torch.uint8)
    packed = pack(codes.t(), bits)
    assert torch.equal(packed, pack(codes.t().contiguous(), bits))
    strided = torch.stack([packed, packed], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(unpack(strided, bits, 24), codes.t())


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool], ids=str
)
def test_every_integer_dtype(dtype: torch.dtype) -> None:
    codes = torch.tensor([1, 0, 0, 1, 1])
    assert torch.equal(pack(codes.to(dtype), 3), pack(codes, 3))


@pytest.mark.parametrize("bits", BITS)
def test_negative_codes_are_stored_in_twos_complement(bits: int) -> None:
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8)
    stored = unpack(pack(codes, bits), bits, len(codes))
    assert torch.equal(stored.to(torch.int64), codes.to(torch.int64) % 2**bits)


@pytest.mark.cover("values")
@pytest.mark.parametrize("size", [37, 38])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compiles(bits: int, size: int) -> None:
    codes = torch.randint(0, 2**bits, (4, size), dtype=torch.uint8)

    def round_trip(codes: torch.Tensor) -> torch.Tensor:
        return unpack(pack(codes, bits), bits, codes.shape[-1])

    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(codes), codes)


@pytest.mark.parametrize("bits", [0, 9, -1, 4.0, True, "4"])
def test_impossible_bits(bits: object) -> None:
    with pytest.raises(ValueError, match=r"bits must be a whole number from 1 to 8, got"):
        packed_size(8, bits)  # type: ignore[arg-type]


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"integer codes, got torch\.float32"):
        pack(torch.zeros(4), 4)
    with pytest.raises(ValueError, match="0-d"):
        pack(torch.tensor(3), 4)
    with pytest.raises(TypeError, match=r"uint8 bytes, got torch\.int8"):
        unpack(torch.zeros(4, dtype=torch.int8), 4, 8)
    with pytest.raises(ValueError, match=r"9 codes of 4 bits take a last dimension of 5 bytes"):
        unpack(torch.zeros(2, 4, dtype=torch.uint8), 4, 9)
    with pytest.raises(ValueError, match="got -1"):
        packed_size(-1, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_cuda_equals_cpu(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (17, 1021), dtype=torch.uint8)
    packed = pack(codes.cuda(), bits)
    assert torch.equal(packed.cpu(), pack(codes, bits))
    assert torch.equal(unpack(packed, bits, 1021).cpu(), codes)
