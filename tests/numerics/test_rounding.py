"""Counter-based rounding: the stream never changes, depends on each key, and is unbiased."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit.numerics.rounding import (
    _kept_multipliers,
    bits_at,
    keys,
    round_bf16,
)

KEY = {"seed": 1234, "step": 7, "tensor": 3}
MASK = 0xFFFFFFFF


def random_bits(numel: int, *, seed: int, step: int, tensor: int, offset: int = 0) -> torch.Tensor:
    """The random bits of the elements `offset` .. `offset + numel - 1` of a tensor."""
    k0, k1 = map(torch.as_tensor, keys(seed, step, tensor))
    return bits_at(torch.arange(offset, offset + numel), k0, k1)


def rounded_bf16(x: torch.Tensor, *, offset: int = 0, **key: int) -> torch.Tensor:
    """`round_bf16` of a tensor whose first element has the global index `offset`."""
    return round_bf16(x, random_bits(x.numel(), **key, offset=offset).view(x.shape))


def scalar_draw(index: int, seed: int, step: int, tensor: int) -> int:
    """The stream as the module docstring defines it, in Python integers."""

    def finalise(h: int) -> int:
        h ^= h >> 16
        h = h * 0x7FEB352D & MASK
        h ^= h >> 15
        h = h * 0x846CA68B & MASK
        return h ^ (h >> 16)

    def key(k: int) -> int:
        for word in (seed, step, tensor):
            for half in (word & MASK, word >> 32 & MASK):
                k = finalise((k ^ half) + 0x9E3779B9 & MASK)
        return k

    multipliers = (
        *(0x2265B1F5, 0xD8F16ADF, 0x414C343D, 0x4A2F20AB),
        *(0xAA2CA1AF, 0x29E821A5, 0xCB6915C1, 0x56C58311),
    )
    octet = index >> 3
    h = (octet & MASK) ^ key(0x243F6A88)
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK
    h ^= (h >> 15) ^ (key(0x85A308D3) + 0x9E3779B9 * (octet >> 32) & MASK)
    h = h * 0x846CA68B & MASK
    h ^= h >> 16
    return (h * multipliers[index & 7] & MASK) >> 16


@pytest.mark.parametrize(
    ("offset", "golden"),
    [
        (0, [21726, 11542, 24083, 65087, 23830, 28304, 49466, 48575]),
        (2**33 - 2, [2067, 30562, 23683, 37515, 46694, 38844, 18560, 40822]),
        (2**40 + 1, [63289, 45159, 2941, 49554, 36142, 11556, 52454, 38154]),
    ],
    ids=["start", "across-2^33", "odd-offset"],
)
def test_the_stream_never_changes(offset: int, golden: list[int]) -> None:
    assert random_bits(8, **KEY, offset=offset).tolist() == golden
    assert [scalar_draw(offset + i, **KEY) for i in range(8)] == golden


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
    tensor=st.integers(0, 2**40),
    offset=st.integers(0, 2**60),
    numel=st.integers(0, 9),
)
def test_matches_the_definition(seed: int, step: int, tensor: int, offset: int, numel: int) -> None:
    draws = random_bits(numel, seed=seed, step=step, tensor=tensor, offset=offset)
    assert draws.dtype == torch.int32
    expected = [scalar_draw(offset + i, seed % 2**64, step, tensor) for i in range(numel)]
    assert draws.tolist() == expected


def test_a_step_on_the_device_gives_the_bits_of_a_number() -> None:
    found = bits_at(torch.arange(15), *keys(1234, torch.tensor(7), 3))
    assert torch.equal(found, random_bits(15, **KEY))


@given(
    rows=st.integers(0, 7),
    cols=st.integers(0, 7),
    cut=st.integers(0, 7),
    base=st.sampled_from([0, 1, 2**32 - 3, 2**33 - 5, 2**50 + 1]),
)
def test_a_slice_equals_the_slice_of_the_whole(rows: int, cols: int, cut: int, base: int) -> None:
    x = torch.randn(rows, cols)
    cut = min(cut, rows)
    whole = rounded_bf16(x, **KEY, offset=base)
    top = rounded_bf16(x[:cut], **KEY, offset=base)
    bottom = rounded_bf16(x[cut:], **KEY, offset=base + cut * cols)
    assert torch.equal(torch.cat([top, bottom]), whole)


def test_strides_do_not_matter() -> None:
    x = torch.randn(31, 17).t()
    assert torch.equal(rounded_bf16(x, **KEY), rounded_bf16(x.contiguous(), **KEY))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two draws in units of its standard deviation under independence."""
    a, b = a.double() - 32767.5, b.double() - 32767.5
    return float((a * b).mean() / (65536**2 / 12) * math.sqrt(a.numel()))


@pytest.mark.parametrize("name", ["seed", "step", "tensor", "offset"])
@pytest.mark.parametrize("shift", [1, 2, 16, 2**16, 2**31, 2**32, 2**33, 2**40])
def test_keys_give_independent_streams(name: str, shift: int) -> None:
    n = 2**16
    a = random_bits(n, **KEY)
    b = random_bits(n, **{**KEY, name: KEY.get(name, 0) + shift})
    if name == "offset" and shift < n:
        assert torch.equal(a[shift:], b[:-shift])
        a, b = a[:shift], b[-shift:]
    else:
        # Two draws agree accidentally once in 65536.
        assert int((a == b).sum()) <= 10
    assert abs(correlation(a, b)) < 5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 6, 7, 8, 64, 1024, 4096])
def test_neighbours_are_independent(lag: int) -> None:
    draws = random_bits(2**18, **KEY)
    assert abs(correlation(draws[lag:], draws[:-lag])) < 5


def test_draws_are_uniform() -> None:
    n = 2**20
    draws = random_bits(n, **KEY)
    for parity in (draws[0::2], draws[1::2]):
        for shift in (0, 4, 8):
            counts = torch.bincount((parity >> shift) & 0xFF, minlength=256).double()
            expected = parity.numel() / 256
            chi2 = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
        for bit in range(16):
            ones = float(((parity >> bit) & 1).double().mean())
            assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(parity.numel())


def test_one_element_over_many_steps_is_uniform() -> None:
    draws = torch.cat([random_bits(2, seed=5, step=step, tensor=0) for step in range(4096)])
    assert abs(float(draws.double().mean()) - 32767.5) < 5 * 65536 / math.sqrt(12 * len(draws))


def bf16_neighbours(x: float) -> tuple[float, float]:
    bits = torch.tensor(x, dtype=torch.float32).view(torch.int32)
    down = bits & -0x10000
    return float(down.view(torch.float32)), float((down + 0x10000).view(torch.float32))


@pytest.mark.parametrize("x", [1.001, -1.001, 3.14159, 1e-3, -2.7e8, 1e-30, 1e-39, -3e-41])
def test_bf16_is_unbiased(x: float) -> None:
    n = 2**18
    value = torch.full((n,), x)
    exact = float(value[0])
    rounded = rounded_bf16(value, **KEY).double()
    near, far = bf16_neighbours(exact)
    assert set(rounded.unique().tolist()) == {near, far}
    p = (exact - near) / (far - near)
    sigma = abs(far - near) * math.sqrt(p * (1 - p) / n)
    assert abs(float(rounded.mean()) - exact) < 5 * sigma


def test_bf16_takes_every_draw_exactly_as_often_as_it_should() -> None:
    # All 65536 low halves against all draws of a stream: the number rounded up is a count.
    draws = random_bits(65536, **KEY)
    low = torch.arange(65536, dtype=torch.int32)
    x = (low + 0x3F800000).view(torch.float32)
    up = rounded_bf16(x, **KEY).float() > 1
    assert torch.equal(up, low + draws >= 65536)


def test_bf16_numbers_stay() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = every.view(torch.float32)
    for step in range(3):
        rounded = rounded_bf16(x, seed=0, step=step, tensor=0)
        nan = x.isnan()
        assert torch.equal(rounded.isnan(), nan)
        assert torch.equal(
            rounded[~nan].view(torch.int16), x[~nan].to(torch.bfloat16).view(torch.int16)
        )


def test_bf16_never_makes_an_infinity_or_loses_a_nan() -> None:
    largest = torch.finfo(torch.float32).max
    n = 4096
    rounded = rounded_bf16(torch.full((n,), largest), **KEY)
    assert rounded.isfinite().all() and (rounded == torch.finfo(torch.bfloat16).max).all()
    rounded = rounded_bf16(torch.full((n,), -largest), **KEY)
    assert (rounded == torch.finfo(torch.bfloat16).min).all()
    payloads = [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF]
    for payload in payloads:
        nan = torch.full((n,), payload, dtype=torch.int32).view(torch.float32)
        assert rounded_bf16(nan, **KEY).isnan().all()
    assert rounded_bf16(torch.full((n,), math.inf), **KEY).eq(math.inf).all()
    assert rounded_bf16(torch.full((n,), -math.inf), **KEY).eq(-math.inf).all()


def test_compiles_without_recompiling_for_a_new_step() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    x = torch.randn(1001)
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def rounding(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return round_bf16(x, bits_at(torch.arange(len(x)), *keys(-1, step, 2)))

    for step in range(3):
        expected = rounded_bf16(x, seed=-1, step=step, tensor=2)
        assert torch.equal(rounding(x, torch.tensor(step)), expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    x = torch.randn(100_003)
    x_cuda, step = x.cuda(), torch.tensor(7, device="cuda")
    for offset in (0, 1, 2**33 - 7):
        expected = rounded_bf16(x, **KEY, offset=offset)
        index = torch.arange(offset, offset + len(x), device="cuda")
        _kept_multipliers(index.device)
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                actual = round_bf16(x_cuda, bits_at(index, *keys(1234, step, 3)))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(actual.cpu(), expected)


def test_keys_broadcast_and_int32_indices_give_the_same_bits() -> None:
    key = {"seed": 2**40 + 3, "step": 7, "tensor": 5}
    k0, k1 = keys(key["seed"], torch.tensor([[7], [7]]), key["tensor"])
    for offset in (0, 5, 2**31 - 3, 2**33 - 6, 2**40 + 1):
        index = torch.arange(offset, offset + 12).view(2, 6)
        expected = random_bits(12, **key, offset=offset).view(2, 6)
        assert torch.equal(bits_at(index, k0, k1), expected)
        if offset < 2**31 - 12:
            assert torch.equal(bits_at(index.int(), k0.int(), k1), expected)


def test_cached_multipliers_are_real_tensors() -> None:
    """Under any default device, and if the first call runs under fake tensors."""
    index = torch.arange(10)
    k0, k1 = keys(1, torch.tensor([2]), 3)
    expected = bits_at(index, k0, k1)
    _kept_multipliers.cache_clear()
    with torch.device("meta"):
        assert torch.equal(bits_at(index, k0, k1), expected)
    _kept_multipliers.cache_clear()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (index, k0, k1)]
        assert bits_at(*fake).shape == (10,)
    assert torch.equal(bits_at(index, k0, k1), expected)
