"""A tensor quantized along rows and columns, with the transposed copy that backward products need.

    codes   [M, K16]   x / scale[m], rounded           K16, M16: K, M rounded up to a multiple of 16, padded with 0
    codes_t [K, M16]   x / scale_t[k], rounded, transposed

This is the reference in PyTorch operations.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lowbit_kernels.library import LIBRARY

DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"int8": 127.0, "e4m3": 448.0, "e5m2": 57344.0}


def quantize_rowcol(
    x: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes, scale, codes_t, scale_t of x [M, K]; the half not asked for is empty."""
    return torch.ops.lowbit.quantize_rowcol(x, format, rows, columns, tensorwise, seed)


def reference(
    x: Tensor, format: str, rows: bool, columns: bool, tensorwise: bool, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.float()
    codes, scale, codes_t, scale_t = _fake(x, format, rows, columns, tensorwise, seed)
    draws = None if seed is None else _draws(x, seed)
    amax = x.abs().amax() if tensorwise and x.numel() else None
    if rows:
        scale = _scale(x.abs().amax(1) if amax is None else amax.view(1), format)
        codes = _encode(x / scale[:, None], scale[:, None], format, draws)
        codes = _padded(codes)
    if columns:
        scale_t = _scale(x.abs().amax(0) if amax is None else amax.view(1), format)
        codes_t = _encode(x / scale_t[None], scale_t[None], format, draws)
        codes_t = _padded(codes_t.t().contiguous())
    return codes, scale, codes_t, scale_t


def _scale(amax: Tensor, format: str) -> Tensor:
    scale = torch.where(amax == 0, 1.0, amax / LARGEST[format])
    return torch.where(amax.isfinite(), scale, torch.nan)


def _encode(values: Tensor, scale: Tensor, format: str, draws: Tensor | None) -> Tensor:
    largest, dtype = LARGEST[format], DTYPES[format]
    if draws is not None:
        if format == "int8":
            step = torch.ones_like(values)
        else:
            bits, least = (3, -9) if format == "e4m3" else (2, -16)
            step = torch.frexp(values)[1].sub(1 + bits).clamp(min=least).float().exp2()
        low = (values / step).floor()
        values = (low + (draws < values / step - low)) * step
    elif format == "int8":
        values = values.round()
    values = values.clamp(-largest, largest)
    if format == "int8":
        values = values.nan_to_num(0.0)
    return values.to(dtype)


def _draws(x: Tensor, seed: Tensor) -> Tensor:
    h = torch.arange(x.numel(), device=x.device).view(x.shape) ^ (seed * 0x9E3779B1)
    for multiplier in (0x7FEB352D, -0x7B935975):
        h = ((h ^ (h >> 16)) * multiplier) & 0xFFFFFFFF
    return ((h ^ (h >> 16)) + 0.5).float() / 2**32


def _padded(codes: Tensor) -> Tensor:
    raw = codes.view(torch.uint8)
    return F.pad(raw, (0, -codes.shape[1] % 16)).view(codes.dtype)


def _fake(
    x: Tensor, format: str, rows: bool, columns: bool, tensorwise: bool, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = DTYPES[format]
    m, k = x.shape

    def pair(some: bool, first: int, second: int) -> tuple[Tensor, Tensor]:
        if not some:
            return x.new_empty((0, 0), dtype=dtype), x.new_empty(0, dtype=torch.float32)
        size = (first, (second + 15) // 16 * 16)
        scales = 1 if tensorwise else first
        return x.new_empty(size, dtype=dtype), x.new_empty(scales, dtype=torch.float32)

    return *pair(rows, m, k), *pair(columns, k, m)


LIBRARY.define(
    "quantize_rowcol(Tensor x, str format, bool rows, bool columns, bool tensorwise, Tensor? seed) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("quantize_rowcol", reference, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::quantize_rowcol", _fake, lib=LIBRARY)
