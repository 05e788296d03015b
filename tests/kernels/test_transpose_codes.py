"""transpose_codes: PyTorch and Triton against a transposed copy."""

from __future__ import annotations

import pytest
import torch

from lowbit_kernels.transpose_codes import reference, transpose_codes
from tests.kernels.interpreted import interpreted

OP = torch.ops.lowbit.transpose_codes
SHAPES = [
    ((3, 40, 48), 33),
    ((1, 130, 272), 272),
    ((2, 0, 16), 16),
    ((0, 4, 16), 5),
    ((2, 5, 16), 0),
]


def codes_of(shape: tuple, dtype=torch.int8, device="cpu") -> torch.Tensor:
    return torch.randint(0, 100, shape, dtype=torch.uint8, device=device).view(dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("shape", "k"), SHAPES, ids=str)
def test_cpu(shape: tuple, k: int, dtype: torch.dtype) -> None:
    codes, n = codes_of(shape, dtype), shape[1]
    out = transpose_codes(codes, k)
    assert out.shape == (shape[0], k, n + -n % 16) and out.dtype == dtype and out.is_contiguous()
    as_bytes = out.view(torch.uint8)
    assert torch.equal(as_bytes[..., :n], codes.view(torch.uint8)[..., :k].mT)
    assert not as_bytes[..., n:].any()
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(OP.default, (codes, k), test_utils=checks)


INTERPRETED = """
import json, torch
from lowbit_kernels.launches import counted
from tests.kernels.test_transpose_codes import OP, SHAPES, codes_of, reference

results = []
for shape, k in SHAPES:
    codes = codes_of(shape)
    with counted() as calls:
        same = torch.equal(OP(codes, k), reference(codes, k))
    empty = codes.numel() * k == 0
    same &= calls == {("transpose_codes", "torch" if empty else "triton"): 1}
    results.append(same)
print(json.dumps(results))
"""


def test_interpreted_kernel() -> None:
    assert all(interpreted(INTERPRETED))


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"takes codes of torch\.int8"):
        transpose_codes(torch.zeros(1, 2, 3), 3)
    with pytest.raises(ValueError, match="at most K"):
        transpose_codes(codes_of((2, 3, 16)), 17)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "k"), [*SHAPES, ((5, 1000, 1536), 1530)], ids=str)
def test_cuda(shape: tuple, k: int) -> None:
    codes = codes_of(shape, torch.float8_e4m3fn, "cuda")
    found, expected = (t.view(torch.uint8) for t in (OP(codes, k), reference(codes, k)))
    assert torch.equal(found, expected)
