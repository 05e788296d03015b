"""A matrix quantized along its rows, and in the same pass, transposed, along its columns.

    scale[m]      = max_k |x[m, k]| / L            L = 127 (int8), 448 (e4m3), 57344 (e5m2)
    codes[m, k]   = round(x[m, k] / scale[m])      to nearest even
    scale_t[k]    = max_m |x[m, k]| / L
    codes_t[k, m] = round(x[m, k] / scale_t[k])

    x         float32, bfloat16 or float16 [M, K], any strides
    codes     int8, float8_e4m3fn or float8_e5m2 [M, K rounded up to a multiple of 16], 0 in the padding
    scale     float32 [M]
    codes_t   as codes [K, M rounded up to a multiple of 16]
    scale_t   float32 [K]

So of both copies a product can sum over contiguous elements: `scaled_mm`. ``tensorwise`` (float8): one scale, the
largest magnitude of all by L, and scale and scale_t are [1]. A pair that isn't wanted comes back as [0, 0] and [0].

A row of zeros has scale 1, and no scale is smaller than 2**-126. A row with a NaN or an infinity has scale NaN and
codes 0, so that its products are NaN.

With ``seed`` the rounding is by chance: up with the probability of the distance from below, so that the expectation is
x (to 2**-16 of a step). The draw of element (m, k), for both copies the same, is that of `lowbit_kernels.random_bits`
with the index m * (K rounded up to a multiple of 8) + k::

    int8:    floor((round(x / scale * 2**15) + the draw's upper 15 bits) / 2**15)
    float8:  as many bits of the draw as x / scale has more than the format are added to those, which are then cut off

What it costs: both copies of M x K 16-bit elements are 4 bytes an element, moved once. But no scale is known before all
is read, so x is read twice, 6 bytes, and the L2 cache has little of it the second time. On one H200
`quantize_rowcol.cu` moves those 6 at 84 to 91% of the copy's speed, so 56 to 61% of it by 4 bytes; with a second
reading that always hits, 67 to 76%. Blocks that keep tiles until the scales are known gain nothing
(``benchmarks/LOG.md``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels import quantize_rowcol_cuda, quantize_rowcol_triton
from lowbit_kernels.library import LIBRARY
from lowbit_kernels.random_bits import hashed, keys, multipliers, upper
from lowbit_kernels.triton_runtime import runs_on

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = {
    "int8": (torch.int8, 127.0),
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}

Result = tuple[Tensor, Tensor, Tensor, Tensor]


def quantize_rowcol(
    x: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
) -> Result:
    """codes, scale, codes_t, scale_t; shapes, dtypes and the formula are in the module's docstring.

    Args:
        x: [M, K].
        format: "int8", "e4m3" or "e5m2".
        rows, columns: which pairs are computed.
        tensorwise: one scale for all; float8 only.
        seed: int64, one element, on x's device: round by chance.

    Raises:
        TypeError: a dtype other than those above.
        ValueError: an unknown format, a shape other than [M, K], int8 with ``tensorwise``, or a seed of other than one
            element or on another device.
    """
    return torch.ops.lowbit.quantize_rowcol(x, format, rows, columns, tensorwise, seed)


def reference(
    x: Tensor,
    format: str,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
) -> Result:
    """The formula in PyTorch ops, on any device."""
    _check(x, format, tensorwise, seed)
    values, largest = x.to(torch.float32), FORMATS[format][1]
    draws = None if seed is None else _draws(x.shape[0], x.shape[1], seed)
    pairs: list[Tensor] = []
    for wanted, dim in ((rows, 1), (columns, 0)):
        codes, scale = _empty(x, format)
        if wanted:
            scale = _scale(values, largest, None if tensorwise else dim)
            spread = scale if tensorwise else scale.unsqueeze(dim)
            codes = _encode(values, spread, format, draws)
            codes = _padded(codes if dim else codes.T.contiguous())
        pairs += [codes, scale]
    return pairs[0], pairs[1], pairs[2], pairs[3]


def _scale(x: Tensor, largest: float, dim: int | None) -> Tensor:
    magnitude = x.abs()
    if dim is None:
        found = magnitude.amax().reshape(1) if x.numel() else x.new_zeros(1)
    else:
        found = magnitude.amax(dim) if x.shape[dim] else x.new_zeros(x.shape[1 - dim])
    # By a tensor: by a number CUDA multiplies with its reciprocal.
    scale = (found / torch.full_like(found, largest)).clamp(min=2.0**-126)
    scale = torch.where(found == 0, 1.0, scale)
    return torch.where(found.isfinite(), scale, torch.nan)


def _encode(x: Tensor, scale: Tensor, format: str, draws: Tensor | None) -> Tensor:
    dtype, largest = FORMATS[format]
    q = torch.where(scale.isnan(), 0.0, x / scale)
    if draws is not None:
        q = _round_by_chance(q, format, draws)
    elif format == "int8":
        q = q.round()
    return q.clamp(-largest, largest).to(dtype)


def _round_by_chance(q: Tensor, format: str, draws: Tensor) -> Tensor:
    if format == "int8":
        steps = (q * 32768.0).round().to(torch.int32)
        return ((steps + upper(draws, 15)) >> 15).to(torch.float32)
    dropped, normal = (20, 2.0**-6) if format == "e4m3" else (21, 2.0**-14)
    magnitude = q.abs()
    # Below `normal` the format's numbers are as far apart as those from there to twice that.
    shift = torch.where(magnitude < normal, normal, 0.0)
    bits = (magnitude + shift).view(torch.int32)
    bits = (bits + upper(draws, dropped)) & (-1 << dropped)
    return (bits.view(torch.float32) - shift).copysign(q)


def _draws(m: int, k: int, seed: Tensor) -> Tensor:
    """Of each element of [m, k]: int32."""
    octets = -(-k // 8)
    h = hashed(torch.arange(m * octets, device=seed.device), *keys(seed.reshape(())))
    return (h[:, None] * multipliers(seed.device)).view(m, 8 * octets)[:, :k]


def _padded(codes: Tensor) -> Tensor:
    extra = -codes.shape[1] % 16
    if not extra:
        return codes
    return F.pad(codes.view(torch.uint8), (0, extra)).view(codes.dtype)


def _empty(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((0, 0), dtype=FORMATS[format][0])
    return codes, x.new_empty((0,), dtype=torch.float32)


def allocate(x: Tensor, format: str, rows: bool, columns: bool, tensorwise: bool) -> Result:
    """Uninitialised results."""
    m, k = x.shape
    pairs: list[Tensor] = []
    for wanted, across, along in ((rows, m, k), (columns, k, m)):
        codes, scale = _empty(x, format)
        if wanted:
            codes = codes.new_empty((across, along + -along % 16))
            scale = scale.new_empty((1 if tensorwise else across,))
        pairs += [codes, scale]
    return pairs[0], pairs[1], pairs[2], pairs[3]


def _launch(
    x: Tensor,
    format: str,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
) -> Result:
    _check(x, format, tensorwise, seed)
    if x.numel() and (rows or columns):
        out = allocate(x, format, rows, columns, tensorwise)
        if quantize_rowcol_cuda.is_available(x.device):
            quantize_rowcol_cuda.quantize(x, format, rows, columns, tensorwise, seed, out)
            return out
        if runs_on(x.device) and quantize_rowcol_triton.takes(format, x.device):
            quantize_rowcol_triton.quantize(x, format, rows, columns, tensorwise, seed, out)
            return out
    return reference(x, format, rows, columns, tensorwise, seed)


def _fake(
    x: Tensor,
    format: str,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
) -> Result:
    _check(x, format, tensorwise, seed)
    return allocate(x, format, rows, columns, tensorwise)


def _check(x: Tensor, format: str, tensorwise: bool, seed: Tensor | None) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"quantize_rowcol takes x of {', '.join(map(str, FLOATS))}; got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(
            f"quantize_rowcol takes x [M, K], got {tuple(x.shape)}; flatten leading dimensions first"
        )
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if tensorwise and format == "int8":
        raise ValueError('tensorwise takes "e4m3" or "e5m2", got "int8"; leave it out')
    if seed is not None:
        if seed.dtype != torch.int64:
            raise TypeError(f"seed must be torch.int64, got {seed.dtype}")
        if seed.numel() != 1 or seed.device != x.device:
            raise ValueError(
                f"seed must hold one element on {x.device}, got {tuple(seed.shape)} on {seed.device}"
            )


LIBRARY.define(
    "quantize_rowcol(Tensor x, str format, bool rows=True, bool columns=True, bool tensorwise=False, "
    "Tensor? seed=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.impl("quantize_rowcol", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("lowbit::quantize_rowcol", _fake, lib=LIBRARY)


@dataclass(frozen=True)
class Case:
    """One call, with random arguments."""

    name: str
    m: int
    k: int
    format: str = "int8"
    dtype: torch.dtype = torch.bfloat16
    rows: bool = True
    columns: bool = True
    tensorwise: bool = False
    stochastic: bool = False
    layout: str = "contiguous"  # or "transposed", "strided", "misaligned"
    large: bool = False  # the shape of a real layer: for GPUs and benchmarks

    def arguments(self, device: torch.device | str = "cpu") -> tuple:
        """x, format, rows, columns, tensorwise, seed."""
        m, k = self.m, self.k
        shape = {"transposed": (k, m), "strided": (m, 2 * k), "misaligned": (m, k + 1)}
        x = torch.randn(shape.get(self.layout, (m, k)), device=device)
        # Rows and columns of different magnitudes.
        x = (
            x * torch.rand(x.shape[0], 1, device=device) * torch.rand(x.shape[1], device=device)
        ).to(self.dtype)
        x = {"transposed": x.T, "strided": x[:, ::2], "misaligned": x[:, 1:]}.get(self.layout, x)
        seed = torch.tensor([2**40 + 77], device=device) if self.stochastic else None
        return x, self.format, self.rows, self.columns, self.tensorwise, seed


SHAPES: list[tuple[str, int, int, dict]] = [
    ("typical", 128, 256, {}),
    ("several-tiles", 300, 520, {}),
    ("fp32", 130, 200, {"dtype": torch.float32}),
    ("fp16", 130, 200, {"dtype": torch.float16}),
    ("prime-everything", 131, 127, {}),
    ("prime-everything-fp32", 61, 67, {"dtype": torch.float32}),
    ("one-row", 1, 300, {}),
    ("one-column", 300, 1, {}),
    ("one-element", 1, 1, {}),
    ("no-rows", 0, 32, {}),
    ("no-columns", 16, 0, {}),
    ("rows-only", 70, 333, {"columns": False}),
    ("long-rows-only", 3, 20_001, {"columns": False}),
    ("columns-only", 70, 333, {"rows": False}),
    ("neither", 7, 9, {"rows": False, "columns": False}),
    ("transposed", 90, 70, {"layout": "transposed"}),
    ("strided", 90, 70, {"layout": "strided"}),
    ("misaligned", 140, 144, {"layout": "misaligned"}),
    ("by-chance", 140, 150, {"stochastic": True}),
    ("by-chance-odd", 61, 67, {"stochastic": True, "dtype": torch.float32}),
    ("by-chance-rows-only", 61, 67, {"stochastic": True, "columns": False}),
]
TENSORWISE: list[tuple[str, int, int, dict]] = [
    ("tensorwise", 140, 150, {}),
    ("tensorwise-rows-only", 140, 150, {"columns": False}),
    ("tensorwise-columns-only", 61, 67, {"rows": False, "dtype": torch.float32}),
    ("tensorwise-by-chance", 61, 67, {"stochastic": True}),
    ("tensorwise-no-rows", 0, 5, {}),
]
LARGE = [
    ("8192-square", 8192, 8192),
    ("llama-8b-attention", 8192, 4096),
    ("llama-8b-down", 8192, 14336),
    ("weight", 4096, 4096),
]
CASES = [
    *(Case(name, m, k, **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{name}", m, k, "e4m3", **options) for name, m, k, options in SHAPES),
    *(Case(f"e4m3-{n}", m, k, "e4m3", tensorwise=True, **o) for n, m, k, o in TENSORWISE),
    Case("e5m2", 130, 200, "e5m2"),
    Case("e5m2-by-chance", 130, 200, "e5m2", stochastic=True),
    Case("e5m2-tensorwise", 130, 200, "e5m2", tensorwise=True),
    *(Case(name, m, k, large=True) for name, m, k in LARGE),
    Case("rows-only-llama-8b-attention", 8192, 4096, columns=False, large=True),
    Case("by-chance-llama-8b-attention", 8192, 4096, stochastic=True, large=True),
    Case(
        "by-chance-rows-only-llama-8b-attention",
        *(8192, 4096),
        columns=False,
        stochastic=True,
        large=True,
    ),
]
