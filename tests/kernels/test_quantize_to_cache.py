"""quantize_to_cache: every implementation gives the same codes, in the right slots, within half a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.cases.quantize_to_cache import CASES, Case
from lowbit_kernels.decoding.quantize_to_cache import dequantized, reference
from tests.covering import usually
from tests.kernels.interpreted import interpreted

SMALL = [case for case in CASES if not case.large]
every_case = pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)


def caches_of(arguments: tuple) -> list[Tensor]:
    return [x for x in (*arguments[2:6], arguments[7]) if x is not None]


def same(first: tuple, second: tuple) -> bool:
    """True if the caches of two calls have the same bits; NaN equals NaN."""
    pairs = zip(caches_of(first), caches_of(second), strict=True)
    return all(
        torch.equal(a.float().nan_to_num(-999), b.float().nan_to_num(-999)) for a, b in pairs
    )


def again(arguments: tuple) -> tuple:
    """The same call on an empty cache."""
    kept = (0, 1, 6, 8, 9)
    return tuple(
        torch.zeros_like(a) if isinstance(a, Tensor) and i not in kept else a
        for i, a in enumerate(arguments)
    )


@every_case
def test_tokens_are_in_their_slots(case: Case) -> None:
    arguments = case.arguments()
    key, value, key_codes, key_scale, value_codes, value_scale, lengths, zero, window, ring = (
        arguments
    )
    seen = torch.ops.lowbit.quantize_to_cache(*arguments)
    assert torch.equal(seen, lengths + case.tokens)
    empty = torch.ones(case.batch, case.slots, dtype=torch.bool)
    for x, codes, scale, zeros, most in (
        (key, key_codes, key_scale, None, {"int8": 127, "float8": 448}[case.keys]),
        (
            value,
            value_codes,
            value_scale,
            zero,
            {"int8": 127, "float8": 448, "int4": 15}[case.values],
        ),
    ):
        found = dequantized(codes, scale, zeros, case.width)
        for b in range(case.batch):
            length = int(lengths[b if case.own_lengths else 0])
            for t in range(max(case.tokens - window, 0) if ring else 0, case.tokens):
                slot = (length + t) % window if ring else length + t
                if slot >= window:
                    continue
                empty[b, slot] = False
                for h in range(case.heads):
                    own = x[b, h, t].double()
                    off = (found[b, h, slot].double() - own).abs()
                    if not own.isfinite().all():
                        assert found[b, h, slot].isnan().all()
                        assert not codes[b, h, slot].view(torch.uint8).any()
                        continue
                    step = scale[b, h, slot].double()
                    ends = own.aminmax() if most == 15 else own.abs().aminmax()
                    span = ends.max - (ends.min if most == 15 else 0)
                    assert abs(step - span / most) <= step * 2**-8 or step <= 2.0**-99
                    half = step / 2 if most != 448 else torch.maximum(own.abs() / 16, step / 512)
                    assert (off <= half * 1.01 + own.abs().max() * 2**-8 * (most == 15)).all()
        assert not found[empty[:, None].expand(-1, case.heads, -1)].any()


OPCHECKED = ("prompt", "float32", "float8", "odd-width", "ring", "no-tokens")


@pytest.mark.parametrize("case", usually(SMALL, *OPCHECKED))
def test_opcheck(case: Case) -> None:
    arguments = [
        x.nan_to_num(1, 1) if isinstance(x, Tensor) and x.dtype.itemsize > 1 else x
        for x in case.arguments()
    ]
    if case.keys != "float8":  # the check of mutations multiplies, which float8 cannot
        torch.library.opcheck(torch.ops.lowbit.quantize_to_cache, tuple(arguments))


INTERPRETED = """
import json, torch
from tests.kernels.test_quantize_to_cache import SMALL, again, reference, same

results = {}
for case in SMALL:
    if case.keys == "float8":  # the interpreter's casts to float8 lose a carry
        continue
    torch.manual_seed(0)
    first = case.arguments()
    second = again(first)
    seen = torch.ops.lowbit.quantize_to_cache(*first)
    results[case.name] = torch.equal(seen, reference(*second)), same(first, second)
print(json.dumps(results))
"""


def test_the_kernel_under_the_interpreter() -> None:
    results = interpreted(INTERPRETED)
    assert all(all(one) for one in results.values()), results


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_gpu(case: Case) -> None:
    first = case.arguments("cuda")
    second = again(first)
    assert torch.equal(torch.ops.lowbit.quantize_to_cache(*first), reference(*second))
    assert same(first, second)


def test_wrong_arguments() -> None:
    key, value, *rest = CASES[0].arguments()
    for arguments, error, message in (
        ((key.double(), value, *rest), TypeError, "key of torch.float32"),
        ((key, value[:1], *rest), ValueError, r"value \[B, K, T, F\], here"),
        ((key, value, *rest[:-2], 33, False), ValueError, "window must be from 1 to the 32 slots"),
        ((torch.cat([key] * 2, -1), value, *rest), ValueError, "no head of 64"),
        ((key, value, *rest[:5], rest[1], *rest[6:]), ValueError, "4-bit codes have zeros"),
        ((key, value, rest[0].mT.contiguous().mT, *rest[1:]), ValueError, "must be contiguous"),
    ):
        with pytest.raises(error, match=message):
            torch.ops.lowbit.quantize_to_cache(*arguments)
