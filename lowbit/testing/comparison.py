"""Values to test with, and comparisons of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def values(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers of `dtype`, with an offset, on which symmetric and asymmetric mappings differ. The same `shape`
    and `seed` give the same numbers."""
    x = torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return (x + 0.25).to(dtype)


def inner_tensors(t: Any) -> dict[str, Tensor]:
    """The tensors that a tensor subclass holds, by name, as `__tensor_flatten__` gives them."""
    return {name: getattr(t, name) for name in t.__tensor_flatten__()[0]}


def same(a: Any, b: Any) -> bool:
    """True if `a` and `b` are equal in class, shape, strides, dtype, device and metadata, and every inner tensor to the
    bit."""
    return (
        type(a) is type(b)
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
        and a.__tensor_flatten__() == b.__tensor_flatten__()
        and all(same_bits(t, getattr(b, name)) for name, t in inner_tensors(a).items())
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if `a` and `b` are equal in shape, dtype, and every bit: NaN equals itself, and 0 differs from −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.empty(x.shape, dtype=x.dtype).copy_(x).view(-1) for x in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


def shares_memory(a: Any, b: Any) -> bool:
    """True if the first inner tensors of `a` and `b`, which hold the codes, start at the same address."""
    first, second = (next(iter(inner_tensors(t).values())) for t in (a, b))
    return first.data_ptr() == second.data_ptr()


def relative_error(found: Tensor, reference: Tensor) -> float:
    """The error of `found`, ‖found − `reference`‖ / ‖`reference`‖ in float64; ‖found‖ where the reference is zero or
    empty."""
    found, reference = found.detach().double(), reference.detach().double()
    assert found.shape == reference.shape, f"shape {found.shape}, expected {reference.shape}"
    norm = reference.norm()
    return float((found - reference).norm() / (norm if norm > 0 else 1))
