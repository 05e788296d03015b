"""Writes new tokens' keys and values to a cache, with a scale for each token and head, in one launch.

    slot      = (length + t) % window                                        for token t of T
    int8      scale = bf16(max |x| / 127), codes = round(x / scale), -127 … 127
    e4m3      scale = bf16(max |x| / 448), codes = e4m3(x / scale), -448 … 448
    4 bits    scale = bf16((max x - min x) / 15), zero = bf16(min x), codes = round((x - zero) / scale), 0 … 15
    x         ≈ codes · scale, in 4 bits codes · scale + zero

    key, value              float [B, K, T, E] and [B, K, T, F]
    key_codes, value_codes  int8 or float8_e4m3fn [B, K, S, W], W at least E. Values also in 4 bits, uint8 [B, K, S, W],
                            2 W at least F: a byte holds two codes, the one of the even channel in its low half. All
                            contiguous. Codes beyond the channels are 0
    key_scale, value_scale  bfloat16 [B, K, S], contiguous
    value_zero              the same for 4 bits, else None
    length                  int64 [1] or [B]: tokens that came before
    window                  slots in use, at most S. In a ring the slots begin again after the last; otherwise tokens
                            beyond the window are not written
    returns                 length + T: tokens that the cache has seen then

When more tokens come than the ring has slots, the last `window` are written. A scale is at least 2**-100, so zeros
have a scale and no NaN. In 4 bits it is at least 2**-10 of the largest magnitude. A token with a NaN or an infinity
has the scale NaN and the codes 0. All is rounded to nearest even, and all arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit_kernels.quantize.quantize_rowcol_triton import rounded_to_float8
from lowbit_kernels.runtime.launches import ran
from lowbit_kernels.runtime.op import op
from lowbit_kernels.runtime.triton_runtime import jit, runs_on, tl, triton

LEAST = 2.0**-100
"""The smallest scale. Its reciprocal is far from the ends of float32."""
NARROW = 2.0**-10
"""The smallest scale of 4 bits, as a share of the largest magnitude: it keeps zero / scale small."""


CACHE: dict[str, Any] = {
    "key_codes": "int8|float8_e4m3fn [B, K, S, W]",
    "key_scale": "bfloat16 [B, K, S]",
    "value_codes": "int8|float8_e4m3fn|uint8 [B, K, S, V]",
    "value_scale": "bfloat16 [B, K, S]",
    "length": "int64 [1] or [B]",
    "value_zero": "bfloat16 [B, K, S]",
}
"""The operands of a cache, as `op` declares them."""


@op(
    "empty(torch.int64, len(length))",
    writes=("key_codes", "key_scale", "value_codes", "value_scale", "value_zero"),
    key="float [B, K, T, E]",
    value="float [B, K, T, F]",
    **CACHE,
    rules={
        "0 < window <= S": "window must be from 1 to the {S} slots of the cache, got {window}",
        "check_cache((key_codes, key_scale, None, E), (value_codes, value_scale, value_zero, F))": "",
    },
)
def quantize_to_cache(
    key: Tensor,
    value: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    length: Tensor,
    value_zero: Tensor | None = None,
    *,
    window: int,
    ring: bool = False,
) -> Tensor:
    """Quantize tokens into a cache; see the module's docstring."""
    tokens = key.shape[2]
    skipped = max(tokens - window, 0) if ring else 0
    at = torch.arange(skipped, tokens, device=key.device) + length[:, None]  # [1 or B, T]
    at = (at % window if ring else at).expand(key.shape[0], -1)
    keys = quantized(key[:, :, skipped:], key_codes.dtype, key_codes.shape[3])
    values = quantized(value[:, :, skipped:], value_codes.dtype, value_codes.shape[3])
    caches = (key_codes, key_scale, None, value_codes, value_scale, value_zero)
    for cache, new in zip(caches, (*keys, *values), strict=True):
        if cache is None or new is None:
            continue
        for b, slots in enumerate(at):
            inside = slots < window
            raw(cache)[b, :, slots[inside]] = raw(new)[b, :, inside]
    return length + tokens


reference = quantize_to_cache.reference


def quantized(x: Tensor, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero) of each row of x by the formula above; zero is None for 8 bits.

    Args:
        x: rows of any leading shape.
        dtype: of the codes.
        width: bytes of a row of codes; more than x needs are 0.
    """
    x = x.float()
    most = x.abs().amax(-1)
    finite = most.isfinite()
    zero = None
    if dtype == torch.uint8:
        low = x.amin(-1).to(torch.bfloat16)
        span = ((x.amax(-1) - x.amin(-1)) / _filled(most, 15)).maximum(most * NARROW)
        scale = torch.where(finite, span.clamp(min=LEAST), torch.nan).to(torch.bfloat16)
        zero = torch.where(finite, low, torch.nan).to(torch.bfloat16)
        codes = (x - zero.float()[..., None]) / scale.float()[..., None]
        codes = codes.round().nan_to_num_(0.0).clamp_(0, 15).to(torch.uint8)
        padded = torch.nn.functional.pad(codes, (0, 2 * width - codes.shape[-1]))
        return padded[..., ::2] | padded[..., 1::2] << 4, scale, zero
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (most / _filled(most, largest)).clamp(min=LEAST)
    scale = torch.where(finite, scale, torch.nan).to(torch.bfloat16)
    codes = (x / scale.float()[..., None]).nan_to_num_(0.0).clamp_(-largest, largest)
    codes = (codes.round() if dtype == torch.int8 else codes).to(dtype)
    padded = torch.nn.functional.pad(raw(codes), (0, width - codes.shape[-1]))
    return padded.view(dtype), scale, zero


def raw(tensor: Tensor) -> Tensor:
    """The tensor with a dtype that PyTorch's operations of copying take."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _filled(like: Tensor, value: float) -> Tensor:
    """A divisor as a tensor, since CUDA multiplies by the reciprocal of a Python number."""
    return torch.full_like(like, value)


def dequantized(codes: Tensor, scale: Tensor, zero: Tensor | None, width: int) -> Tensor:
    """The values of codes, float32 [..., width]."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    values = codes[..., :width].float() * scale.float()[..., None]
    return values if zero is None else values + zero.float()[..., None]


def check_cache(*parts: tuple[Tensor, Tensor, Tensor | None, int]) -> bool:
    """Raise ValueError unless all (codes, scale, zero, width) are contiguous, have room for heads of this width,
    and have zeros where the codes need them."""
    for codes, scale, zero, width in parts:
        is_4bit = codes.dtype == torch.uint8
        if codes.shape[3] * (1 + is_4bit) < width:
            raise ValueError(
                f"codes of {codes.shape[3]} bytes a token and head hold no head of {width}; "
                "make the cache for this model"
            )
        if is_4bit != (zero is not None):
            raise ValueError(f"4-bit codes have zeros and others have none, got {codes.dtype}")
        if not all(t is None or t.is_contiguous() for t in (codes, scale, zero)):
            raise ValueError("codes, scales and zeros of a cache must be contiguous")
    return True


@jit
def _rounded_to_bf16(x):
    """The nearest bfloat16 of a finite float32, ties to even; the interpreter's casts truncate."""
    bits = x.to(tl.int32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & -0x10000).to(tl.float32, bitcast=True)


@jit
def _row(
    x,
    codes,
    scales,
    zeros,
    width,  # bytes of a token and head
    E,  # channels
    LARGEST: tl.constexpr,  # 127, 448, or 15 for 4 bits
    BLOCK: tl.constexpr,  # channels, 2 a byte in 4 bits
):
    """Quantize one token and head; all pointers point at it."""
    LEAST: tl.constexpr = 7.888609052210118e-31
    columns = tl.arange(0, BLOCK)
    own = tl.load(x + columns, mask=columns < E, other=0).to(tl.float32)
    most = tl.max(tl.where(own == own, tl.abs(own), float("inf")), 0)
    if LARGEST == 15:
        low = tl.min(tl.where(columns < E, own, float("inf")), 0)
        high = tl.max(tl.where(columns < E, own, float("-inf")), 0)
        zero = _rounded_to_bf16(low)
        scale = tl.maximum(tl.div_rn(high - low, 15.0), most * 0.0009765625)
    else:
        zero = 0.0
        scale = tl.div_rn(most, LARGEST)
    scale = _rounded_to_bf16(tl.maximum(scale, LEAST))
    finite = most < float("inf")
    exact = tl.div_rn(own - zero, tl.broadcast_to(scale, own.shape))
    exact = tl.where(finite, exact, 0.0)
    scale = tl.where(finite, scale, float("nan"))
    tl.store(scales, scale.to(tl.bfloat16))
    if LARGEST == 15:
        tl.store(zeros, tl.where(finite, zero, float("nan")).to(tl.bfloat16))
        exact = tl.minimum(tl.maximum(exact, 0.0), 15.0)
        code = tl.where(columns < E, (exact + 12582912.0) - 12582912.0, 0.0).to(tl.int32)
        even, odd = tl.split(code.reshape(BLOCK // 2, 2))
        at = tl.arange(0, BLOCK // 2)
        tl.store(codes + at, (even | odd << 4).to(tl.uint8), mask=at < width)
    else:
        exact = tl.minimum(tl.maximum(exact, -LARGEST), LARGEST)
        if LARGEST == 127:
            exact = (exact + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds half to even
        if LARGEST == 448:
            exact = rounded_to_float8(exact, exact, False, 448.0)
        code = exact.to(codes.dtype.element_ty)
        tl.store(codes + columns, code, mask=columns < width)


@jit
def _kernel(
    key,
    value,
    key_codes,
    key_scale,
    value_codes,
    value_scale,
    value_zero,
    length,
    seen,
    length_stride,
    heads,
    tokens,
    skipped,
    capacity,
    window,
    key_width,
    value_width,
    E,
    F,
    key_batch,  # strides
    key_head,
    key_token,
    value_batch,
    value_head,
    value_token,
    RING: tl.constexpr,
    KEY_LARGEST: tl.constexpr,
    VALUE_LARGEST: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = skipped + tl.program_id(0).to(tl.int64) % (tokens - skipped)
    pair = tl.program_id(0).to(tl.int64) // (tokens - skipped)
    batch, head = pair // heads, pair % heads
    before = tl.load(length + batch * length_stride)
    if (token == tokens - 1) & (head == 0) & (tl.program_id(1) == 0):
        tl.store(seen + batch * length_stride, before + tokens)
    slot = before + token
    if RING:
        slot = slot % window
    if slot < window:
        at = pair * capacity
        if tl.program_id(1) == 0:
            key += batch * key_batch + head * key_head + token * key_token
            key_codes += (at + slot) * key_width
            _row(key, key_codes, key_scale + at + slot, None, key_width, E, KEY_LARGEST, KEY_BLOCK)
        else:
            value += batch * value_batch + head * value_head + token * value_token
            value_codes += (at + slot) * value_width
            value_scale += at + slot
            value_zero += at + slot
            _row(value, value_codes, value_scale, value_zero, value_width, F, VALUE_LARGEST, VALUE_BLOCK)  # fmt: skip


LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448, torch.uint8: 15}


@quantize_to_cache.kernel
def _launch(
    key, value, key_codes, key_scale, value_codes, value_scale, length, value_zero, window, ring
) -> Tensor | None:
    """The Triton kernel where it runs, else the reference."""
    if not runs_on(key.device) or not key.numel() or not value.numel():
        return None
    ran("quantize_to_cache", "triton")
    key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
    batch, heads, tokens, width = key.shape
    skipped = max(tokens - window, 0) if ring else 0
    bytes_ = key_codes.shape[3], value_codes.shape[3]
    value_channels = bytes_[1] * (1 + (value_codes.dtype == torch.uint8))
    seen = torch.empty_like(length)
    with torch.cuda.device_of(key):
        _kernel[(batch * heads * (tokens - skipped), 2)](
            *(key, value, key_codes, key_scale),
            *(value_codes, value_scale, value_scale if value_zero is None else value_zero),
            *(length.contiguous(), seen, int(len(length) > 1)),
            *(heads, tokens, skipped, key_codes.shape[2], window),
            *(*bytes_, width, value.shape[3]),
            *(*key.stride()[:3], *value.stride()[:3]),
            RING=ring,
            KEY_LARGEST=LARGEST[key_codes.dtype],
            VALUE_LARGEST=LARGEST[value_codes.dtype],
            KEY_BLOCK=triton.next_power_of_2(bytes_[0]),
            VALUE_BLOCK=triton.next_power_of_2(value_channels),
            num_warps=1,
        )
    return seen
