"""The choice among implementations of a weight-only product, and how they divide it: pure functions of shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit_kernels.weight_only import linear_table, weight_mm_dequantized, weight_mm_triton
from lowbit_kernels.weight_only.weight_operands import layout


@given(st.integers(1, 200_000), st.integers(1, 60_000), st.sampled_from([2, 4]))
def test_chunks_fit_the_cache(n: int, k: int, itemsize: int) -> None:
    rows = weight_mm_dequantized.rows_of_chunk(n, k, itemsize)
    most = weight_mm_dequantized.MOST_BYTES
    assert 1 <= rows <= n or rows % 256 == 0
    assert rows * k * itemsize <= max(most, 256 * k * itemsize)


@given(
    st.integers(1, 60_000),
    st.integers(1, 60_000),
    st.sampled_from([32, 64, 128]),
    st.integers(1, 200),
)
def test_slices_cover_k(n: int, k: int, block: int, multiprocessors: int) -> None:
    slices, steps = weight_mm_triton.plan(n, k, block, multiprocessors)
    blocks = -(-k // block)
    assert 1 <= slices <= weight_mm_triton.MOST_SLICES
    assert slices * steps >= blocks > (slices - 1) * steps


def test_words_are_as_long_as_the_layout_allows() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    word = lambda codes, block: weight_mm_triton.codes_of_word(layout(codes), 4, block)  # noqa: E731
    assert [word(codes, block) for block in (128, 64, 32)] == [8, 4, 2]
    assert word(codes[:, 2:], 128) == 4 and word(codes[:, :62], 128) == 4
    assert word(codes[:, 1:], 128) == 2 and word(codes[:, :61], 128) == 2
    assert word(codes.view(-1)[1:].as_strided((3, 32), (32, 1)), 128) == 2
    assert weight_mm_triton.block_of_k(48, 2) == 0 and weight_mm_triton.block_of_k(96, 2) == 32


def test_the_table_answers_with_the_nearest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        (4, 128, 4096, 4096): ((8, "decode"), (100, "large_batch")),
        (4, 32, 4096, 4096): ((4, "decode"),),
        (4, 128, 32768, 8192): ((2, "decode"), (64, "triton")),
        (8, 0, 4096, 4096): ((16, "large_batch"),),
    }
    monkeypatch.setattr(linear_table, "REGIMES", table)
    linear_table.choose.cache_clear()
    expected = {
        (8, 4096, 4096, 4, 128): "decode",
        (9, 4097, 4000, 4, 128): "large_batch",
        (101, 4096, 4096, 4, 128): "dequantize",
        (8, 4096, 4096, 4, 32): "dequantize",
        (3, 28672, 8192, 4, 64): "triton",
        (16, 100_000, 100_000, 8, 100_000): "large_batch",
        (17, 1, 1, 8, 1): "dequantize",
    }
    assert {key: linear_table.choose(*key) for key in expected} == expected
    linear_table.choose.cache_clear()


def test_formats_that_take_long_to_unpack_are_dequantized_for_many_tokens() -> None:
    shape = (4096, 4096)
    assert [linear_table.choose(m, *shape, 8, 32, True) for m in (64, 2048)] == ["large_batch"] * 2
    assert linear_table.choose(2049, *shape, 8, 32, True) == "dequantize"
    assert linear_table.choose(4096, *shape, 6, 128) == "large_batch"
    assert linear_table.choose(4096, *shape, 8, 32) == "large_batch"
