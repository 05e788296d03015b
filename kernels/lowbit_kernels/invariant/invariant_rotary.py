"""The cosines and sines of rotary embeddings (arXiv 2104.09864) with the same bits on every device.

    a[..., j] = position[...] · inv_freq[j]              float32, rounded once
    cos, sin  = those of a, each twice along the last dimension, times `scale`

    position    int64 [...], below 2^24
    inv_freq    float32 [H]
    cos, sin    out_dtype [..., 2 H]

The angle is reduced by multiples of π/2 in three parts, in float64, and the functions are Taylor sums of degree 15 and
16, each operation rounded on its own. About one result in 2^25 differs from the
rounded cosine or sine of a.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit_kernels.invariant.arithmetic import EXACT, in_float32
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, launch, runs_on, stored_dtype, tl, triton

BLOCK = 256
_MAGIC = 1.5 * 2.0**52
_TWO_OVER_PI = 2.0 / math.pi
_HIGH, _MIDDLE, _LOW = 1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21
"""π/2 in parts of 33 bits: products with integers below 2^20 are exact."""
_SIN = [(-1.0) ** i / math.factorial(2 * i + 1) for i in range(8)]
_COS = [(-1.0) ** i / math.factorial(2 * i) for i in range(9)]


@op(
    "(empty(out_dtype, *position.shape, 2 * H), empty(out_dtype, *position.shape, 2 * H))",
    planned=True,
    position="int64 [...]",
    inv_freq="float32 [H]",
    out_dtype="float",
)
def invariant_rotary(
    position: Tensor, inv_freq: Tensor, *, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 2 H] of the angles of positions [...]; see the module's docstring."""
    angle = (position[..., None].float() * inv_freq).double()
    shifted = angle * _TWO_OVER_PI + _MAGIC
    n = shifted - _MAGIC
    r = ((angle - n * _HIGH) - n * _MIDDLE) - n * _LOW
    square = r * r
    sine, cosine = torch.full_like(r, _SIN[-1]), torch.full_like(r, _COS[-1])
    for c in reversed(_SIN[:-1]):
        sine = sine * square + c
    for c in reversed(_COS[:-1]):
        cosine = cosine * square + c
    sine = sine * r
    quarter = n.to(torch.int64) & 3
    is_odd = (quarter & 1) == 1
    sin, cos = torch.where(is_odd, cosine, sine), torch.where(is_odd, sine, cosine)
    sin = torch.where(quarter >= 2, -sin, sin)
    cos = torch.where((quarter == 1) | (quarter == 2), -cos, cos)
    wide = [(part.float() * in_float32(scale)).to(out_dtype) for part in (cos, sin)]
    cos, sin = (torch.cat([part, part], -1) for part in wide)
    return cos, sin


reference = invariant_rotary.reference


@jit
def _kernel(position, inv_freq, cos_to, sin_to, count, half, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    token, column = at // half, at % half
    own = tl.load(position + token, mask=inside, other=0).to(tl.float32)
    angle = (own * tl.load(inv_freq + column, mask=inside, other=0.0)).to(tl.float64)
    n = (angle * 0.6366197723675814 + 6755399441055744.0) - 6755399441055744.0
    r = ((angle - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487959506e-21
    square = r * r
    sine = square * -7.647163731819816e-13 + 1.6059043836821613e-10
    sine = sine * square + -2.505210838544172e-08
    sine = sine * square + 2.7557319223985893e-06
    sine = sine * square + -0.0001984126984126984
    sine = sine * square + 0.008333333333333333
    sine = sine * square + -0.16666666666666666
    sine = (sine * square + 1.0) * r
    cosine = square * 4.779477332387385e-14 + -1.1470745597729725e-11
    cosine = cosine * square + 2.08767569878681e-09
    cosine = cosine * square + -2.755731922398589e-07
    cosine = cosine * square + 2.48015873015873e-05
    cosine = cosine * square + -0.001388888888888889
    cosine = cosine * square + 0.041666666666666664
    cosine = cosine * square + -0.5
    cosine = cosine * square + 1.0
    quarter = n.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    sin, cos = tl.where(is_odd, cosine, sine), tl.where(is_odd, sine, cosine)
    sin = tl.where(quarter >= 2, -sin, sin).to(tl.float32) * scale
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos).to(tl.float32) * scale
    first = token * (2 * half) + column
    for part in tl.static_range(2):
        tl.store(cos_to + first + part * half, cos.to(cos_to.dtype.element_ty), mask=inside)
        tl.store(sin_to + first + part * half, sin.to(sin_to.dtype.element_ty), mask=inside)


@invariant_rotary.kernel
def _launch(position, inv_freq, scale, out_dtype) -> tuple[Tensor, Tensor] | None:
    """The Triton kernel where it runs, else the reference."""
    half = len(inv_freq)
    count = position.numel() * half
    if not runs_on(position.device) or count == 0:
        return None
    ran("invariant_rotary", "triton")
    shape, dtype = (*position.shape, 2 * half), stored_dtype(out_dtype, position.device)
    cos, sin = (torch.empty(shape, dtype=dtype, device=position.device) for _ in range(2))
    given = position.contiguous(), inv_freq.contiguous(), cos, sin, count, half, in_float32(scale)
    launch(
        "invariant_rotary",
        (position, inv_freq),
        (cos, sin),
        _kernel,
        triton.cdiv(count, BLOCK),
        given,
        {"BLOCK": BLOCK, **EXACT},
    )
    return cos.to(out_dtype), sin.to(out_dtype)
