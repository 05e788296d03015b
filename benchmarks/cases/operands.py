"""The fields and the random operands that the cases of several ops share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Device = torch.device | str


@dataclass(frozen=True)
class ProductCase:
    """One call of a product of [m, k] and [n, k], with random arguments."""

    name: str
    m: int
    n: int
    k: int
    large: bool = field(default=False, kw_only=True)
    """The shape of a real layer, for GPUs and benchmarks."""


def bias_of(n: int, dtype: torch.dtype | None, device: Device) -> Tensor | None:
    """Normal numbers [n] in `dtype`; None without one."""
    return None if dtype is None else torch.randn(n, device=device).to(dtype)


def codes_of_normals(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    """Codes distributed like those of normal numbers: power consumption, and so speed, depends on the codes."""
    x = torch.randn(tuple(shape), device=device)
    if dtype == torch.int8:
        return (x * 32).round().clamp(-127, 127).to(dtype)
    return (x * 112).clamp(-448, 448).to(dtype)


def matrix_of_magnitudes(shape: Sequence[int], dtype: torch.dtype, device: Device) -> Tensor:
    """Normal numbers whose rows and columns have different magnitudes."""
    x = torch.randn(tuple(shape), device=device)
    rows, columns = x.shape
    return (x * torch.rand(rows, 1, device=device) * torch.rand(columns, device=device)).to(dtype)


def laid_out_matrix(m: int, k: int, layout: str, dtype: torch.dtype, device: Device) -> Tensor:
    """`matrix_of_magnitudes` [m, k], "contiguous", "transposed", "strided" or "misaligned"."""
    shape = {"transposed": (k, m), "strided": (m, 2 * k), "misaligned": (m, k + 1)}
    x = matrix_of_magnitudes(shape.get(layout, (m, k)), dtype, device)
    return {"transposed": x.T, "strided": x[:, ::2], "misaligned": x[:, 1:]}.get(layout, x)


def offsets_of(tokens: Sequence[int], device: Device) -> Tensor:
    """int32 [experts]: where each expert's tokens end."""
    return torch.tensor(tokens, device=device).cumsum(0).to(torch.int32)
