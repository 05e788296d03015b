"""A matrix quantized along its rows and, in the same pass, along its columns; the second copy is transposed.

    scale[m]      = max_k |x[m, k]| / L                          L = 448 (e4m3), 57344 (e5m2)
    scale[m]      = max(-min_k x[m, k] / 128, max_k x[m, k] / 127)   int8
    codes[m, k]   = round(x[m, k] * (1 / scale[m]))              to nearest even
    scale_t[k], codes_t[k, m]                                    the same along the columns

    x         float32, bfloat16 or float16 [M, K], any strides
    codes     int8, float8_e4m3fn or float8_e5m2 (`format` "int8", "e4m3" or "e5m2") [M, K rounded up to a multiple of
              16], 0 in the padding
    scale     float32 [M]
    codes_t   like codes, [K, M rounded up to a multiple of 16]
    scale_t   float32 [K]

So a product (`scaled_mm`) can sum over contiguous elements of either copy. ``tensorwise`` (float8 only): one scale, the
largest magnitude of the matrix divided by L; scale and scale_t are then [1]. A pair that is not requested
(`rows`, `columns`) comes back as [0, 0] and [0].

With ``row_factor``, float32 [K], the row copy is that of x[m, k] * row_factor[k], the product rounded to float32; the
transposed copy is still that of x. With ``row_scales`` the transposed copy takes over the row copy: codes_t[k, m] =
codes[m, k], and scale_t is [M], the scales of the rows. So the products of a weight [N, K] for its output and for its
input's gradient can read the same codes. These scales vary along the sum of the input's gradient, so the product cannot
apply them at the end. As ``row_factor`` they are multiplied into the output's gradient [M, N] first.

Each float32 operation is rounded once. So codes and scales of rows equal those of ``Spec.quantize`` in the dynamic
schemes of lowbit, except that a row of zeros has scale 1 here. No scale is smaller than 2**-126. A row with a NaN or an
infinity has scale NaN and codes 0, so that its products are NaN.

With ``seed``, int64 of one element, the rounding is stochastic: up with a probability equal to the distance from the
number below, so that the expectation is x (to 2**-16 of a step). Both copies of element (m, k) use the same bits,
`lowbit_kernels.elementwise.random_bits` with the index m * (K rounded up to a multiple of 8) + k::

    int8:    floor((round(x / scale * 2**15) + the draw's upper 15 bits) / 2**15)
    float8:  the bits that x / scale has beyond the format's are summed with as many bits of the draw, then cut off

No scale is known before the whole matrix is read, so x is read twice: 6 bytes move for each 16-bit element and two
codes. On an H200 `quantize_rowcol_sm90.cu` moves them at 84 to 91% of the speed of a copy (``benchmarks/LOG.md``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit_kernels.elementwise.random_bits import hashed, keys, multipliers, upper
from lowbit_kernels.quantize import quantize_rowcol_sm90, quantize_rowcol_triton, quantize_rows
from lowbit_kernels.runtime import nvrtc
from lowbit_kernels.runtime.launch_plan import Buffer
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import runs_on

FORMATS = {
    "int8": (torch.int8, 127.0),
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
}

Result = tuple[Tensor, Tensor, Tensor, Tensor]


def check_format(format: str, tensorwise: bool) -> None:
    """Raise ValueError for an unknown format, and for one scale of int8 codes."""
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if tensorwise and format == "int8":
        raise ValueError('tensorwise takes "e4m3" or "e5m2", got "int8"; leave it out')


@op(
    "allocate(x, format, rows, columns, tensorwise, row_scales)",
    planned=True,
    x="float [M, K]; flatten leading dimensions first",
    seed="int64 [] or [1]",
    row_factor="float32 [K]",
    rules={
        "check_format(format, tensorwise)": "",
        "row_factor is None or not (tensorwise or row_scales)": (
            "row_factor takes neither tensorwise nor row_scales; leave them out"
        ),
    },
)
def quantize_rowcol(
    x: Tensor,
    format: str,
    *,
    rows: bool = True,
    columns: bool = True,
    tensorwise: bool = False,
    seed: Tensor | None = None,
    row_factor: Tensor | None = None,
    row_scales: bool = False,
) -> Result:
    """codes, scale, codes_t, scale_t; see the module's docstring."""
    values = x.to(torch.float32)
    draws = None if seed is None else draws_of(x.shape[0], x.shape[1], seed)
    pairs: list[Tensor] = []
    for wanted, along in ((rows, 1), (columns, 0)):
        codes, scale = _empty(x, format)
        if wanted:
            own = values if row_factor is None or not along else values * row_factor
            dim = 1 if row_scales else along
            scale = _scale(own, format, None if tensorwise else dim)
            spread = scale if tensorwise else scale.unsqueeze(dim)
            codes = encode(own, spread, format, draws)
            codes = _padded(codes if along else codes.T.contiguous())
        pairs += [codes, scale]
    return pairs[0], pairs[1], pairs[2], pairs[3]


reference = quantize_rowcol.reference


def codes_of(
    x: Tensor, format: str, dtype: torch.dtype, tensorwise: bool = False
) -> tuple[Tensor, Tensor]:
    """The codes of rows as numbers of `dtype`, and the scales, of checked arguments: "int8" or "e4m3".

    `dtype` must represent them exactly, as float16 and bfloat16 do.
    """
    found = quantize_rows.kernel_of(x, format, tensorwise)
    if found is not None:
        return quantize_rows.quantize(found, x, format, dtype, tensorwise)
    codes, scale, _, _ = reference(x, format, True, False, tensorwise)
    return codes.to(dtype), scale


def _scale(x: Tensor, format: str, dim: int | None) -> Tensor:
    size = sizes(x, format)
    if dim is None:
        found = size.amax().reshape(1) if x.numel() else x.new_zeros(1)
    else:
        found = size.amax(dim) if x.shape[dim] else x.new_zeros(x.shape[1 - dim])
    return scale_of(found, format)


def sizes(x: Tensor, format: str) -> Tensor:
    """For int8 the scale that each number of x alone needs, more than 0 unless the number is, else its magnitude."""
    if format != "int8":
        return x.abs()
    needed = x.abs() / torch.where(x < 0, 128.0, 127.0).to(x.dtype)
    return torch.where(x == 0, 0.0, needed.clamp(min=2.0**-149))


def scale_of(found: Tensor, format: str) -> Tensor:
    """The scales of rows or columns, `found` the largest of their `sizes`."""
    # The divisor is a tensor, since CUDA multiplies by the reciprocal of a Python number.
    scale = found if format == "int8" else found / torch.full_like(found, FORMATS[format][1])
    scale = torch.where(found == 0, 1.0, scale.clamp(min=2.0**-126))
    return torch.where(found.isfinite(), scale, torch.nan)


def encode(x: Tensor, scale: Tensor, format: str, draws: Tensor | None) -> Tensor:
    dtype, largest = FORMATS[format]
    q = x / scale if draws is not None else x * (torch.ones_like(scale) / scale)
    q = torch.where(scale.isnan(), 0.0, q)  # also where x became NaN by a factor
    if draws is not None:
        q = _round_stochastically(q, format, draws)
    elif format == "int8":
        q = q.round()
    return q.clamp(-largest - (format == "int8"), largest).to(dtype)


def _round_stochastically(q: Tensor, format: str, draws: Tensor) -> Tensor:
    if format == "int8":
        steps = (q * 32768.0).round().to(torch.int32)
        return ((steps + upper(draws, 15)) >> 15).to(torch.float32)
    dropped, normal = (20, 2.0**-6) if format == "e4m3" else (21, 2.0**-14)
    magnitude = q.abs()
    # Below `normal`, the format's numbers are as far apart as between `normal` and 2 * `normal`.
    shift = torch.where(magnitude < normal, normal, 0.0).to(q.dtype)
    bits = (magnitude + shift).view(torch.int32)
    bits = (bits + upper(draws, dropped)) & (-1 << dropped)
    return (bits.view(torch.float32) - shift).copysign(q)


def draws_of(m: int, k: int, seed: Tensor) -> Tensor:
    """The draw of each element of [m, k], int32."""
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


def results_of(
    m: int, k: int, format: str, rows: bool, columns: bool, tensorwise: bool, row_scales: bool
) -> tuple[Buffer, ...]:
    """codes, scale, codes_t and scale_t, empty where they are not wanted.

    Args:
        m, k: rows and columns of x.
        format, rows, columns, tensorwise, row_scales: as the op takes them.
    """
    dtype, _ = FORMATS[format]
    found: list[Buffer] = []
    for wanted, across, along in ((rows, m, k), (columns, k, m)):
        scales = 1 if tensorwise else m if row_scales else across
        found.append(Buffer((across, along + -along % 16) if wanted else (0, 0), dtype))
        found.append(Buffer((scales,) if wanted else (0,), torch.float32))
    return tuple(found)


def allocate(
    x: Tensor, format: str, rows: bool, columns: bool, tensorwise: bool, row_scales: bool = False
) -> Result:
    """Uninitialised results."""
    m, k = x.shape
    made = [b.empty(x) for b in results_of(m, k, format, rows, columns, tensorwise, row_scales)]
    return made[0], made[1], made[2], made[3]


@quantize_rowcol.kernel
def _launch(x, format, rows, columns, tensorwise, seed, row_factor, row_scales) -> Result | None:
    arguments = (x, format, rows, columns, tensorwise, seed, row_factor, row_scales)
    if not (x.numel() and (rows or columns)):
        return None
    on_hopper, found = nvrtc.runs_on_hopper(x.device), None
    if rows and not columns and seed is None and row_factor is None:
        found = quantize_rows.kernel_of(x, format, tensorwise)
    if found is not None and (found == "sm90" or not on_hopper):
        ran("quantize_rowcol", found)
        own = found, x, format, FORMATS[format][0], tensorwise, "quantize_rowcol"
        return *quantize_rows.quantize(*own), *_empty(x, format)
    if on_hopper:
        ran("quantize_rowcol", "sm90")
        results = results_of(x.shape[0], x.shape[1], format, rows, columns, tensorwise, row_scales)
        return quantize_rowcol_sm90.quantize(*arguments, results)
    if runs_on(x.device) and quantize_rowcol_triton.takes(format, x.device):
        ran("quantize_rowcol", "triton")
        out = allocate(x, format, rows, columns, tensorwise, row_scales)
        quantize_rowcol_triton.quantize(*arguments, out)
        return out
    return None
