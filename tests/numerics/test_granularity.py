"""Granularities: the block that shares a scale, for every rank of tensor, and that it is hashable and comparable."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit.numerics.affine import choose_qparams_affine
from lowbit.numerics.granularity import (
    Granularity,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)

CASES: list[tuple[Granularity, tuple[int, ...], tuple[int, ...]]] = [
    (PerTensor(), (), ()),
    (PerTensor(), (7,), (7,)),
    (PerTensor(), (5, 8), (5, 8)),
    (PerTensor(), (2, 5, 8), (2, 5, 8)),
    (PerTensor(), (0, 8), (1, 8)),
    (PerRow(), (7,), (7,)),
    (PerRow(), (5, 8), (1, 8)),
    (PerRow(), (2, 5, 8), (1, 1, 8)),
    (PerRow(), (5, 0), (1, 1)),
    (PerToken(), (7,), (7,)),
    (PerToken(), (2, 5, 8), (1, 1, 8)),
    (PerToken(), (0, 8), (1, 8)),
    (PerGroup(4), (8,), (4,)),
    (PerGroup(4), (5, 8), (1, 4)),
    (PerGroup(3), (5, 8), (1, 3)),
    (PerGroup(4), (2, 5, 8), (1, 1, 4)),
    (PerBlock(4), (8,), (4,)),
    (PerBlock(4), (5, 8), (1, 4)),
    (PerBlock(5, 4), (5, 8), (5, 4)),
    (PerBlock(5, 4), (2, 5, 8), (1, 5, 4)),
    (PerBlock(2, 5, 4), (2, 5, 8), (2, 5, 4)),
]
ALL = [PerTensor(), PerRow(), PerToken(), PerGroup(4), PerGroup(8), PerBlock(2, 4), PerBlock(4)]


@pytest.mark.parametrize(("granularity", "shape", "block"), CASES, ids=str)
def test_block_size(
    granularity: Granularity, shape: tuple[int, ...], block: tuple[int, ...]
) -> None:
    assert granularity.block_size(shape) == block
    assert granularity.block_size(torch.Size(shape)) == block


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.sampled_from(ALL))
def test_block_has_the_rank_of_the_tensor(shape: list[int], granularity: Granularity) -> None:
    block = granularity.block_size(shape)
    assert len(block) == len(shape) and all(isinstance(b, int) and b >= 1 for b in block)
    shared = 2 if isinstance(granularity, PerBlock) else 1
    if not isinstance(granularity, PerTensor):
        assert set(block[:-shared]) <= {1}, "leading dimensions (experts, batch) are never shared"


@pytest.mark.parametrize(
    ("granularity", "count"),
    [(PerTensor(), 1), (PerRow(), 6), (PerToken(), 6), (PerGroup(4), 12), (PerBlock(3, 2), 8)],
    ids=str,
)
def test_number_of_parameters(granularity: Granularity, count: int) -> None:
    x = torch.randn(6, 8)
    scale, _ = choose_qparams_affine(x, "symmetric", granularity.block_size(x.shape), torch.int8)
    assert scale.numel() == count


@pytest.mark.parametrize("granularity", ALL, ids=str)
def test_equal_hashable_picklable_and_frozen(granularity: Granularity) -> None:
    copy = pickle.loads(pickle.dumps(granularity))
    assert copy == granularity and hash(copy) == hash(granularity)
    assert type(granularity).__name__ in repr(granularity)
    with pytest.raises(AttributeError):
        granularity.shape = (1,)


def test_all_differ() -> None:
    assert len(set(ALL)) == len(ALL)


@pytest.mark.parametrize("size", [0, -1, 2.0, "4", None, True], ids=repr)
def test_sizes_must_be_positive_integers(size: object) -> None:
    with pytest.raises(ValueError, match=r"group_size must be a whole number of at least 1, got"):
        PerGroup(size)
    with pytest.raises(ValueError, match=r"whole number of at least 1, got"):
        PerBlock(4, size)


def test_a_block_needs_a_size() -> None:
    with pytest.raises(ValueError, match=r"PerBlock\(128, 128\)"):
        PerBlock()


def test_a_block_needs_its_rank() -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got shape \(8,\)"):
        PerBlock(4, 4).block_size((8,))


@pytest.mark.parametrize("granularity", [PerRow(), PerToken(), PerGroup(4)], ids=str)
def test_a_scalar_has_no_rows(granularity: Granularity) -> None:
    with pytest.raises(ValueError, match=r"got a scalar; use PerTensor\(\)"):
        granularity.block_size(())
