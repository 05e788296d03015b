"""Torch's packed kernels on the CPU: when they are taken, and what is kept for them."""

from __future__ import annotations

import gc

import pytest
import torch

from lowbit_kernels import int4_linear, int8_linear, weight_mm_cpu
from lowbit_kernels.weight_linear import Case, _linear, calls
from tests.kernels.test_weight_linear import error, limit, op_of


def packed_calls() -> int:
    return calls["int4_linear packed"] + calls["int8_linear packed"]


def test_few_tokens_take_torchs_packed_kernels() -> None:
    for bits, most in weight_mm_cpu.MOST_TOKENS.items():
        for m in (1, most, most + 1):
            group = 32 if bits == 4 else 64
            arguments = Case("", m, 32, 64, group, bits).arguments()
            before = packed_calls()
            op_of(Case("", 0, 0, 0, 1, bits))(*arguments)
            assert packed_calls() - before == (m <= most), (bits, m)


@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, 768])
def test_packed_groups(group: int) -> None:
    case = Case("", 5, 48, 768 if group in (256, 768) else 512, group)
    arguments = case.arguments()
    out = _linear(*arguments, 4, "packed")
    assert error(out, arguments) <= limit(out)


def test_packed_weights_follow_changes_and_die_with_the_weight() -> None:
    gc.collect()
    before = len(weight_mm_cpu._packed)
    x, codes, scale, *rest = Case("", 2, 16, 64, 32).arguments()
    arguments = (x, codes, scale, *rest)
    torch.ops.lowbit.int4_linear(*arguments)
    assert len(weight_mm_cpu._packed) == before + 1
    torch.ops.lowbit.int4_linear(x, codes.detach(), scale.view(16, 2), *rest)
    assert len(weight_mm_cpu._packed) == before + 1  # another view of the same
    for part in (codes, scale):
        part.add_(part)
        out = torch.ops.lowbit.int4_linear(*arguments)
        assert error(out, arguments) <= limit(out)
    assert len(weight_mm_cpu._packed) == before + 1
    half = (x, codes[:16], scale[:16], *rest)
    assert error(torch.ops.lowbit.int4_linear(*half), half) <= 2.0**-8
    del codes, scale, arguments, half, part
    gc.collect()
    assert len(weight_mm_cpu._packed) == before


def test_what_was_packed_of_a_view_dies_with_the_whole() -> None:
    gc.collect()
    before = len(weight_mm_cpu._packed)
    x, codes, scale, *rest = Case("", 2, 32, 64, 32).arguments()
    for _ in range(2):
        torch.ops.lowbit.int4_linear(x, codes[16:], scale[16:], *rest)
        assert len(weight_mm_cpu._packed) == before + 1
    del codes
    assert len(weight_mm_cpu._packed) == before


def test_writers_without_a_version_say_so() -> None:
    x, codes, scale, *rest = Case("", 2, 32, 64, 32).arguments()
    half = (x, codes[16:], scale[16:], *rest)
    for part in (codes, scale):
        torch.ops.lowbit.int4_linear(*half)
        part.data.add_(part)
        weight_mm_cpu.forget(part)
        assert error(torch.ops.lowbit.int4_linear(*half), half) <= 2.0**-8


def test_inference_tensors_are_not_packed() -> None:
    with torch.inference_mode():
        arguments = Case("", 2, 16, 64, 32).arguments()
        before = packed_calls()
        out = torch.ops.lowbit.int4_linear(*arguments)
        assert packed_calls() == before and error(out, arguments) <= limit(out)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("off", [1, 4, 8, 32])
def test_memory_that_is_not_aligned(bits: int, off: int) -> None:
    """As of tensors in a file that is mapped; torch's int8 kernel would crash on it."""
    m, n, k = 4, 48, 128
    width = k * bits // 8
    codes = torch.randint(0, 127, (n * width + 64,)).to(torch.uint8 if bits == 4 else torch.int8)
    x = torch.randn(m * k + 64).bfloat16()
    own, x = codes[off : off + n * width].view(n, width), x[off : off + m * k].view(m, k)
    scale = torch.rand(n, 1).bfloat16()
    op = int4_linear if bits == 4 else int8_linear
    before = calls[f"int{bits}_linear packed"]
    out = op(x, own, scale, group_size=k)
    assert calls[f"int{bits}_linear packed"] == before + 1
    assert torch.equal(out, op(x.clone(), own.clone(), scale, group_size=k))
    own.fill_(17)  # the copy that is kept isn't the weight
    assert torch.equal(op(x, own, scale, group_size=k), op(x, own.clone(), scale, group_size=k))
