"""The numerics in one graph by inductor, which takes seconds for each; the other files compile them by `aot_eager`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.numerics.affine import fake_quantize_affine, quantize_affine
from lowbit.numerics.codebook import Codebook, dequantize_blockwise, quantize_blockwise
from lowbit.numerics.packing import pack, unpack
from lowbit.numerics.rounding import bits_at, keys, round_bf16


@pytest.mark.parametrize("keyed", ["before", pytest.param("inside", marks=pytest.mark.exhaustive)])
def test_inductor_gives_the_values_of_eager(keyed: str) -> None:
    """3 bits cross bytes; NaN and infinities are among the values. Where the graph also makes the keys of the random
    bits, inductor takes 10 s for their hashes."""
    codes = torch.randint(0, 8, (4, 37), dtype=torch.uint8)
    inf, book = torch.inf, Codebook(4, True)
    odd = torch.tensor([[torch.nan, 1.0, -9.0, 3.0], [inf, 1.0, -inf, 3e38], [0.5, 1.0, 2.0, 70.0]])

    def all_of(codes: Tensor, x: Tensor, odd: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        made = keys(-1, *given, 2) if keyed == "inside" else given
        stored = quantize_blockwise(x, book, 64)
        affine = (odd, (1, 4), torch.ones(3), None, torch.int8, -8, 7)
        return (
            unpack(pack(codes, 3), 3, 37),
            dequantize_blockwise(*stored, book, 64),
            quantize_affine(*affine),
            fake_quantize_affine(*affine),
            round_bf16(x.view(-1), bits_at(torch.arange(450), *made)),
        )

    step = torch.tensor(7)
    given = [step] if keyed == "inside" else keys(-1, step, 2)
    inputs = codes, torch.rand(3, 150), odd, *given
    found = torch.compile(all_of, fullgraph=True)(*inputs)
    for ours, expected in zip(found, all_of(*inputs), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(found[4], all_of(*inputs)[4])
    assert torch.equal(found[0], codes) and found[2].tolist()[0] == [0, 1, -8, 3]
