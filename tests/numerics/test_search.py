"""Searched scales and zero points: never worse than min-max, judged as stored, near the best there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lowbit as lb
from lowbit.numerics import search
from lowbit.numerics.affine import MAPPINGS
from lowbit.numerics.search import search_qparams_affine
from tests.schemes import weight_specs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SYMMETRIC = ("symmetric", "symmetric_no_clipping_err")
QParams = tuple[Tensor, Tensor | None]


def block_errors(x: Tensor, spec: lb.Spec, qparams: QParams, h: Tensor | None = None) -> Tensor:
    """Σ h (x̂ − x)² of each block in float64, by the public functions of a Spec."""
    codes, scale, zero_point = spec.quantize(x, qparams=qparams)
    values = spec.dequantize(codes, scale, zero_point, x.shape, torch.float32)
    square = (values.double() - x.double()).square()
    square = spec.pad(square if h is None else square * h.double())
    for dim, size in enumerate(spec.block_size(x.shape)):
        square = square.unflatten(dim, (-1, size)).sum(dim + 1)
    return square


def numbers(shape: list[int], seed: int, magnitude: float, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.randn(shape[-1:], generator=generator).exp() + 0.3 * (seed % 3)
    return (x * 10**magnitude).to(dtype)


@settings(max_examples=40)
@given(
    weight_specs(3).filter(lambda s: s.scale_format == "float" and not s.rounds_minimum),
    st.lists(st.integers(1, 12), min_size=3, max_size=3),
    st.sampled_from(DTYPES),
    st.floats(-6, 3),
    st.integers(0, 10**6),
    st.sampled_from(["none", "channels", "elements", "some zeros"]),
    st.sampled_from([8, 1]),
)
def test_the_error_of_a_block_is_never_above_min_max(
    spec: lb.Spec,
    shape: list[int],
    dtype: torch.dtype,
    magnitude: float,
    seed: int,
    weighted: str,
    chunks: int,
) -> None:
    x = numbers(shape, seed, magnitude, dtype)
    importance = {
        "none": None,
        "channels": torch.rand(shape[-1]),
        "elements": torch.rand(shape) * 1e-9,
        "some zeros": torch.rand(shape).sub(0.5).clamp(min=0),
    }[weighted]
    chosen = spec.choose_qparams(spec.pad(x), dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search.CHUNK_ELEMENTS, "cpu", max(30, -(-x.numel() // chunks)))
        found = spec.search_qparams(x, dtype, importance)
    for ours, theirs in zip(found, chosen, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    spec.check_qparams(shape, *found)
    before = block_errors(x, spec, chosen, importance)
    after = block_errors(x, spec, found, importance)
    finite = before.isfinite()
    assert (after[finite] <= before[finite]).all()


@pytest.mark.cover("values")
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_parts_and_wholes_give_the_same_choice(
    bits: int, mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, 24, 40)
    for granularity in (lb.PerGroup(8), lb.PerRow(), lb.PerBlock(8, 20)):
        spec = lb.Spec(lb.Int(bits), granularity, mapping)
        whole = spec.search_qparams(x, torch.float32)
        with monkeypatch.context() as patch:
            patch.setitem(search.CHUNK_ELEMENTS, "cpu", 480)
            parts = spec.search_qparams(x, torch.float32)
        assert torch.equal(whole[0], parts[0])
        assert whole[1] is parts[1] is None or torch.equal(whole[1], parts[1])


def best_by_brute_force(x: Tensor, spec: lb.Spec) -> Tensor:
    """The smallest error of each block over 4,000 scales of both signs, 50 at a time."""
    blocks = spec.blocks(x.shape)
    largest = x.unflatten(-1, (-1, spec.block_size(x.shape)[-1])).abs().amax(-1)
    least = torch.full(blocks, torch.inf, dtype=torch.float64)
    ratios = torch.linspace(0.02, 2.1, 2000)
    for some in torch.cat([ratios, -ratios]).split(50):
        scale = some[:, None, None] * largest / (2 ** (spec.format.bits - 1) - 0.5)
        zero_point = scale / 2 if spec.mapping == "half_integer" else None
        parts = [None if p is None else p.flatten(0, 1) for p in (scale, zero_point)]
        errors = block_errors(x.repeat(len(some), 1), spec, (parts[0], parts[1]))
        least = torch.minimum(least, errors.unflatten(0, (len(some), -1)).amin(0))
    return least


@pytest.mark.cover("values")
@pytest.mark.parametrize("tails", ["normal", "student"])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("bits", "mapping", "near"),
    [
        (4, "symmetric", 1.01),
        (3, "symmetric", 1.005),
        (2, "symmetric", 1.005),
        (2, "half_integer", 1.005),
        (1, "half_integer", 1.0001),
    ],
)
def test_near_the_best_scale(bits: int, mapping, near: float, group: int, tails: str) -> None:
    torch.manual_seed(bits)
    x = torch.randn(16, 512)
    if tails == "student":
        x = torch.distributions.StudentT(torch.tensor(4.0)).sample((16, 512))
    spec = lb.Spec(lb.Int(bits), lb.PerGroup(group), mapping)
    found = block_errors(x, spec, spec.search_qparams(x, torch.float32)).sum()
    assert found <= near * best_by_brute_force(x, spec).sum()


@pytest.mark.parametrize("tails", ["normal", "student"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_share_of_the_error_that_min_max_leaves(bits: int, tails: str) -> None:
    """Figures of docs/inference.md, in groups of 32 and 128."""
    x = torch.randn(256, 512)
    if tails == "student":
        x = torch.distributions.StudentT(torch.tensor(4.0)).sample((256, 512))
    for group in (32, 128):
        spec = lb.IntxWeightOnly(bits, group).weight
        chosen = block_errors(x, spec, spec.choose_qparams(x, torch.float32)).sum()
        found = block_errors(x, spec, spec.search_qparams(x, torch.float32)).sum()
        assert found <= {2: 0.55, 3: 0.7, 4: 0.85}[bits] * chosen


@pytest.mark.parametrize("mapping", SYMMETRIC)
def test_the_sign_follows_the_largest_value(mapping) -> None:
    """8 · s is exact on one side only: a positive largest value takes a negative scale, as d = max / −8."""
    x = torch.tensor([[8.0, -7, 6, -5, 4, 3, -2, 1], [-8.0, 7, 6, -5, 4, 3, -2, 1]])
    spec = lb.Spec(lb.Int(4), lb.PerGroup(8), mapping)
    scale, zero_point = spec.search_qparams(x, torch.float32)
    assert scale.tolist() == [[-1.0], [1.0]] and zero_point is None
    codes, _, _ = spec.quantize(x, qparams=(scale, None))
    assert torch.equal(codes[0], -x[0].to(torch.int8)) and torch.equal(
        codes[1], x[1].to(torch.int8)
    )


@pytest.mark.parametrize("spec", [lb.Spec(lb.Float8(), lb.PerRow()), lb.Int2WeightOnly(8).weight])
def test_scales_whose_sign_changes_nothing_are_positive(spec: lb.Spec) -> None:
    scale, _ = spec.search_qparams(torch.randn(32, 64), torch.float32)
    assert (scale > 0).all()


def test_importance_decides_which_values_stay_exact() -> None:
    x = torch.tensor([[10.0, 1.0, 1.1, 0.9, -1.0, -0.9, 1.0, 1.05]])
    importance = torch.tensor([1e-6, 1, 1, 1, 1, 1, 1, 1])
    spec = lb.IntxWeightOnly(2, 8).weight
    plain, weighted = (spec.search_qparams(x, torch.float32, h) for h in (None, importance))
    errors = [block_errors(x, spec, q, importance).item() for q in (plain, weighted)]
    assert errors[1] < 0.1 * errors[0]
    scaled = spec.search_qparams(x, torch.float32, importance * 1e-30)
    assert torch.equal(scaled[0], weighted[0])


def test_padding_has_no_importance() -> None:
    """A group of 8 with 5 values takes the zero point of these values, far from the zeros behind them."""
    x = torch.randn(6, 13) + 20
    spec = lb.Spec(lb.Int(3), lb.PerBlock(4, 8), "float_zero_point")
    scale, zero_point = spec.search_qparams(x, torch.float32)
    assert zero_point is not None
    found = block_errors(x, spec, (scale, zero_point))[1, 1]
    assert found < 3 * 0.5**2 and zero_point[1, 1] > 15, (found, zero_point)
    ours = spec.search_qparams(x, torch.float32, torch.ones(13))
    assert torch.equal(ours[0], scale)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_nonfinite_blocks_keep_min_max(mapping, dtype: torch.dtype) -> None:
    x = torch.randn(4, 16).to(dtype)
    x[0, :8] = 0
    x[1, 1], x[2, 2], x[3, 3] = torch.nan, torch.inf, -torch.inf
    spec = lb.Spec(lb.Int(3), lb.PerGroup(8), mapping)
    chosen, found = spec.choose_qparams(x, dtype), spec.search_qparams(x, dtype)
    for ours, theirs in zip(found, chosen, strict=True):
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours[:, 0], theirs[:, 0], rtol=0, atol=0, equal_nan=True)
            assert ours[:, 1].isfinite().all()


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_values_are_exact(dtype: torch.dtype, mapping, bits: int) -> None:
    if bits == 1 and mapping in SYMMETRIC:
        pytest.skip("a Spec of one bit refuses this mapping")
    spec = lb.Spec(lb.Int(bits), lb.PerGroup(8), mapping)
    x = torch.tensor([0.25, -0.01, 3.0, 2e4, -0.3])[:, None].expand(5, 16).to(dtype)
    values = spec.dequantize(
        *spec.quantize(x, qparams=spec.search_qparams(x, dtype)), x.shape, torch.float32
    )
    torch.testing.assert_close(values, x.float(), rtol=torch.finfo(dtype).eps, atol=0)


def test_equal_values_among_those_that_count_are_exact() -> None:
    x = torch.randn(3, 16)
    x[:, ::2] = 0.25
    importance = torch.tensor([1.0, 0.0]).repeat(8)
    spec = lb.Spec(lb.Int(2), lb.PerGroup(16))
    found = spec.search_qparams(x, torch.float32, importance)
    values = spec.dequantize(*spec.quantize(x, qparams=found), x.shape, torch.float32)
    torch.testing.assert_close(values[:, ::2], x[:, ::2])


@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-22, 1e18, 1e30, 3e37])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_squares_that_leave_float32_are_searched_too(mapping, magnitude: float) -> None:
    x = torch.randn(8, 32).clamp(-5, 5) * magnitude
    spec = lb.Spec(lb.Int(3), lb.PerGroup(16), mapping)
    chosen = block_errors(x, spec, spec.choose_qparams(x, torch.float32))
    found = block_errors(x, spec, spec.search_qparams(x, torch.float32))
    assert (found <= chosen).all()
    if magnitude > 1e-38:
        assert found.sum() < 0.95 * chosen.sum()


def test_float64_meta_and_empty() -> None:
    spec = lb.Int4WeightOnly(8).weight
    x = torch.randn(4, 16, dtype=torch.float64)
    scale, _ = spec.search_qparams(x, torch.float32)
    assert torch.equal(scale, spec.search_qparams(x.float(), torch.float32)[0])
    meta, _ = spec.search_qparams(x.to("meta"), torch.bfloat16)
    assert meta.is_meta and meta.shape == (4, 2) and meta.dtype is torch.bfloat16
    empty, _ = spec.search_qparams(x[:0], torch.float32)
    assert empty.shape == (0, 2)
    scalar = search_qparams_affine(torch.tensor(3.0), "symmetric", (), torch.int8, -8, 7)[0]
    code = (3.0 / scalar).round()  # one value is a block of equal values
    assert (code * scalar).item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("granularity", [lb.PerGroup(32), lb.PerRow(), lb.PerTensor()], ids=str)
def test_a_gpu_finds_as_good_scales(granularity, mapping) -> None:
    x, importance = torch.randn(64, 256), torch.rand(256)
    spec = lb.Spec(lb.Int(4), granularity, mapping)
    found = spec.search_qparams(x.cuda(), torch.bfloat16, importance.cuda())
    on_cpu = tuple(None if t is None else t.cpu() for t in found)
    ours = block_errors(x, spec, on_cpu, importance)
    chosen = spec.choose_qparams(x, torch.bfloat16)
    assert (ours <= block_errors(x, spec, chosen, importance)).all()
    on_cpu = spec.search_qparams(x, torch.bfloat16, importance)
    assert ours.sum() <= 1.001 * block_errors(x, spec, on_cpu, importance).sum()


def test_a_transposed_weight_needs_no_copy_first() -> None:
    x = torch.randn(32, 24)
    for granularity in (lb.PerGroup(8), lb.PerTensor(), lb.PerBlock(8, 8)):
        spec = lb.Spec(lb.Int(4), granularity)
        found = spec.search_qparams(x.t(), torch.float32)[0]
        assert torch.equal(found, spec.search_qparams(x.t().contiguous(), torch.float32)[0])


@pytest.mark.parametrize(
    ("importance", "match"),
    [
        (torch.ones(5), r"importance of shape \(5,\) does not broadcast to \(4, 16\); give one"),
        (torch.ones(2, 4, 16), r"importance of shape \(2, 4, 16\) does not broadcast"),
        (torch.ones(16, dtype=torch.int64), r"must be floating, got torch.int64; call .float\(\)"),
        (-torch.ones(16), r"finite and not negative, as a mean square is, got -1.0 to -1.0"),
        (torch.full((16,), torch.nan), r"finite and not negative.* got nan"),
    ],
)
def test_an_importance_that_does_not_fit_is_refused(importance: Tensor, match: str) -> None:
    for x in (torch.randn(4, 16),):
        with pytest.raises(ValueError, match=match):
            lb.Int4WeightOnly(8).weight.search_qparams(x, torch.float32, importance)


def test_wrong_arguments_are_refused() -> None:
    x = torch.randn(4, 16)
    with pytest.raises(ValueError, match=r"ranges of up to 8 bits, got -32768..32767; use choose"):
        search_qparams_affine(x, "symmetric", (1, 8), torch.int16)
    with pytest.raises(ValueError, match=r"block_size \(1, 5\) does not tile"):
        search_qparams_affine(x, "symmetric", (1, 5), torch.int8)
    with pytest.raises(ValueError, match=r"unknown mapping 'sideways'"):
        search_qparams_affine(x, "sideways", (1, 8), torch.int8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"only real floating-point"):
        search_qparams_affine(x.long(), "symmetric", (1, 8), torch.int8)


@pytest.mark.parametrize("granularity", [lb.PerGroup(128), lb.PerRow(), lb.PerTensor()], ids=str)
def test_the_memory_beside_a_large_weight_is_small(
    granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search holds a few parts of the weight in float32, however large the weight is."""
    monkeypatch.setitem(search.CHUNK_ELEMENTS, "cpu", search.CHUNK_ELEMENTS["cpu"] // 64)
    x = torch.randn(256, 256).bfloat16()
    spec = lb.Spec(lb.Int(4), granularity)
    with _Alive() as alive:
        alive.storages[StorageWeakRef(x.untyped_storage())] = 0  # views of the weight
        spec.search_qparams(x, torch.bfloat16, torch.rand(256))
    assert alive.most < 16 * 4 * search.CHUNK_ELEMENTS["cpu"]


class _Alive(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:
                storage = t.untyped_storage()
                self.storages.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.storages = {ref: n for ref, n in self.storages.items() if not ref.expired()}
        self.most = max(self.most, sum(self.storages.values()))
        return out
